"""`python -m launch.monitor` shows the current state of a run, then every change, in a terminal, as lines or as JSON.

It changes nothing by itself; keys restart and drain processes if this user may operate the run. docs/monitor.md
describes the views.

Exit status: 0 when the run has ended or after Ctrl-C; 1 when a run on another machine does not answer or stops
answering, because its end cannot be observed from here; 2 when there is no such run or the run refuses this access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
import zmq

from launch.utf8 import ensure_utf8
from launch.viewers.ended import ended_text
from launch.viewers.peer import EXIT_UNREACHABLE, EXIT_USAGE, Run, find, verify_access
from launch.viewers.terminal import panes
from launch.viewers.terminal.feed import LOST_S, Feed, opened
from launch.viewers.terminal.visible import visible
from proto.messages import ErrorCode, TopicRow
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security.access import Access

WIDTH = 120
EVERY_S = 1.0
"""Seconds between two checks of the view. Several steps in between are printed as one line."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path | None, typer.Option("--run", help="run directory (default: the newest in ./runs)")] = None,
    access: Annotated[
        Path | None,
        typer.Option(
            "--access", metavar="FILE", help="access file of a run on another machine (see ctl export-access)"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print each row of the stream as one JSON object")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="print lines of text, as when there is no terminal")] = False,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="PREFIX", help="print only rows of topics with this prefix; may be repeated"),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="serve the page of a run, live or ended, for a browser on this machine")
    ] = False,
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="ADDRESS:PORT", help="loopback address for --web; port 0 picks a free port"),
    ] = "127.0.0.1:0",
) -> None:
    """Show the state of a run and every change to it."""
    try:
        watched = find(run, access)
        if web:
            _serve_page(watched, listen)
        if as_json or topic:
            show = _print_json if as_json else _print_row
            asyncio.run(_watch(watched, _print_rows(watched, tuple(topic or [""]), show)))
        elif plain or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            asyncio.run(_watch(watched, _print_picture(watched)))
        else:
            asyncio.run(_terminal(watched))
        return
    except RpcError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if error.code == ErrorCode.BAD_REQUEST else EXIT_UNREACHABLE) from None
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader is gone, so nothing is printed at exit.


def _serve_page(run: Run, listen: str) -> NoReturn:
    """Replace this process with the one that serves the run's page. Raises RpcError.

    This process never loads the libraries of the page server.
    """
    if not isinstance(run, RunDir):
        text = "--web reads the run directory; start it on the run's machine, and reach it through `ssh -L`"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    arguments = ["--run", str(run.path), "--listen", listen]
    os.execv(sys.executable, [sys.executable, "-m", "services.web.by_hand", *arguments])  # noqa: S606  # no shell is wanted


async def _watch(run: Run, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends with the run, or until SIGINT or SIGTERM arrives."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The signal may be ignored, for example in a script's background job.
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
        _tell_end(run)


def _tell_end(run: Run) -> None:
    """Print on stderr how the run ended. Raises RpcError(deadline) for a run on another machine, whose stream ends only
    when the monitor has fallen silent."""
    if isinstance(run, Access):
        text = f"run {run.name}: the monitor has not answered for {LOST_S:g} s; the run ended or the connection broke"
        raise RpcError(ErrorCode.DEADLINE, text)
    if text := ended_text(run):
        print(text, file=sys.stderr)


async def _print_rows(run: Run, prefixes: tuple[str, ...], show: Callable[[TopicRow], None]) -> None:
    await _check_access(run)
    told = 0
    async with opened(run) as stream:
        async for row in stream.rows():
            if stream.lost > told:
                text = f"launch.monitor: {stream.lost - told} updates lost, because this process or its reader was slow"
                print(text, file=sys.stderr, flush=True)
                told = stream.lost
            if row.topic.startswith(prefixes):
                show(row)


async def _print_picture(run: Run) -> None:
    """Print the picture once, then a line for each change, until the run ends."""
    await _check_access(run)
    feed = Feed(run)
    follows = asyncio.create_task(feed.follow())
    arrives = asyncio.create_task(feed.connected.wait())
    try:
        await asyncio.wait({follows, arrives}, return_when=asyncio.FIRST_COMPLETED)
        await feed.read_all_files()
        _print_all(feed)
        teller = _Changes(feed)
        while not follows.done():
            await asyncio.wait({follows}, timeout=EVERY_S)
            feed.read_files()
            teller.tell()
        follows.result()
    finally:
        for task in (follows, arrives):
            task.cancel()
        await asyncio.gather(follows, arrives, return_exceptions=True)


async def _terminal(run: Run) -> None:
    await _check_access(run)
    from launch.viewers.terminal.app import MonitorApp

    feed = Feed(run)
    interface = MonitorApp(feed)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, interface.exit)
    await interface.run_async()
    if feed.ended:
        _tell_end(run)


async def _check_access(run: Run) -> None:
    """Raise a one-line RpcError if the access is refused. The stream alone would merely stay silent."""
    if not isinstance(run, Access):
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        await verify_access(context, run, "monitor")
    finally:
        context.term()


def _print_json(row: TopicRow) -> None:
    print(json.dumps(msgspec.structs.asdict(row)), flush=True)


def _print_row(row: TopicRow) -> None:
    """Print a row of the stream."""
    values = "  ".join(
        f"{key}={value if isinstance(value, str) else format(value, '.6g')}" for key, value in row.values.items()
    )
    _print(f"{panes.clock(row.at)} {row.topic:<20} {row.service}/{row.instance}  {values}")


def _print_all(feed: Feed) -> None:
    view, now = feed.view, time.time()
    _print(_headline(feed))
    for line in (*panes.notices(view, WIDTH), *panes.pipeline(view, WIDTH)):
        _print(line.plain)
    for service in view.services(now):
        _print("  ".join(cell.plain for cell in panes.service_cells(service)).rstrip())


class _Changes:
    """Prints what has changed since the last check."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._step = feed.view.progress().step
        self._states = self._now_states()
        self._notices = {line.plain for line in panes.notices(feed.view, WIDTH)}

    def tell(self) -> None:
        view = self._feed.view
        for line in panes.notices(view, WIDTH):
            if line.plain not in self._notices:
                _print(line.plain)
                self._notices.add(line.plain)
        states = self._now_states()
        for name, state in states.items():
            if self._states.get(name) != state:
                _print(f"{panes.clock(time.time())} {name} {state}")
        self._states = states
        progress = view.progress()
        if progress.step != self._step:
            self._step = progress.step
            _print(f"{panes.clock(time.time())} {_headline(self._feed)}")

    def _now_states(self) -> dict[str, str]:
        return {
            service.name: f"{service.state} {service.cause}".rstrip()
            for service in self._feed.view.services(time.time())
        }


def _headline(feed: Feed) -> str:
    return panes.headline(feed.run.name, feed.view.progress(), width=WIDTH).plain.rstrip()


def _print(text: str) -> None:
    print(visible(text), flush=True)


if __name__ == "__main__":
    ensure_utf8()
    app()
