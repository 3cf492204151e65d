"""`python -m launch.monitor`: watch a run, from any moment on: the present state, then every change. Changes nothing.

Exit status: 0 when the run ended or at Ctrl-C, 2 when there is no such run.
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

from launch.stream import Stream
from proto.messages import TopicRow
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, newest_run, service_name

if TYPE_CHECKING:
    from rich.table import Table

RUNS = Path("runs")
REDRAW_S = 0.5
Rows = AsyncIterator[TopicRow]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path | None, typer.Option("--run", help="run directory; left out: the newest in ./runs")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line instead of a table")] = False,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="PREFIX", help="only topics that begin so; may be repeated")
    ] = None,
) -> None:
    """Show the state of a run and every change of it."""
    try:
        directory = RunDir.open(run or newest_run(RUNS))
    except RpcError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    show = _print_json if as_json or not sys.stdout.isatty() else _draw
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_watch(directory, tuple(topic or [""]), show))
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has gone: no noise at exit


async def _watch(run: RunDir, prefixes: tuple[str, ...], show: Callable[[Rows], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    async with Stream(run, ended=lambda: not run.sockets.exists()) as stream:
        rows = (row async for row in stream.rows() if row.topic.startswith(prefixes))
        task = loop.create_task(show(rows))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task


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
