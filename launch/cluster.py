"""`python -m launch.cluster T.yaml` runs a topology from start to end on this machine. It does no training itself.

Exit status: 0 if the run is done, 1 if it failed or was stopped, 2 if the command line or the topology is wrong.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from launch import detached, evaluation, hub, place, preflight, scaling
from launch.access import access_of, export
from launch.gpus import visible_gpus, wanted
from launch.heavy import spare_kinds
from launch.interrupts import Interrupts
from launch.logs import last_lines, shorten
from launch.placement.book import HostBook
from launch.placement.desk import HostDesk
from launch.placement.ray_engine import RayEngine
from launch.progress import Metrics, Screen, Troubles, accuracy_lines, duration, rewind_text, starting_text
from launch.report import write_in_time
from launch.supervisor.events import Died, GivenUp, Reported, RunEnded, RunOutcome
from launch.supervisor.plan import SUPERVISOR, Key, listen_endpoint, module_of
from launch.supervisor.server import EVENTS, Supervisor
from launch.supervisor.spare_processes import SpareNotice
from proto.messages import Status
from services.scheduler.journal import rewinds
from services.tracker.ledger import unsent
from shared import warnings
from shared.actor import logging
from shared.actor.service import ProcessState
from shared.followed_file import FollowedFile
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, checkpoint_steps, newest_run, service_name, sweep_abandoned
from shared.security.roles import Role
from shared.topology import Topology, TopologyError, hub_names, load, model_memory, snapshot_bytes, stop_limit_s
from shared.topology.fields import format_size
from shared.topology.model_files import parameter_count

STATUS_DEADLINE_S = 2.0
POLL_S = 1.0
LOG_LINES = 10
EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

MODEL_FOLDER = "model"
"""Folder in the run directory with the model of an evaluated checkpoint."""

_HERE = "this machine"
_OVER = frozenset({ProcessState.STOPPED, ProcessState.FAILED, ProcessState.DRAINED})

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    topology_file: Annotated[
        Path | None,
        typer.Argument(metavar="TOPOLOGY.yaml", help="YAML file that describes the run", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="override one key of the topology")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="directory of the run (default: runs/<name>-<time>)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run from its journal and checkpoints")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, show the plan, start nothing")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="return once every service is READY; a supervisor keeps running")
    ] = False,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach",
            help="show the console of a detached run (--run-dir, or the newest); Ctrl-C does not stop the run",
        ),
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="train nothing: score the evaluation sets, show a table and end")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="evaluate RUN/checkpoints/step-N or RUN/export instead of policy.model"
        ),
    ] = None,
    access: Annotated[
        Path | None,
        typer.Option(
            "--export-access",
            metavar="FILE",
            help="write an access file with the role service, for agents; it exists while the run lasts",
        ),
    ] = None,
) -> None:
    """Start the services of a topology and keep them running until the run is done."""
    interrupts = Interrupts()
    if attach:
        if overrides or resume or dry_run or detach or evaluate or checkpoint is not None or access is not None:
            _refuse(["--attach: shows a running run and accepts no option other than --run-dir"])
        raise typer.Exit(_attach(topology_file, run_dir))
    if topology_file is None:
        _refuse(["TOPOLOGY.yaml: missing; name the file that describes the run (see launch/topologies/)"])
    if checkpoint is not None and not evaluate:
        _refuse([f"--checkpoint {checkpoint}: has no effect without --evaluate; add it, or set policy.model to train"])
    if evaluate and resume:
        _refuse(["--evaluate: starts a new run, so there is nothing to --resume; leave one of them out"])
    try:
        _main(
            topology_file,
            overrides or [],
            run_dir,
            access,
            interrupts,
            checkpoint.absolute() if checkpoint is not None else None,
            evaluate=evaluate,
            resume=resume,
            dry_run=dry_run,
            detach=detach,
        )
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


def _main(
    topology_file: Path,
    overrides: list[str],
    run_dir: Path | None,
    access: Path | None,
    interrupts: Interrupts,
    checkpoint: Path | None,
    *,
    evaluate: bool,
    resume: bool,
    dry_run: bool,
    detach: bool,
) -> NoReturn:
    fetches: list[hub.Missing] = []
    try:
        names = hub_names(topology_file, overrides)
        topology = load(topology_file, overrides, check_files=not names)
        path = run_dir or (place.resumable(topology) if resume else place.default_path(topology))
        if names:
            overrides = [*overrides, *(hub.pinned(names, path / "topology.yaml") if resume else ())]
            names = hub_names(topology_file, overrides)
            if dry_run:
                fetches = hub.missing(names)
            else:
                with interrupts.telling(hub.leave):
                    hub.fetch(names)
            topology = load(topology_file, overrides, check_files=not fetches)
    except TopologyError as error:
        _refuse(str(problem) for problem in error.problems)
    except hub.HubError as error:
        _refuse([f"{topology_file}: {error}"])
    except RpcError as error:
        _refuse([str(error)])
    if evaluate:
        topology = _for_evaluation(topology, topology_file, checkpoint)
    findings = preflight.check(topology, str(topology_file))
    topology = preflight.with_room(topology)
    engine = RayEngine(topology) if topology.placement.engine == "ray" else None
    if engine is not None and not findings.errors:
        more = engine.check(path)
        findings.errors += more.errors
        findings.warnings += more.warnings
        if topology.transport.listen is None and engine.address:
            topology = _reachable(topology, engine.address)
            preflight.check_doors(topology, str(topology_file), findings)
    if access is not None:
        if topology.transport.listen is None:
            findings.errors.append(f"--export-access {access}: the run answers this machine only; set transport.listen")
        if not os.access(access.parent, os.W_OK):
            findings.errors.append(f"--export-access {access}: {access.parent} is not a writable folder; name another")
        access = access.absolute()
    for line in findings.warnings:
        print(f"warning: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    if findings.errors and not dry_run:
        if engine is not None:
            engine.close()
        _refuse(findings.errors)
    if dry_run:
        if engine is not None:
            engine.close()
        for each in fetches:
            if each.files:
                print(f"would fetch    {each}")
        _show_plan(topology, path, engine.machines if engine is not None else {})
        if findings.errors:
            _refuse(findings.errors)
        raise typer.Exit(EXIT_DONE)
    if checkpoint is not None and not evaluation.is_checkpoint(checkpoint):
        checkpoint = None  # its folder is already a model
    raise typer.Exit(_launch(topology, path, access, interrupts, engine, checkpoint, resume=resume, detach=detach))


def _for_evaluation(topology: Topology, file: Path, checkpoint: Path | None) -> Topology:
    """Return `topology` for `--evaluate`. Refuse an unusable checkpoint or a topology without evaluation sets."""
    if not topology.data.eval:
        _refuse([f"{file}: data.eval: --evaluate has no evaluation set to score; add one"])
    topology = evaluation.without_training(topology)
    if checkpoint is None:
        return topology
    try:
        evaluation.check_checkpoint(checkpoint, topology.policy.model)
    except RpcError as error:
        _refuse([str(error)])
    return topology if evaluation.is_checkpoint(checkpoint) else evaluation.with_model(topology, checkpoint)


def _reachable(topology: Topology, address: str) -> Topology:
    """Return `topology` with `address` as the address that other hosts use."""
    return topology.model_copy(update={"transport": topology.transport.model_copy(update={"listen": address})})


def _attach(topology_file: Path | None, run_dir: Path | None) -> int:
    """Attach to `run_dir`. If it is None, attach to the newest run with the topology's name, or, without a topology, to
    the newest run of all.
    """
    try:
        if run_dir is None:
            run_dir = newest_run(place.BASE) if topology_file is None else place.resumable(load(topology_file))
        return detached.attach(RunDir.open(run_dir))
    except (RpcError, TopologyError) as error:
        _refuse(str(error).splitlines())


def _refuse(lines: Iterable[str]) -> NoReturn:
    for line in lines:
        print(line, file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)


def _plan(topology: Topology) -> list[Key]:
    """Return the processes that the topology places on this machine."""
    return [(spec.service, spec.instance) for spec in topology.services_plan() if spec.host == topology.home]


def _show_plan(topology: Topology, path: Path, machines: Mapping[str, str]) -> None:
    """Print the processes that would run. `machines` names the machine found for each of the other hosts."""
    print(f"run directory  {path.absolute()}")
    print(f"steps          {topology.run.last_step}")
    print(f"store memory   {topology.services.batch_store.memory >> 20} MiB under {preflight.shm_root(topology)}")
    if topology.services.monitor.web is not None:
        print(f"page           http://{topology.services.monitor.web.listen}/")
    at_home = {service for service, _ in _plan(topology)}
    print(f"spares         {'; '.join(kind.name for kind in spare_kinds(topology, at_home)) or 'none'}")
    if machines:
        print(f"hosts          {', '.join(f'{host}: {machine}' for host, machine in sorted(machines.items()))}")
    print(
        f"snapshots      {snapshot_bytes(topology) >> 20} MiB of the trainer's state, in the same folder as the store"
    )
    names = preflight.gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = visible_gpus(topology, names if wanted(topology) <= len(names) else None)
    plan = topology.services_plan()
    width = max(len("gpus"), *map(len, gpus.values()))
    hosts = {spec: f"{spec.host or _HERE}  " for spec in plan} if len(topology.store_hosts()) > 1 else {}
    far = max(map(len, hosts.values()), default=0)
    try:
        elements = parameter_count(topology.policy.model)
        model = {key: format_size(nbytes) for key, nbytes in model_memory.per_process(topology, elements).items()}
        total = model_memory.per_place(topology, elements, gpus).get(model_memory.Place(topology.home, ""), 0)
        print(f"model memory   {format_size(total)} of host memory, without activations and libraries")
    except (OSError, ValueError):
        model = {}  # the model is not here yet
    print(f"{'service':<26}{'threads':>8}  {'gpus':<{width}}  {'model':>9}  {'host' if hosts else '':<{far}}module")
    for spec in plan:
        threads, seen = preflight.threads_of(topology, spec.service), gpus[spec.service, spec.instance] or "-"
        where, holds = hosts.get(spec, ""), model.get((spec.service, spec.instance), "-")
        print(f"{spec.name:<26}{threads:>8}  {seen:<{width}}  {holds:>9}  {where:<{far}}{module_of(spec.service)}")


def _launch(
    topology: Topology,
    path: Path,
    access: Path | None,
    interrupts: Interrupts,
    engine: RayEngine | None,
    checkpoint: Path | None,
    *,
    resume: bool,
    detach: bool,
) -> int:
    """Run `topology`, with the weights of `checkpoint` if one is given, and return the exit status."""
    root = preflight.shm_root(topology)
    with ExitStack() as stack:
        if engine is not None:
            stack.callback(engine.close)
        try:
            for leftover in sweep_abandoned(root, path.absolute().parent):
                print(f"removed the leftovers of a killed run: {leftover}")
            if resume:
                RunDir.open(path)
            folder = path if resume else place.folder_for(path)
            if folder != path:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)  # A finished folder has been renamed by then.
            lock = place.lock(folder, stop_limit_s(topology))
            if checkpoint is not None and not (path / "run.json").exists():  # such a path is refused below
                evaluation.add_model(checkpoint, topology, folder / MODEL_FOLDER)
                topology = evaluation.with_model(topology, path.absolute() / MODEL_FOLDER)
            with interrupts.held():  # Signals take effect before the run exists or once its removal has been arranged.
                run = place.reopen(path, topology) if resume else place.create(path, topology, folder)
                stack.callback(run.remove_volatile)
                stack.callback(interrupts.ignore)
                run.hold()
            if access is not None:
                stack.callback(access.unlink, missing_ok=True)
                export(run, Role.SERVICE, access)
            logging.configure(run.log_file(SUPERVISOR, 0), service=SUPERVISOR, instance=0, run=run.name)
            detached.console_of(run).unlink(missing_ok=True)
        except (RpcError, TopologyError) as error:
            _refuse([str(error)])
        except OSError as error:
            _refuse([place.cannot_start_text(path, topology, error)])
        stays: detached.Detached | None = None
        if detach:
            side = detached.detach(run)
            if isinstance(side, detached.Launcher):
                stack.pop_all()  # The child process removes these files.
                return side.wait()
            stays = side
        begun = time.monotonic()
        metrics = Metrics(run.metrics, steps=topology.run.last_step)
        before = len(rewinds(run.journal))
        with Screen() as screen:
            work = "an evaluation" if topology.run.evaluate else f"{topology.run.steps} steps"
            screen.notice(f"run {run.path}: {work}, {len(topology.services_plan())} services")
            if topology.services.monitor.web is not None:
                screen.notice(f"page http://{topology.services.monitor.web.listen}/")
            try:
                ended = asyncio.run(_supervise(run, topology, lock, screen, metrics, before, interrupts, stays, engine))
            except RpcError as error:
                _refuse([str(error)])
    if not place.is_there(run, lock):
        print(place.deleted_text(run), file=sys.stderr)
        return EXIT_FAILED
    metrics.poll(time.monotonic())
    try:
        _summarise(run, topology, ended, metrics, time.monotonic() - begun)
        for name in topology.services.monitor.trackers:
            if rest := unsent(run.path, name):
                print(f"{rest}; python -m launch.ctl --run {run.path} track {name} sends the rest", file=sys.stderr)
        sys.stdout.flush()
    except OSError:  # stdout is closed; the exit status still reports the outcome, even if Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_DONE if ended.outcome == RunOutcome.DONE else EXIT_FAILED


async def _supervise(
    run: RunDir,
    topology: Topology,
    lock: int,
    screen: Screen,
    metrics: Metrics,
    rewinds_before: int,
    interrupts: Interrupts,
    stays: detached.Detached | None,
    engine: RayEngine | None,
) -> RunEnded:
    """Run the supervisor and return how the run ended.

    `stays` lets a detached launcher return once all processes are READY.
    """

    def on_event(event: EVENTS) -> None:
        if stays is not None and supervisor.all_ready:
            stays.ready()
        if isinstance(event, Died):
            when = f"in {event.delay_s:g} s" if event.delay_s else "now"
            screen.notice(
                f"{service_name(*event.key)}: {shorten(event.cause)}; starts again {when} (restart {event.restarts}), "
                f"log: {run.log_file(*event.key)}"
            )
        elif isinstance(event, GivenUp):
            screen.notice(
                f"{service_name(*event.key)}: {shorten(event.cause)}; the run goes on without it "
                f"(ctl restart {service_name(*event.key)} starts it again), log: {run.log_file(*event.key)}"
            )
        elif isinstance(event, SpareNotice):
            screen.notice(event.text)
        elif isinstance(event, Reported) and event.state == ProcessState.DRAINING and event.cause:
            screen.notice(f"stopping: {event.cause} (again: kill now)")

    plan = _plan(topology)
    threads = {key: preflight.threads_of(topology, key[0]) for key in plan}
    doors = {key: listen_endpoint(topology.transport, key[0]) for key in [*plan, (SUPERVISOR, 0)]}
    listen = {key: endpoint for key, endpoint in doors.items() if endpoint}
    gpus = visible_gpus(topology, preflight.gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES")))
    hosts: HostDesk | None = None
    if len(topology.store_hosts()) > 1:
        every = {spec.service for spec in topology.services_plan()}
        away = {service: preflight.threads_of(topology, service) for service in every}
        hosts = HostDesk(HostBook(topology, away), on_notice=screen.notice)
    supervisor = Supervisor(
        run,
        plan,
        threads=threads,
        gpus=gpus,
        listen=listen,
        on_event=on_event,
        lock=lock,
        save_limit_s=stop_limit_s(topology),
        spares=spare_kinds(topology, {service for service, _ in plan}),
        ranks=scaling.ranks(topology),
        resize=functools.partial(scaling.resize, run),
        hosts=hosts,
    )
    taken = 0

    def interrupt() -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            screen.notice("stopping: the open step will be finished and saved (again: kill now)")
            supervisor.stop("interrupted")
        else:
            screen.notice("killing all services")
            supervisor.kill()

    loop = asyncio.get_running_loop()
    interrupts.tell(functools.partial(loop.call_soon_threadsafe, interrupt))
    told = _Rewinds(run, topology, rewinds_before)
    warned = _Warnings(run)
    beside = [
        loop.create_task(_show(supervisor, screen, metrics, told, warned, stays)),
        loop.create_task(_keep(run, lock, supervisor)),
    ]
    if engine is not None and hosts is not None:
        engine.start(access_of(run, Role.SERVICE), run.path, hosts)
    try:
        return await supervisor.run()
    finally:
        interrupts.ignore()
        if engine is not None:
            engine.close()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        told.show(screen)
        warned.show(screen)


async def _keep(run: RunDir, lock: int, supervisor: Supervisor) -> None:
    """Kill everything once the run directory is gone, because training results could no longer be saved."""
    while True:
        await asyncio.sleep(POLL_S)
        if not place.is_there(run, lock):
            supervisor.kill(place.deleted_text(run))


class _Rewinds:
    """Shows each of the run's returns to an earlier step once."""

    def __init__(self, run: RunDir, topology: Topology, told: int) -> None:
        """Skip the first `told` returns, which happened before this launch."""
        self._journal = run.journal
        self._deterministic = topology.run.deterministic
        self._told = told

    def show(self, screen: Screen) -> None:
        found = rewinds(self._journal)
        for step, committed, cause in found[self._told :]:
            screen.notice(rewind_text(step, committed, deterministic=self._deterministic, cause=cause))
        self._told = max(self._told, len(found))


class _Warnings:
    """Shows the warnings that are added to the run's warnings file from now on."""

    def __init__(self, run: RunDir) -> None:
        self._lines = FollowedFile(run.warnings)
        for _ in self._lines.new_lines():
            continue  # An earlier launch has shown this warning.

    def show(self, screen: Screen) -> None:
        for line in self._lines.new_lines():
            record = warnings.parse(line)
            if record is not None:
                screen.notice(warnings.line_of(record))


async def _show(
    supervisor: Supervisor,
    screen: Screen,
    metrics: Metrics,
    told: _Rewinds,
    warned: _Warnings,
    stays: detached.Detached | None,
) -> None:
    status: Status | None = None
    troubles = Troubles()
    while True:
        await asyncio.sleep(POLL_S)
        told.show(screen)
        warned.show(screen)
        states: dict[str, str] = {service_name(*key): each.state for key, each in supervisor.state.processes.items()}
        states |= {service_name(row.service, row.instance): row.state for row in supervisor.rows_of_hosts()}
        if stays is not None and supervisor.all_ready:
            stays.ready()
        if supervisor.draining:
            left = [name for name, process in states.items() if process not in _OVER]
            screen.progress(f"ending: {', '.join(left)}")
            continue
        if states.get("scheduler/0") == ProcessState.READY:
            status = await supervisor.scheduler_status(STATUS_DEADLINE_S)
            for notice in troubles.take(status) if status is not None else ():
                screen.notice(notice)
        metrics.poll(time.monotonic())
        text = metrics.text() if metrics.last else starting_text(states, status)
        trouble = troubles.text()
        screen.progress(f"{trouble}  {text}" if trouble else text)


def _summarise(run: RunDir, topology: Topology, ended: RunEnded, metrics: Metrics, wall_s: float) -> None:
    if ended.outcome == RunOutcome.FAILED:
        print(f"the run failed: {ended.cause}", file=sys.stderr)
        for line in last_lines(run, ended.key, LOG_LINES) if ended.key else []:
            print(f"    {line}", file=sys.stderr)
    elif ended.outcome == RunOutcome.STOPPED:
        print(f"the run was stopped at step {metrics.step} of {metrics.steps}: {ended.cause}", file=sys.stderr)
    saved = max(checkpoint_steps(run.checkpoints), default=0)
    if ended.outcome != RunOutcome.DONE and saved < metrics.step:
        lost = f"steps {saved + 1}-{metrics.step}" if metrics.step > saved + 1 else f"step {metrics.step}"
        print(f"{lost} not saved: --resume goes back to step {saved}", file=sys.stderr)
    evaluates = topology.run.evaluate
    for line in evaluation.table(topology, metrics.last) if evaluates else accuracy_lines(metrics):
        print(line)
    print(f"wall time  {duration(wall_s)}")
    print(f"run        {run.path}")
    print(f"report     {write_in_time(run)}")
    if ended.outcome == RunOutcome.DONE and evaluates:
        print(f"evaluated  {topology.policy.model}")
    elif ended.outcome == RunOutcome.DONE:
        print(f"model      {run.export}")
        print(f'load it    transformers.AutoModelForCausalLM.from_pretrained("{run.export}")')
        for line in evaluation.best_lines(run):
            print(line)
    else:
        print(f"continue   python -m launch.cluster {run.topology} --run-dir {run.path} --resume")


if __name__ == "__main__":
    app()
