"""`python -m launch.monitor` shows the present state of a run, then every change. It changes nothing.

Exit status: 0 when the run has ended or at Ctrl-C; 1 when a run on another machine does not answer or stops answering,
because its end cannot be observed from there; 2 when there is no such run or it refuses this access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import zmq

from launch.peer import EXIT_UNREACHABLE, EXIT_USAGE, Run, find, verify_access
from launch.stream import Stream
from proto.messages import ErrorCode, TopicRow
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.security.access import Access

if TYPE_CHECKING:
    from rich.table import Table

REDRAW_S = 0.5
LOST_S = 20.0
"""Seconds of silence after which a monitor on another machine is given up."""
Rows = AsyncIterator[TopicRow]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path | None, typer.Option("--run", help="run directory (default: the newest in ./runs)")] = None,
    access: Annotated[
        Path | None, typer.Option("--access", metavar="FILE", help="a run on another machine (see ctl export-access)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line instead of a table")] = False,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="PREFIX", help="show only topics with this prefix; may be repeated"),
    ] = None,
) -> None:
    """Show the state of a run and every change of it."""
    show = _print_json if as_json or not sys.stdout.isatty() else _draw
    try:
        asyncio.run(_watch(find(run, access), tuple(topic or [""]), show))
        return
    except RpcError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if error.code == ErrorCode.BAD_REQUEST else EXIT_UNREACHABLE) from None
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader is gone, so nothing is printed at exit.


async def _watch(run: Run, prefixes: tuple[str, ...], show: Callable[[Rows], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(run, Access):
        await _check_access(run)
    lost = False

    def ended() -> bool:
        nonlocal lost
        if isinstance(run, RunDir):
            return not run.sockets.exists()
        lost = loop.time() - stream.heard_at > LOST_S
        return lost

    async with Stream(run, ended=ended) as stream:
        rows = (row async for row in stream.rows() if row.topic.startswith(prefixes))
        task = loop.create_task(show(rows))
        for number in (signal.SIGINT, signal.SIGTERM):
            # The signal may be ignored, such as in a script's background job.
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if lost:
        text = f"run {run.name}: the monitor has not answered for {LOST_S:g} s; the run ended or the connection broke"
        raise RpcError(ErrorCode.DEADLINE, text)


async def _check_access(run: Access) -> None:
    """Raise a one-line RpcError for an access that is refused, because the stream would merely stay silent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        await verify_access(context, run, "monitor")
    finally:
        context.term()


async def _print_json(rows: Rows) -> None:
    async for row in rows:
        line = {
            "service": row.service,
            "instance": row.instance,
            "topic": row.topic,
            "at": row.at,
            "values": row.values,
        }
        print(json.dumps(line), flush=True)


async def _draw(rows: Rows) -> None:
    from rich.live import Live

    known: dict[tuple[str, str], TopicRow] = {}
    with Live(_table(known), auto_refresh=False, screen=False) as live:
        drawn_at = 0.0
        async for row in rows:
            known[(row.topic, service_name(row.service, row.instance))] = row
            if time.monotonic() - drawn_at >= REDRAW_S:
                drawn_at = time.monotonic()
                live.update(_table(known), refresh=True)
        live.update(_table(known), refresh=True)


def _table(known: dict[tuple[str, str], TopicRow]) -> Table:
    from rich.table import Table

    table = Table(title="last values", expand=True, show_lines=True)
    table.add_column("who", no_wrap=True)
    table.add_column("values", ratio=1)
    now = time.time()
    for (topic, service), row in sorted(known.items()):
        table.add_row(f"{topic}\n{service}, {max(0.0, now - row.at):.0f} s ago", _values(row))
    return table


def _values(row: TopicRow) -> str:
    return "  ".join(
        f"{key}={value if isinstance(value, str) else format(value, '.6g')}" for key, value in row.values.items()
    )


if __name__ == "__main__":
    app()
