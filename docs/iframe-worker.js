// Browsers start no worker for a page that is opened from a disk. The search runs in a
// hidden frame then, which gets and sends the worker's messages.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }))
          resolve(inside)
        }
      })
      frame.hidden = true
      frame.srcdoc = `<script src="${address}"></script>`
      document.body.append(frame)
    }

    async postMessage(data) {
      const inside = await this.ready
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
