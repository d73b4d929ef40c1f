r"""Let nodes reach a SuperLink, and nobody reach more of it.

Flower's SuperLink serves its nodes, its operators and its own processes on one port,
and asks only nodes who they are. Start it on the loopback, this gate on the loopback as
well, and before the gate HAProxy with the kit's haproxy.cfg, which nodes reach: calls
that registered nodes make are passed on, all others refused.

  safedshb gate --listen 127.0.0.1:9093 --superlink 127.0.0.1:9091 \
      --ssl-ca-certfile ca.crt --state-dir gate

For a trial on one machine no proxy is needed: with --ssl-certfile and --ssl-keyfile the
gate shows the certificate itself, to nodes on the loopback.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="on the loopback"
    )
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--ssl-ca-certfile", required=True, help="signed the SuperLink's certificate"
    )
    parser.add_argument(
        "--state-dir",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="what nodes were asked and have sent, for the next start",
    )
    parser.add_argument(
        "--ssl-certfile", type=Path, help="shown to nodes if there is no proxy"
    )
    parser.add_argument("--ssl-keyfile", type=Path)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    import asyncio
    import logging
    import ssl

    from flwr_safedshb.atomic_io import make_private_folder
    from flwr_safedshb.node.gate.gate import Gate, open_listener

    host, port = _parse_address(arguments.listen)
    certificate = (arguments.ssl_certfile, arguments.ssl_keyfile)
    if certificate.count(None) == 1:
        raise ValueError("--ssl-certfile and --ssl-keyfile belong together")
    trusted = ssl.create_default_context(cafile=arguments.ssl_ca_certfile)
    folder = make_private_folder(arguments.state_dir)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("safedshb").setLevel(logging.INFO)

    async def serve() -> None:
        gate = Gate(
            arguments.superlink,
            trusted,
            folder,
            certificate=None if None in certificate else certificate,
        )
        with open_listener(host, port) as listener:
            logging.getLogger("safedshb.gate").info("Listening on %s", arguments.listen)
            await gate.serve(listener)

    asyncio.run(serve())
    return 0


def _parse_address(listen: str) -> tuple[str, int]:
    """Return the loopback address and the port to listen on."""
    import ipaddress

    host, _, port = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        is_fit = address.is_loopback and port.isdigit()
    except ValueError:
        is_fit = False
    if not is_fit:
        raise ValueError(
            f"--listen={listen!r} must be an address of the loopback and a port, such "
            "as 127.0.0.1:9093; nodes elsewhere come through the kit's haproxy.cfg"
        )
    return str(address), int(port)
