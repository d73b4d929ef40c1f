r"""Let nodes reach a SuperLink, and nobody reach more of it.

Flower's SuperLink serves its nodes, its operators and its own processes on one port,
and asks only nodes who they are. Start it on the loopback, and this gate where nodes
can reach it: calls that registered nodes make are passed on, all others refused.

  safedshb gate --listen 0.0.0.0:9092 --superlink 127.0.0.1:9091 \
      --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--ssl-ca-certfile", required=True, help="signed the SuperLink's certificate"
    )
    parser.add_argument("--ssl-certfile", required=True, help="shown to nodes")
    parser.add_argument("--ssl-keyfile", required=True)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    import asyncio
    import gc
    import logging
    import socket
    import ssl
    from asyncio.sslproto import SSLProtocol

    from flwr_safedshb.node.gate.gate import Gate

    host, _, port = arguments.listen.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--listen={arguments.listen!r} must be HOST:PORT, such as 0.0.0.0:9092"
        )
    trusted = ssl.create_default_context(cafile=arguments.ssl_ca_certfile)
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.minimum_version = ssl.TLSVersion.TLSv1_3
    shown.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("safedshb").setLevel(logging.INFO)

    # By default a connection has a buffer of 256 KiB from its first byte on; and once
    # it has ended it is garbage, which is collected the later the more objects there
    # are that stay. Both would let strangers take hundreds of MiB.
    SSLProtocol.max_size = 64 * 2**10
    gc.collect()
    gc.freeze()

    async def serve() -> None:
        family, *_, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.create_server(address[:2], family=family, backlog=4096) as listener:
            logging.getLogger("safedshb.gate").info("Listening on %s", arguments.listen)
            await Gate(arguments.superlink, trusted, shown).serve(listener)

    asyncio.run(serve())
    return 0
