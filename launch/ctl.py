"""`python -m launch.ctl` inspects and controls a run. It sends requests to the run's processes and changes nothing
itself.

Exit status: 0 on success, 1 if the run does not answer or the doctor finds a problem, 2 if the command line is wrong
(unknown service or run).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from launch.processes.plan import EVERYTHING, SUPERVISOR, Key, processes_at_home, select
from launch.utf8 import ensure_utf8
from launch.viewers.peer import DEADLINE_S, EXIT_UNREACHABLE, EXIT_USAGE, Run, find, with_client
from launch.viewers.samples import FEW, Color, choose, show
from launch.viewers.samples import as_json as as_document
from proto import messages
from proto.messages import ErrorCode
from proto.registry import Request
from shared.actor.logging import log_page
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name, service_name
from shared.runfiles.logs import readable
from shared.samples.reader import Order
from shared.samples.record import split_of
from shared.security.access import Access, read
from shared.security.roles import Role
from shared.stages import TRAIN
from shared.topology import TopologyError, load

FOLLOW_S = 0.25
REMOTE_FOLLOW_S = 1.0
STORY_S = 60.0
SCALE_S = 15.0


ANYWHERE = ("--run", "--access")
"""Options of the program that may also stand after the command."""


def in_front(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the options `ANYWHERE` and their values before all others."""
    front: list[str] = []
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            others += [argument, *remaining]
        elif argument in ANYWHERE:
            front += [argument, *itertools.islice(remaining, 1)]
        elif argument.partition("=")[0] in ANYWHERE:
            front.append(argument)
        else:
            others.append(argument)
    return front + others


class OneLineErrors(TyperGroup):
    """Prints the errors of all commands as one line, and exits with their status. The program's own options may stand
    before or after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_front(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (RpcError, TopologyError) as error:
            print(error, file=sys.stderr)
            usage = isinstance(error, TopologyError) or error.code == ErrorCode.BAD_REQUEST
            raise typer.Exit(EXIT_USAGE if usage else EXIT_UNREACHABLE) from None


app = typer.Typer(
    cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__
)


def _as_json(context: typer.Context, as_json: bool) -> bool:
    """Return whether JSON is wanted. The option may stand before or after the command."""
    return as_json or bool(context.find_root().params.get("as_json"))


Json = Annotated[bool, typer.Option("--json", help="print JSON", callback=_as_json)]


@app.callback()
def main(
    run: Annotated[Path | None, typer.Option("--run", help="run directory (default: the newest in ./runs)")] = None,
    access: Annotated[
        Path | None,
        typer.Option("--access", metavar="FILE", help="access file of a run on another machine (see export-access)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """The commands read these options themselves (`_run`), because some of them need no run."""


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show step, services, tasks and store."""
    from launch.viewers.status import collect, table

    run = _run(context)
    answer = asyncio.run(collect(run))
    if as_json:
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
    run = _run(context)
    if everything == bool(name):
        raise RpcError(ErrorCode.BAD_REQUEST, f"restart {name or '(nothing)'}: name a service or give --all")
    if everything or name == EVERYTHING:
        keys, service, instance = _supervised_keys(run), EVERYTHING, -1
    else:
        keys = select(name, _supervised_keys(run))
        service, instance = parse_service_name(name)
    _order(run, messages.RestartService(service=service, instance=instance), "restarting", keys, as_json=as_json)


@app.command()
def drain(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="NAME[/INSTANCE]")], as_json: Json = False
) -> None:
    """Stop a rollout or a frozen model (reference, ...) once it has finished its leases. It stays down until restart or
    scale starts it."""
    run = _run(context)
    keys = select(name, _supervised_keys(run))
    service, instance = parse_service_name(name)
    _order(run, messages.DrainService(service=service, instance=instance), "draining", keys, as_json=as_json)


@app.command()
def scale(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="rollout, reference, teacher or reward-model")],
    instances: Annotated[int, typer.Argument(metavar="N", help="number of instances, 1 or more")],
    as_json: Json = False,
) -> None:
    """Run N instances of a service: start missing instances, and drain those above N."""
    run = _run(context)
    select(name, _supervised_keys(run))
    service, instance = parse_service_name(name)
    if instance != -1:
        raise RpcError(ErrorCode.BAD_REQUEST, f"scale {name}: give the name of a service and a number of instances")
    keys = [(service, instance) for instance in range(instances)]
    _order(run, messages.ScaleService(service=service, instances=instances), "scaling", keys, SCALE_S, as_json=as_json)


@app.command()
def track(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[TRACKER]", help="wandb, tensorboard, mlflow or trackio")] = "",
) -> None:
    """Send missing data to the trackers of a run that has ended. Exit status 0 if they have everything."""
    run = _run_dir(context, "trackers can be fed")
    trackers = list(load(run.topology, check_files=False).monitor.trackers)
    if not trackers or (name and name not in trackers):
        there = ", ".join(trackers) or "none"
        raise RpcError(ErrorCode.BAD_REQUEST, f"track {name}: no such tracker in the topology; it has {there}")
    command = [sys.executable, "-m", "services.tracker.rest", "--run", str(run.path)]
    raise typer.Exit(subprocess.run([*command, *([name] if name else trackers)], check=False).returncode)


@app.command()
def stop(context: typer.Context, as_json: Json = False) -> None:
    """Drain everything and end the run. --resume continues it."""
    run = _run(context)
    _order(run, messages.StopRun(), "stopping", run.name, as_json=as_json)


@app.command()
def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Report problems, and which process is waiting for which other process, since when and until when. Exit status
    0 if all is well."""
    from launch.viewers.doctor import as_document, as_lines, diagnose, examine

    run = _run(context)
    examined = asyncio.run(examine(run))
    findings = diagnose(examined)
    if as_json:
        print(json.dumps(as_document(examined, findings)))
    else:
        for line in as_lines(examined, findings):
            print(line)
    raise typer.Exit(EXIT_UNREACHABLE if any(finding.wrong for finding in findings) else 0)


@app.command()
def trace(
    context: typer.Context,
    task_id: Annotated[str, typer.Argument(metavar="TASK_ID", help="task id, such as train/0/17 (split, epoch, row)")],
    as_json: Json = False,
) -> None:
    """Show the history of one task across processes, even after it has been collected or the run has ended."""
    from launch.viewers.story import as_lines, as_rows, from_message, story
    from services.exporter.spans import trace_id

    run = _run(context)
    if isinstance(run, RunDir):
        entries = story(run, task_id)
    else:
        entries = from_message(
            asyncio.run(with_client(run, SUPERVISOR, messages.GetStory(task_id=task_id), messages.Story, STORY_S))
        )
    if as_json:
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
        typer.Option("--metric", metavar="NAME", help="metric or pattern, such as eval/*/reward; may be repeated"),
    ] = None,
) -> None:
    """Write a page with the curves of one or more runs, whether they have ended or are still in progress."""
    from launch.viewers.report import plot as write_plot

    if out.suffix != ".html":
        text = f"--out {out}: must end in .html; a browser shows the page, and can print it as PDF"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    folders = runs or [_run_dir(context, "a run without its directory can be drawn").path]
    try:
        metrics = write_plot(folders, metric or [], out)
    except OSError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"--out {out}: cannot be written ({error.strerror})") from None
    print(f"{out}: {len(metrics)} metrics of {', '.join(folder.absolute().name for folder in folders)}")


@app.command()
def report(context: typer.Context) -> None:
    """Write report.html into the run directory, as happens at the end of every run."""
    from launch.viewers.report import write_report

    run = _run_dir(context, "a report can be written")
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
    run = _run_dir(context, "samples can be read")
    orders = {Order.WORST: worst, Order.BEST: best, Order.LONGEST: longest}
    given = [(order, count) for order, count in orders.items() if count is not None]
    if len(given) > 1:
        raise RpcError(ErrorCode.BAD_REQUEST, "samples: give one of --worst, --best and --longest")
    order, count = given[0] if given else (None, FEW)
    split = split or (split_of(task) if task is not None else TRAIN)
    choice = choose(run.path, step=step, task=task, split=split, order=order, count=count)
    if as_json:
        print(json.dumps({"split": split, "total": choice.total, "samples": as_document(choice.records)}))
    else:
        show(choice, color, full=full)


@app.command()
def export_access(
    context: typer.Context,
    role: Annotated[str, typer.Option("--role", help="observer, operator or service")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="file to write; it holds the role's secret key")],
) -> None:
    """Write an access file with which another machine can watch the run, control it or take part in it."""
    from launch.commands.access import export

    run = _run_dir(context, "access can be exported")
    try:
        export(run, Role.of_label(role), to)
    except ValueError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None
    print(f"{to}: role {role} of run {run.name}; copy it over a trusted channel")


@app.command()
def join(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="access file with the role service, from export-access")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="run directory to create on this host")],
) -> None:
    """Make this host part of a run, so that python -m services.NAME --run DIR works here."""
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
    run = _run(context)
    with suppress(KeyboardInterrupt):
        keys = select(name, [*_known_keys(run), (SUPERVISOR, 0), *_registered_keys(run)])
        local = {*processes_at_home(load(run.topology)), (SUPERVISOR, 0)} if isinstance(run, RunDir) else set()
        positions = dict.fromkeys(keys, -1)
        shown = lines
        while True:
            new: list[str] = []
            for key in keys:
                if isinstance(run, RunDir) and key in local:
                    page, positions[key] = log_page(run.log_file(*key), lines, positions[key])
                else:
                    page, positions[key] = _remote_page(run, key, lines, positions[key])
                new += page
            for line in sorted(new, key=_timestamp)[-shown:] if shown else []:
                print(line if as_json else readable(line), flush=True)
            if not follow:
                return
            shown = sys.maxsize
            time.sleep(FOLLOW_S if set(keys) <= local else REMOTE_FOLLOW_S)


def _run(context: typer.Context) -> Run:
    """Return the run that the options before the command name. Raises RpcError(bad_request)."""
    given = context.find_root().params
    return find(given["run"], given["access"])


def _run_dir(context: typer.Context, what: str) -> RunDir:
    """Return the directory of the run. Raises RpcError(bad_request) for a run on another machine."""
    run = _run(context)
    if not isinstance(run, RunDir):
        text = f"{what} only on the host that holds the run directory; use --run there"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    return run


def _remote_page(run: Run, key: Key, lines: int, position: int) -> tuple[list[str], int]:
    request = messages.GetLog(service=key[0], instance=key[1], lines=lines, position=position)
    page = asyncio.run(with_client(run, SUPERVISOR, request, messages.LogLines))
    return page.lines, page.position


def _known_keys(run: Run) -> list[Key]:
    if isinstance(run, Access):
        state = asyncio.run(with_client(run, SUPERVISOR, messages.GetSupervisorState(), messages.SupervisorState))
        return [(process.service, process.instance) for process in state.processes]
    return [(spec.service, spec.instance) for spec in load(run.topology).services_plan()]


def _supervised_keys(run: Run) -> list[Key]:
    """Return the processes of the topology and those that the supervisor has since started (`ctl scale`)."""
    keys = _known_keys(run)
    if isinstance(run, RunDir):
        try:
            state = asyncio.run(with_client(run, SUPERVISOR, messages.GetSupervisorState(), messages.SupervisorState))
        except RpcError:
            return keys  # The request itself will report the cause.
        keys += [(process.service, process.instance) for process in state.processes]
    return list(dict.fromkeys(keys))


def _registered_keys(run: Run) -> list[Key]:
    """Return all registered processes, including those on joined hosts, or [] if the scheduler does not answer."""
    try:
        status = asyncio.run(with_client(run, "scheduler", messages.GetStatus(), messages.Status))
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


def _order(
    run: Run,
    request: Request,
    what: str,
    whom: Sequence[Key] | str,
    deadline_s: float = DEADLINE_S,
    *,
    as_json: bool,
) -> None:
    """Have the supervisor carry out `request`, and print what it does and to which processes."""
    asyncio.run(with_client(run, SUPERVISOR, request, messages.Ack, deadline_s))
    names = whom if isinstance(whom, str) else [service_name(*key) for key in whom]
    if as_json:
        print(json.dumps({what: names}))
    else:
        print(f"{what} {names if isinstance(names, str) else ', '.join(names)}")


if __name__ == "__main__":
    ensure_utf8()
    app()
