"""Serves the page for any run on this machine, live or ended, until Ctrl-C: `python -m launch.monitor --web`.

The page answers requests from this machine only, and changes nothing. The printed address contains a new token, without
which other users of this machine see no data.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path

from services.web.page import Page
from services.web.service import server_of
from shared.bearer import Secret
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.topology.monitor import is_loopback, split_address

USAGE = 2
TOKEN_BYTES = 18


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.web.by_hand")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    arguments = parser.parse_args()
    try:
        host, port = split_address(arguments.listen)
        if not is_loopback(host):
            raise ValueError(
                f"{arguments.listen}: others can reach this address; use a loopback address, or monitor.web with a "
                "token"
            )
        asyncio.run(_serve(RunDir.open(arguments.run), (host, port)))
    except (RpcError, ValueError) as error:
        print(error, file=sys.stderr)
        return USAGE
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        print(f"--listen {arguments.listen}: cannot be used ({reason}); choose another port", file=sys.stderr)
        return USAGE
    return 0


async def _serve(run: RunDir, listen: tuple[str, int]) -> None:
    page = Page(run.path, operable=False)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    server = server_of(page, listen, Secret(token), None)
    await server.start()
    print(f"page for {run.path} (Ctrl-C ends it): http://{server.address}/#token={token}", flush=True)
    work = asyncio.ensure_future(page.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    await server.stop()


if __name__ == "__main__":
    sys.exit(main())
