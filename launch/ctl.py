"""`python -m launch.ctl` inspects and controls a run. It sends requests to the run's processes and changes nothing
itself.

Exit status: 0 on success, 1 if the run does not answer or the doctor finds a problem, 2 if the command line is wrong
(unknown service or run).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from launch.commands.peer import DEADLINE_S, EXIT_UNREACHABLE, EXIT_USAGE, Run, find, with_client
from launch.supervisor.plan import EVERYTHING, SUPERVISOR, Key, processes_at_home, select
from launch.viewers.samples import FEW, Color, choose, show
from launch.viewers.samples import as_json as as_document
from proto.messages import (
    Ack,
    DrainService,
    ErrorCode,
    GetLog,
    GetStatus,
    GetStory,
    GetSupervisorState,
    LogLines,
    RestartService,
    ScaleService,
    Status,
    StopRun,
    Story,
    SupervisorState,
)
from proto.registry import Request
from shared.actor.logging import log_page
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name, service_name
from shared.runfiles.logs import readable
from shared.samples.record import split_of
from shared.samples.selection import Order
from shared.security.access import Access, read
from shared.stages import TRAIN
from shared.topology import TopologyError, load

FOLLOW_S = 0.25
REMOTE_FOLLOW_S = 1.0
STORY_S = 60.0
SCALE_S = 15.0
R = TypeVar("R")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
_FIND_THEIR_OWN = ("join", "plot")
"""Commands that need no run on this machine, or accept several runs."""


@app.callback()
def main(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option("--run", help="run directory (default: the newest in ./runs)")] = None,
    access: Annotated[
        Path | None,
        typer.Option("--access", metavar="FILE", help="access file of a run on another machine (see export-access)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find the run for the command."""
    with _one_line_errors():
        if context.invoked_subcommand in _FIND_THEIR_OWN:
            return
        context.obj = (find(run, access), as_json)


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show step, services, tasks and store."""
    from launch.viewers.status import collect, table

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
    name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE] | all")] = "",
    everything: Annotated[bool, typer.Option("--all", help="restart every process, one after the other")] = False,
    as_json: Json = False,
) -> None:
    """Stop a service, or one of its instances, and start it again. With all, one process restarts at a time."""
    run, before = context.obj
    with _one_line_errors():
        if everything == bool(name):
            raise RpcError(ErrorCode.BAD_REQUEST, f"restart {name or '(nothing)'}: name a service or give --all")
        if everything or name == EVERYTHING:
            keys, service, instance = _supervised_keys(run), EVERYTHING, -1
        else:
            keys = select(name, _supervised_keys(run))
            service, instance = parse_service_name(name)
        _send(run, RestartService(service=service, instance=instance))
    _print_facts({"restarting": [service_name(*key) for key in keys]}, as_json=as_json or before)


@app.command()
def drain(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE]")], as_json: Json = False
) -> None:
    """Stop a rollout or reference once it has finished its leases. It stays down until restart or scale starts it."""
    run, before = context.obj
    with _one_line_errors():
        keys = select(name, _supervised_keys(run))
        service, instance = parse_service_name(name)
        _send(run, DrainService(service=service, instance=instance))
    _print_facts({"draining": [service_name(*key) for key in keys]}, as_json=as_json or before)


@app.command()
def scale(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="rollout or reference")],
    instances: Annotated[int, typer.Argument(metavar="N", help="number of instances, 1 or more")],
    as_json: Json = False,
) -> None:
    """Run N instances of a service: start missing instances, and drain those above N."""
    run, before = context.obj
    with _one_line_errors():
        select(name, _supervised_keys(run))
        service, instance = parse_service_name(name)
        if instance != -1:
            raise RpcError(ErrorCode.BAD_REQUEST, f"scale {name}: give the name of a service and a number of instances")
        _send(run, ScaleService(service=service, instances=instances), SCALE_S)
    _print_facts({"scaling": [service_name(service, each) for each in range(instances)]}, as_json=as_json or before)


@app.command()
def track(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[TRACKER]", help="wandb, tensorboard, mlflow or trackio")] = "",
) -> None:
    """Send missing data to the trackers of a run that has ended. Exit status 0 if they have everything."""
    run, _ = context.obj
    with _one_line_errors():
        if isinstance(run, Access):
            raise RpcError(ErrorCode.BAD_REQUEST, "track: needs the run directory (--run), which holds the metrics")
        known = list(load(run.topology, check_supported=False, check_files=False).services.monitor.trackers)
        if not known or (name and name not in known):
            there = ", ".join(known) or "none"
            raise RpcError(ErrorCode.BAD_REQUEST, f"track {name}: no such tracker in the topology; it has {there}")
    command = [sys.executable, "-m", "services.tracker.rest", "--run", str(run.path)]
    raise typer.Exit(subprocess.run([*command, *([name] if name else known)], check=False).returncode)


@app.command()
def stop(context: typer.Context, as_json: Json = False) -> None:
    """Drain everything and end the run. --resume continues it."""
    run, before = context.obj
    with _one_line_errors():
        _send(run, StopRun())
    _print_facts({"stopping": run.name}, as_json=as_json or before)


@app.command()
def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Report problems, and which process is waiting for which other process, since when and until when. Exit status
    0 if all is well."""
    from launch.viewers.doctor import as_document, as_lines, diagnose, examine

    run, before = context.obj
    with _one_line_errors():
        examined = asyncio.run(examine(run))
    findings = diagnose(examined)
    if as_json or before:
        print(json.dumps(as_document(examined, findings)))
    else:
        for line in as_lines(examined, findings):
            print(line)
    raise typer.Exit(EXIT_UNREACHABLE if any(each.wrong for each in findings) else 0)


@app.command()
def trace(
    context: typer.Context,
    task_id: Annotated[str, typer.Argument(metavar="TASK_ID", help="task id, such as train/0/17 (split, epoch, row)")],
    as_json: Json = False,
) -> None:
    """Show the history of one task across processes, even after it has been collected or the run has ended."""
    from launch.viewers.story import as_lines, as_rows, from_message, story
    from services.exporter.spans import trace_id

    run, before = context.obj
    with _one_line_errors():
        if isinstance(run, RunDir):
            entries = story(run, task_id)
        else:
            entries = from_message(asyncio.run(with_client(run, SUPERVISOR, GetStory(task_id=task_id), Story, STORY_S)))
    if as_json or before:
        told = {"task_id": task_id, "trace_id": trace_id(run.name, task_id).hex(), "story": as_rows(entries)}
        print(json.dumps(told))
        return
    for line in as_lines(entries):
        print(line)


@app.command()
def plot(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="page to write")],
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="run directories")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="metric or pattern, such as eval/*/accuracy; may be repeated"),
    ] = None,
) -> None:
    """Write a page with the curves of one or more runs, whether they have ended or are still in progress."""
    from launch.viewers.report import plot as write_plot

    with _one_line_errors():
        if out.suffix != ".html":
            text = f"--out {out}: must end in .html; a browser shows the page, and can print it as PDF"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        folders = runs or [_given_run(context)]
        try:
            metrics = write_plot(folders, metric or [], out)
        except OSError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"--out {out}: cannot be written ({error.strerror})") from None
    print(f"{out}: {len(metrics)} metrics of {', '.join(folder.absolute().name for folder in folders)}")


@app.command()
def report(context: typer.Context) -> None:
    """Write report.html into the run directory, as happens at the end of every run."""
    from launch.viewers.report import write_report

    run, _ = context.obj
    with _one_line_errors():
        if not isinstance(run, RunDir):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "a report can be written only on the host that holds the run directory; use --run there",
            )
        try:
            print(write_report(run))
        except OSError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"run {run.path}: no report ({error.strerror})") from None


@app.command()
def samples(
    context: typer.Context,
    step: Annotated[
        int | None, typer.Option("--step", help="training step or evaluated version (default: newest)")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK_ID", help="all samples of one task")] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", min=1, metavar="N", help="N samples with the lowest reward")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=1, metavar="N", help="N samples with the highest reward")
    ] = None,
    longest: Annotated[int | None, typer.Option("--longest", min=1, metavar="N", help="N longest samples")] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="train, or eval/<set> (default: that of the task, or train)")
    ] = None,
    color: Annotated[Color, typer.Option("--color", help="colour of the tokens")] = Color.LOGPROB,
    full: Annotated[bool, typer.Option("--full", help="show long texts in full")] = False,
    as_json: Json = False,
) -> None:
    """Show recorded samples, even after the run has ended."""
    run, before = context.obj
    with _one_line_errors():
        if not isinstance(run, RunDir):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "samples can be read only on the host that holds the run directory; use --run there",
            )
        orders = {Order.WORST: worst, Order.BEST: best, Order.LONGEST: longest}
        given = [(order, count) for order, count in orders.items() if count is not None]
        if len(given) > 1:
            raise RpcError(ErrorCode.BAD_REQUEST, "samples: give one of --worst, --best and --longest")
        order, count = given[0] if given else (None, FEW)
        split = split or (split_of(task) if task is not None else TRAIN)
        found = choose(run.path, step=step, task=task, split=split, order=order, count=count)
    if as_json or before:
        print(json.dumps({"split": split, "total": found.total, "samples": as_document(found.records)}))
    else:
        show(found, color, full=full)


@app.command()
def export_access(
    context: typer.Context,
    role: Annotated[str, typer.Option("--role", help="observer, operator or service")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="file to write; it holds the role's secret key")],
) -> None:
    """Write an access file with which another machine can watch the run, control it or take part in it."""
    from launch.commands.access import export, role_of

    run, _ = context.obj
    with _one_line_errors():
        if not isinstance(run, RunDir):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "access can be exported only on the host that holds the run directory; use --run there",
            )
        export(run, role_of(role), to)
    print(f"{to}: role {role} of run {run.name}; copy it over a trusted channel")


@app.command()
def join(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="access file with the role service, from export-access")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="run directory to create on this host")],
) -> None:
    """Make this host part of a run, so that python -m services.NAME --run DIR works here."""
    with _one_line_errors():
        joined = RunDir.join(run_dir, read(file))
    print(f"{joined.path}: joins the run at {joined.scheduler}")


@app.command()
def logs(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE]")],
    lines: Annotated[int, typer.Option("-n", min=0, help="number of lines to print from the end of the log")] = 50,
    follow: Annotated[bool, typer.Option("-f", help="print new lines until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Print the log of a service."""
    run, before = context.obj
    raw = as_json or before
    with _one_line_errors(), suppress(KeyboardInterrupt):
        keys = select(name, [*_known_keys(run), (SUPERVISOR, 0), *_registered_keys(run)])
        is_local = isinstance(run, RunDir) and set(keys) <= {*_keys_at_home(run), (SUPERVISOR, 0)}
        positions = dict.fromkeys(keys, -1)
        shown = lines
        while True:
            found: list[str] = []
            for key in keys:
                if is_local:
                    page, positions[key] = log_page(run.log_file(*key), lines, positions[key])
                else:
                    page, positions[key] = _remote_page(run, key, lines, positions[key])
                found += page
            for line in sorted(found, key=_timestamp)[-shown:] if shown else []:
                print(line if raw else readable(line), flush=True)
            if not follow:
                return
            shown = sys.maxsize
            time.sleep(FOLLOW_S if is_local else REMOTE_FOLLOW_S)


def _given_run(context: typer.Context) -> Path:
    """Return the run directory given with `--run`, or else the directory of the newest run."""
    given = context.parent.params if context.parent is not None else {}
    found = find(given.get("run"), given.get("access"))
    if not isinstance(found, RunDir):
        raise RpcError(ErrorCode.BAD_REQUEST, "--access: the files of a run are read on its own machine; use --run")
    return found.path


def _remote_page(run: Run, key: Key, lines: int, position: int) -> tuple[list[str], int]:
    request = GetLog(service=key[0], instance=key[1], lines=lines, position=position)
    page = asyncio.run(with_client(run, SUPERVISOR, request, LogLines))
    return page.lines, page.position


def _known_keys(run: Run) -> list[Key]:
    if isinstance(run, Access):
        state = asyncio.run(with_client(run, SUPERVISOR, GetSupervisorState(), SupervisorState))
        return [(process.service, process.instance) for process in state.processes]
    return [(spec.service, spec.instance) for spec in load(run.topology, check_supported=False).services_plan()]


def _keys_at_home(run: RunDir) -> list[Key]:
    """Return the processes whose logs are in the run directory."""
    return processes_at_home(load(run.topology, check_supported=False))


def _supervised_keys(run: Run) -> list[Key]:
    """Return the processes of the topology and those that the supervisor has since started (`ctl scale`)."""
    known = _known_keys(run)
    if isinstance(run, RunDir):
        try:
            state = asyncio.run(with_client(run, SUPERVISOR, GetSupervisorState(), SupervisorState))
        except RpcError:
            return known  # The request itself will report the cause.
        known += [(process.service, process.instance) for process in state.processes]
    return list(dict.fromkeys(known))


def _registered_keys(run: Run) -> list[Key]:
    """Return all registered processes, including those on joined hosts, or [] if the scheduler does not answer."""
    try:
        status = asyncio.run(with_client(run, "scheduler", GetStatus(), Status))
    except RpcError as error:
        if error.code == ErrorCode.BAD_REQUEST:
            raise  # The scheduler answers, but refuses this access.
        return []
    return [(row.service, row.instance) for row in status.services]


def _timestamp(line: str) -> str:
    try:
        return str(json.loads(line)["timestamp"])
    except (ValueError, KeyError, TypeError):
        return ""


def _send(run: Run, request: Request, deadline_s: float = DEADLINE_S) -> None:
    asyncio.run(with_client(run, SUPERVISOR, request, Ack, deadline_s))


def _print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
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
