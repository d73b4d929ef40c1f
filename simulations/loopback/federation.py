"""One federation: its SuperLink and its SuperNodes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from simulations.loopback.credentials import SCRIPT, Credentials
from simulations.loopback.processes import (
    OFFLINE,
    ROOT,
    Processes,
    Termination,
    Value,
    free_port,
)
from simulations.loopback.runs import NAME, Runs
from simulations.loopback.watch import LOG

_REJOIN_SECONDS = 180.0
# What a SuperNode says once it is connected.
_JOINED = "SuperNode ID:"
_WHOLE = 10**9
# How often a Flower process looks for work, where that can be set; the default is 1.
_POLL_SECONDS = "0.2"


class Deployment(Runs):
    """Processes of a federation; leave the context to stop them all.

    Parameters
    ----------
    folder : Path
        Keeps Flower's own files, the logs, the SuperLink's database, credentials, and
        for node i its ``state-dir`` node-i.
    num_nodes : int
    node_config : mapping
        Further entries of every node's config.
    app : Path
        The Flower app to run; by default this repository.
    virtual : bool
        Let the SuperLink simulate the nodes, with Ray, in place of SuperNodes.
    secure : bool
        TLS, and only SuperNodes whose keys are registered. A federation of virtual
        nodes has no use for it and is never secure.
    absent : collection of int
        Nodes that are registered and not started: somebody else speaks for them.
    proxied : bool
        Let nodes come through HAProxy with the kit's configuration, if secure; else the
        gate shows the certificate itself.

    Attributes
    ----------
    credentials : Credentials or None
    node_ids : dict of int to int
        Flower's id of each registered node, if secure.
    """

    def __init__(
        self,
        folder: Path,
        num_nodes: int,
        node_config: Mapping[str, Value] | None = None,
        app: Path = ROOT,
        virtual: bool = False,
        secure: bool = True,
        absent: Collection[int] = (),
        proxied: bool = False,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.gate_port = self.port
        self.credentials: Credentials | None = None
        self.node_ids: dict[int, int] = {}
        self._node_config = dict(node_config or {})
        self._absent = frozenset(absent)
        self._secure = secure and not virtual
        self._checker_port = free_port() if proxied else 0
        processes = Processes(
            folder,
            {
                **OFFLINE,
                "FLWR_HOME": str(folder / "flwr"),
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _POLL_SECONDS,
            },
        )
        super().__init__(processes, app, num_nodes, virtual)
        self.kill = self._processes.kill
        self.stop = self._processes.stop
        self.is_running = self._processes.is_running
        self.log = self._processes.log
        self.close = self._processes.close
        self.start_program = self._processes.start
        self.pid = self._processes.pid

    def __enter__(self) -> Self:
        self._termination = Termination()
        try:
            self._start()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.close()
        self._termination.over()

    def _start(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        if self._secure:
            self.credentials = Credentials(self.folder / "credentials")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
            f'address = "127.0.0.1:{self.port}"\n{self._trust()}\n'
        )
        LOG.info("starting the SuperLink")
        self.start_superlink()
        if self.credentials is not None:
            self.gate_port = free_port()
            self.start_gate()
            if self._checker_port:
                self.start_proxy()
        if self._virtual:
            return
        if self.credentials is not None:
            LOG.info("registering %d nodes", self._num_nodes)
        for index in range(self._num_nodes):
            if self.credentials is not None:
                key = self.credentials.node_key(f"node-{index}")
                self.node_ids[index] = self.register(key.with_suffix(".pub"))
        LOG.info("starting the nodes")
        for index in range(self._num_nodes):
            if index not in self._absent:
                self.start_node(index)

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again: its nodes and runs are on disk."""
        security = ["--insecure"]
        if self.credentials is not None:
            security = [
                *("--ssl-ca-certfile", str(self.credentials.ca)),
                *("--ssl-certfile", str(self.credentials.certificate)),
                *("--ssl-keyfile", str(self.credentials.certificate_key)),
                "--enable-supernode-auth",
            ]
        self._processes.start(
            "superlink",
            "flower-superlink",
            *security,
            "--disable-runtime-dependency-installation",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.folder / "superlink.sqlite")),
            *(["--simulation"] if self._virtual else []),
        )
        self._processes.wait_for_port("superlink", self.port)

    def start_gate(self) -> None:
        """Start the gate, through which the nodes of a secure federation come."""
        assert self.credentials is not None
        port = self._checker_port or self.gate_port
        shown = [
            *("--ssl-certfile", str(self.credentials.certificate)),
            *("--ssl-keyfile", str(self.credentials.certificate_key)),
        ]
        self._processes.start(
            "gate",
            *("safedshb", "gate"),
            *("--listen", f"127.0.0.1:{port}"),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--ssl-ca-certfile", str(self.credentials.ca)),
            *("--state-dir", str(self.folder / "gate")),
            *([] if self._checker_port else shown),
        )
        self._processes.wait_for_port("gate", port)

    def start_proxy(self) -> None:
        """Start the proxy before the gate."""
        assert self.credentials is not None
        found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
        if found is None:
            raise FileNotFoundError("haproxy is not installed: apt install haproxy")
        self._processes.start(
            "proxy",
            *(found, "-f", str(SCRIPT.with_name("haproxy.cfg"))),
            environment={
                "GATE": f"127.0.0.1:{self.gate_port}",
                "GATE_CERTIFICATE": str(self.credentials.certificate),
                "CHECKER": f"127.0.0.1:{self._checker_port}",
            },
        )
        self._processes.wait_for_port("proxy", self.gate_port)

    def start_node(
        self,
        index: int,
        *,
        name: str | None = None,
        key: Path | None = None,
        root_certificates: Path | None = None,
        config: Mapping[str, Value] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start SuperNode `index`, or start it again after `kill`.

        Parameters
        ----------
        index : int
            Its partition of the data.
        name : str, optional
            Of the process and its log; by default ``node-<index>``.
        key : Path, optional
            Its private key; by default the one that was registered for it.
        root_certificates : Path, optional
            What it trusts; by default the federation's own CA.
        config : mapping, optional
            Replaces entries of its config.
        environment : mapping, optional
            Added to its environment.
        """
        entries: dict[str, Value] = {
            "partition-id": index,
            "num-partitions": self._num_nodes,
            "state-dir": str(self.state_dir(index)),
            **self._node_config,
            **(config or {}),
        }
        path = self.folder / f"{name or f'node-{index}'}.toml"
        text = "".join(f"{k} = {json.dumps(v)}\n" for k, v in entries.items())
        where = f"127.0.0.1:{self.gate_port}"
        insecure = ["--insecure", where]
        if self.credentials is not None:
            mine = key or self.credentials.node_key(f"node-{index}")
            trusted = root_certificates or self.credentials.ca
            text += (
                f'[supernode]\nsuperlink = "{where}"\n'
                f'root-certificates = "{trusted}"\nkey = "{mine}"\n'
            )
            insecure = []
        path.write_text(text)
        self._processes.start(
            name or f"node-{index}",
            *("safedshb", "node", str(path), *insecure),
            environment=environment,
        )

    def restart_node(self, index: int) -> None:
        """Start a killed node again, and wait until it has joined.

        Without a gate Flower refuses a node whose key it believes to be connected, for
        up to a minute after a kill; the node tries again meanwhile.
        """
        name = f"node-{index}"
        known = self.log(name, _WHOLE).count(_JOINED)
        self.start_node(index)
        deadline = time.monotonic() + _REJOIN_SECONDS
        while self.log(name, _WHOLE).count(_JOINED) <= known:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} could not join again:\n{self.log(name)}")
            time.sleep(0.2)

    def register(self, public_key: Path) -> int:
        """Let the owner of a key join, and return Flower's id of that node."""
        arguments = ("supernode", "register", str(public_key), NAME)
        return int(str(self._processes.answer("flwr", *arguments)["node-id"]))

    def state_dir(self, index: int) -> Path:
        """Return where node `index` keeps its ledger."""
        return self.folder / f"node-{index}"

    def kill_server_app(self) -> int:
        """Kill the ServerApps that are running, and return how many there were."""
        return self._processes.kill_matching("flwr-serverapp")

    def _trust(self) -> str:
        if self.credentials is None:
            return "insecure = true"
        return f'root-certificates = "{self.credentials.ca}"'
