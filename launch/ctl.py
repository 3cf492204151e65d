"""`python -m launch.ctl`: look at a run and steer it. Asks the scheduler and the supervisor, decides nothing itself.

Exit status: 0 done, 1 the run does not answer, 2 the command line is wrong (an unknown service, no such run).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from launch.logs import Follower, readable, size_of, tail
from launch.supervisor.plan import SUPERVISOR, Key, select
from proto.messages import Ack, ErrorCode, RestartService, StopRun
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, newest_run, parse_service_name, service_name
from shared.topology import TopologyError, load

RUNS = Path("runs")
FOLLOW_S = 0.25
EXIT_UNREACHABLE, EXIT_USAGE = 1, 2
R = TypeVar("R")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def main(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option("--run", help="run directory; left out: the newest in ./runs")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Finds the run for the command."""
    with _one_line_errors():
        context.obj = (RunDir.open(run or newest_run(RUNS)), as_json)


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show step, services, tasks and store."""
    from launch.status import collect, table

    run, before = context.obj
    with _one_line_errors():
        answer = asyncio.run(collect(run))
    if as_json or before:
        print(json.dumps(answer))
    else:
        table(answer)


@app.command()
def restart(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE]")],
    as_json: Json = False,
) -> None:
    """End and start again one service or one instance of it."""
    run, before = context.obj
    with _one_line_errors():
        keys = select(name, _known(run))
        service, instance = parse_service_name(name)
        _ask(run, RestartService(service=service, instance=instance))
    _say({"restarting": [service_name(*key) for key in keys]}, as_json=as_json or before)


@app.command()
def stop(context: typer.Context, as_json: Json = False) -> None:
    """Drain everything and end the run; --resume goes on with it."""
    run, before = context.obj
    with _one_line_errors():
        _ask(run, StopRun())
    _say({"stopping": run.name}, as_json=as_json or before)


@app.command()
def logs(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE]")],
    lines: Annotated[int, typer.Option("-n", min=0, help="how many of the last lines")] = 50,
    follow: Annotated[bool, typer.Option("-f", help="go on with new lines until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Print what a service logged."""
    run, before = context.obj
    raw = as_json or before
    with _one_line_errors():
        keys = select(name, [*_known(run), (SUPERVISOR, 0)])
    files = [run.log_file(*key) for key in keys]
    followers = [Follower(file, position=size_of(file)) for file in files]
    old = [line for file in files for line in tail(file, lines)]
    for line in sorted(old, key=_timestamp)[-lines:] if lines else []:
        print(line if raw else readable(line))
    try:
        while follow:
            for follower in followers:
                for line in follower.new_lines():
                    print(line if raw else readable(line), flush=True)
            time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return


def _known(run: RunDir) -> list[Key]:
    return [(spec.service, spec.instance) for spec in load(run.topology, check_supported=False).services_plan()]


def _timestamp(line: str) -> str:
    try:
        return str(json.loads(line)["timestamp"])
    except (ValueError, KeyError, TypeError):
        return ""


def _ask(run: RunDir, request: RestartService | StopRun) -> None:
    from launch.peer import with_client

    asyncio.run(with_client(run, SUPERVISOR, request, Ack))


def _say(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    for what, value in facts.items():
        print(f"{what} {', '.join(value) if isinstance(value, list) else value}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except TopologyError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    except RpcError as error:
        print(error, file=sys.stderr)
        usage = error.code == ErrorCode.BAD_REQUEST
        raise typer.Exit(EXIT_USAGE if usage else EXIT_UNREACHABLE) from None


if __name__ == "__main__":
    app()
