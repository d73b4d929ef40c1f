r"""Let nodes reach a SuperLink, and nobody reach more of it.

Flower's SuperLink serves its nodes, its operators and its own processes on one port,
and asks only nodes who they are. Start it on the loopback, and this gate where nodes
can reach it: calls that registered nodes make are passed on, all others refused.

  safedshb gate --listen 0.0.0.0:9092 --superlink 127.0.0.1:9091 \
      --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key
"""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--ssl-ca-certfile", required=True, help="signed the SuperLink's certificate"
    )
    parser.add_argument("--ssl-certfile", required=True, help="shown to nodes")
    parser.add_argument("--ssl-keyfile", required=True)
    parser.add_argument(
        "--max-bytes",
        type=int,
        help="largest call that is passed on (default: 16 MiB, Flower sends arrays in "
        "pieces of 5 MiB)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    import ssl

    import uvicorn

    from flwr_safedshb.deployment.gate import MAX_BYTES, gate

    host, _, port = arguments.listen.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--listen={arguments.listen!r} must be HOST:PORT, such as 0.0.0.0:9092"
        )
    trusted = ssl.create_default_context(cafile=arguments.ssl_ca_certfile)
    size = MAX_BYTES if arguments.max_bytes is None else arguments.max_bytes
    uvicorn.run(
        gate(arguments.superlink, trusted, size),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        log_level="warning",
    )
    return 0
