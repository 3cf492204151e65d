"""`python -m launch.cluster T.yaml` runs a topology from start to end on this machine. It does no training itself.

Exit status: 0 if the run is done, 1 if it failed or was stopped, 2 if the command line or the topology is wrong. With
`--stopped-ok`, a run that was stopped on purpose (`ctl stop`, Ctrl-C or SIGTERM) also has status 0.

SIGINT, SIGTERM and SIGHUP are handled from the first line to the last. A signal that the launcher inherited as ignored
stays ignored: `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT in commands started with `&`.
SIGTERM always ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from launch.checks import addresses, hub, preflight, resumed
from launch.checks.findings import Findings
from launch.commands import detached, evaluation, place
from launch.commands.access import access_of, export
from launch.commands.console import Console, show_plan
from launch.placement.book import HostBook
from launch.placement.facts import facts, refusals
from launch.placement.ray_engine import RayEngine
from launch.processes.plan import SUPERVISOR, listen_endpoint, own_gpus, processes_at_home, resources_of
from launch.spares.processes import spare_kinds
from launch.supervisor.events import RunEnded, RunOutcome
from launch.supervisor.server import EVENTS, Supervisor
from launch.utf8 import ensure_utf8
from launch.viewers.progress import Screen
from shared.actor import logging
from shared.inputs import Inputs
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, check_new, newest_run, run_path, sweep_abandoned
from shared.security.roles import Role
from shared.topology import Topology, TopologyError, hub_names, load, stop_limit_s
from shared.topology.load import written

POLL_S = 1.0
EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


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
    no_call: Annotated[
        bool, typer.Option("--no-call", help="do not call the reward functions with a row before the run starts")
    ] = False,
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
        bool, typer.Option("--evaluate", help="do not train; score the evaluation sets, show a table and exit")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="evaluate RUN/checkpoints/step-N or RUN/export instead of policy.model"
        ),
    ] = None,
    stopped_ok: Annotated[
        bool, typer.Option("--stopped-ok", help="exit with status 0 also if the run is stopped on purpose")
    ] = False,
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
        if overrides or resume or no_call or dry_run or detach or evaluate or checkpoint or access or stopped_ok:
            _refuse(["--attach: shows a run in progress and accepts no option other than --run-dir"])
        raise typer.Exit(_attach(topology_file, run_dir))
    if topology_file is None:
        _refuse(["TOPOLOGY.yaml: missing; name the file that describes the run (see launch/topologies/)"])
    if checkpoint is not None and not evaluate:
        _refuse([f"--checkpoint {checkpoint}: has no effect without --evaluate; add it, or set policy.model to train"])
    if evaluate and resume:
        _refuse(["--evaluate: starts a new run, so there is nothing to --resume; leave one of them out"])
    checkpoint = checkpoint.absolute() if checkpoint is not None else None
    try:
        topology, path, fetches = _loaded(
            topology_file, overrides or [], run_dir, interrupts, resume=resume, dry_run=dry_run, evaluates=evaluate
        )
        if evaluate:
            topology = _for_evaluation(topology, topology_file, checkpoint)
        topology, inputs, findings = _checked(topology, topology_file, path, resume=resume, calls=not no_call)
        engine = RayEngine(topology) if topology.placement.engine == "ray" else None
        if engine is not None and not findings.errors:
            engine.check(path, findings)
            if topology.transport.listen is None and engine.address:
                transport = topology.transport.model_copy(update={"listen": engine.address})
                topology = topology.model_copy(update={"transport": transport})
                addresses.check_doors(topology, findings)
        if access is not None:
            _check_access(access, topology, findings)
        for line in findings.notes:
            print(line)
        for line in findings.warnings:
            print(f"warning: {line}" if not line.startswith(" ") else line, file=sys.stderr)
        if engine is not None and (findings.errors or dry_run):
            engine.close()
        if dry_run:
            for missing in fetches:
                if missing.files:
                    print(f"would fetch    {missing}")
            show_plan(topology, path, engine.machines if engine is not None else {})
        if findings.errors:
            _refuse(findings.errors)
        if dry_run:
            raise typer.Exit(EXIT_DONE)
        if checkpoint is not None and not evaluation.is_checkpoint(checkpoint):
            checkpoint = None  # its folder is already a model
        status = _launch(
            topology,
            path,
            inputs,
            interrupts,
            engine,
            checkpoint,
            access,
            resume=resume,
            detaches=detach,
            stopped_ok=stopped_ok,
        )
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        status = EXIT_FAILED
    raise typer.Exit(status)


def exit_status(outcome: RunOutcome, *, stopped_ok: bool) -> int:
    """Return the exit status for a run that ended like this."""
    good = (RunOutcome.DONE, RunOutcome.STOPPED) if stopped_ok else (RunOutcome.DONE,)
    return EXIT_DONE if outcome in good else EXIT_FAILED


def _loaded(
    file: Path,
    overrides: list[str],
    run_dir: Path | None,
    interrupts: Interrupts,
    *,
    resume: bool,
    dry_run: bool,
    evaluates: bool,
) -> tuple[Topology, Path, list[hub.Missing]]:
    """Return the topology, the run directory, and what a dry run would fetch from the hub. A start fetches it."""
    fetches: list[hub.Missing] = []
    try:
        names = hub_names(file, overrides)
        topology = load(file, overrides, check_files=not names)
        path = run_dir or (place.resumable(topology) if resume else place.default_path(topology, evaluates=evaluates))
        run_path(path)
        if names:
            overrides = [*overrides, *(hub.pinned(names, path / "topology.yaml") if resume else ())]
            names = hub_names(file, overrides)
            if dry_run:
                fetches = hub.missing(names)
            else:
                with interrupts.telling(hub.leave):
                    hub.fetch(names)
            topology = load(file, overrides, check_files=not fetches)
        if resume and (more := resumed.kept(path, topology, written(file, overrides))):
            topology = load(file, [*overrides, *more], check_files=not fetches)
    except TopologyError as error:
        _refuse(str(problem) for problem in error.problems)
    except hub.HubError as error:
        _refuse([f"{file}: {error}"])
    except RpcError as error:
        _refuse([str(error)])
    return topology, path, fetches


def _checked(
    topology: Topology, file: Path, path: Path, *, resume: bool, calls: bool
) -> tuple[Topology, Inputs, Findings]:
    """Return `topology` as it can be run here, the inputs of the run, and the findings of all checks on this machine,
    which are the same for a dry run and a start."""
    try:
        if not resume:
            check_new(path)
        begun, topology = resumed.begun(path, topology) if resume else (Inputs(), topology)
        findings = preflight.check(topology, str(file), begun.rows, calls=calls)
        inputs = resumed.inputs_now(topology, findings.rows, begun)
    except (RpcError, TopologyError, OSError) as error:
        _refuse(str(error).splitlines())
    if resume:
        resumed.compare(path, topology, begun, inputs, findings)
    topology = preflight.with_room(topology)
    return topology if findings.errors else preflight.prove(topology, findings), inputs, findings


def _check_access(file: Path, topology: Topology, findings: Findings) -> None:
    """Check that an access file can be written, and that another machine can use it."""
    if topology.transport.listen is None:
        findings.errors.append(f"--export-access {file}: the run answers this machine only; set transport.listen")
    if not os.access(file.parent, os.W_OK):
        findings.errors.append(f"--export-access {file}: {file.parent} is not a writable folder; name another")


def _for_evaluation(topology: Topology, file: Path, checkpoint: Path | None) -> Topology:
    """Return `topology` for `--evaluate`. Refuse an unusable checkpoint or a topology without evaluation sets."""
    if not topology.data.eval:
        _refuse([f"{file}: data.eval: --evaluate has no evaluation set to score; add one"])
    topology = evaluation.without_training(topology)
    if checkpoint is None:
        return topology
    try:
        evaluation.check_checkpoint(checkpoint, topology.policy.model, topology.policy.lora)
        return evaluation.with_weights(topology, checkpoint)
    except RpcError as error:
        _refuse([str(error)])


def _attach(topology_file: Path | None, run_dir: Path | None) -> int:
    """Attach to the run in `run_dir`. If `run_dir` is None, attach to the newest run with the topology's name, or,
    without a topology, to the newest run of all.
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


def _launch(
    topology: Topology,
    path: Path,
    inputs: Inputs,
    interrupts: Interrupts,
    engine: RayEngine | None,
    checkpoint: Path | None,
    access: Path | None,
    *,
    resume: bool,
    detaches: bool,
    stopped_ok: bool,
) -> int:
    """Run `topology`, with the weights of a checkpoint if one is given, and return the exit status."""
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
                topology = evaluation.with_checkpoint(topology, checkpoint, folder, path.absolute())
            with interrupts.held():  # Signals take effect before the run exists or once its removal has been arranged.
                if resume:
                    run = RunDir.reopen(path, topology=topology, shm_root=root)
                else:
                    run = place.create(path, topology, folder)
                stack.callback(run.remove_volatile)
                stack.callback(interrupts.ignore)
                run.hold()
                if checkpoint is not None:
                    inputs = resumed.inputs_now(topology, inputs.rows, Inputs())
                inputs.save(run.path)
            if access is not None:
                access = access.absolute()
                stack.callback(access.unlink, missing_ok=True)
                export(run, Role.SERVICE, access)
            logging.configure(run.log_file(SUPERVISOR, 0), service=SUPERVISOR, instance=0, run=run.name)
            detached.console_of(run).unlink(missing_ok=True)
        except (RpcError, TopologyError) as error:
            _refuse([str(error)])
        except OSError as error:
            _refuse([place.cannot_start_text(path, topology, error)])
        stays: detached.Detached | None = None
        if detaches:
            side = detached.detach(run)
            if isinstance(side, detached.Launcher):
                stack.pop_all()  # The child process removes these files.
                return side.wait()
            stays = side
        stack.callback(resumed.ModelReader(run, topology, inputs).stop)
        with Screen() as screen:
            console = Console(run, topology, screen)
            console.begin()
            try:
                ended = asyncio.run(_supervise(run, topology, lock, console, interrupts, stays, engine))
            except RpcError as error:
                _refuse([str(error)])
    if not place.is_there(run, lock):
        print(place.deleted_text(run), file=sys.stderr)
        return EXIT_FAILED
    try:
        console.summarise(ended)
    except OSError:  # stdout is closed; the exit status still reports the outcome, even if Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return exit_status(ended.outcome, stopped_ok=stopped_ok)


async def _supervise(
    run: RunDir,
    topology: Topology,
    lock: int,
    console: Console,
    interrupts: Interrupts,
    stays: detached.Detached | None,
    engine: RayEngine | None,
) -> RunEnded:
    """Run the supervisor and return how the run ended.

    `stays` lets a detached launcher return once all processes are READY.
    """

    def ready() -> None:
        if stays is not None and supervisor.all_ready:
            stays.ready()

    def on_event(event: EVENTS) -> None:
        ready()
        console.tell(event)

    given = resources_of(topology, own_gpus())
    plan = {key: given[key] for key in processes_at_home(topology)}
    hosts = HostBook(topology)
    supervisor = Supervisor(
        run,
        plan,
        start_limit_s=topology.run.start_limit_s,
        on_event=on_event,
        listen=listen_endpoint(topology.transport, SUPERVISOR),
        lock=lock,
        save_limit_s=stop_limit_s(topology),
        spares=spare_kinds(topology, {service for service, _ in plan}),
        ranks=topology.ranks,
        hosts=hosts,
        refusals=functools.partial(refusals, topology, facts()) if hosts.hosts else None,
    )
    taken = 0

    def interrupt() -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            console.notice("stopping: the open step will be finished and saved (again: kill now)")
            supervisor.stop("interrupted")
        else:
            console.notice("killing all services")
            supervisor.kill()

    loop = asyncio.get_running_loop()
    interrupts.tell(functools.partial(loop.call_soon_threadsafe, interrupt))
    beside = [
        loop.create_task(console.follow(supervisor, on_poll=ready)),
        loop.create_task(_keep(run, lock, supervisor)),
    ]
    if engine is not None and hosts.hosts:
        engine.start(access_of(run, Role.SERVICE), supervisor.hosts)
    try:
        return await supervisor.run()
    finally:
        interrupts.ignore()
        if engine is not None:
            engine.close()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        console.catch_up()


async def _keep(run: RunDir, lock: int, supervisor: Supervisor) -> None:
    """Kill everything once the run directory is gone, because training results could no longer be saved."""
    while True:
        await asyncio.sleep(POLL_S)
        if not place.is_there(run, lock):
            supervisor.kill(place.deleted_text(run))


class Interrupts:
    """Handles the signals for the whole life of the process. Use it only on the main thread.

    A signal raises KeyboardInterrupt, unless `tell` has set a function to call instead. asyncio's own handlers would
    not suffice, because a loop that closes restores the default action of the signals, and that action ends the
    process.
    """

    def __init__(self) -> None:
        inherited = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
        kept = [number for number, handler in inherited.items() if handler != signal.SIG_IGN]
        self._numbers = [*kept, signal.SIGTERM]
        self._told: Callable[[], object] = self._raise
        self._holds = self._waits = False
        for number in self._numbers:
            signal.signal(number, self._take)

    def tell(self, told: Callable[[], object]) -> None:
        """Call `told` on each signal from now on, on the main thread."""
        self._told = told

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay any signal until the end of the block. A signal mask would not be enough, because other threads would
        still receive the signals."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        if self._waits:
            self._told()

    @contextlib.contextmanager
    def telling(self, told: Callable[[], object]) -> Iterator[None]:
        """Call `told` on each signal within the block."""
        before, self._told = self._told, told
        try:
            yield
        finally:
            self._told = before

    def ignore(self) -> None:
        """Ignore the signals until the process ends: the run is over, and its outcome is about to be reported."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._waits = True
        else:
            self._told()

    def _raise(self) -> None:
        self.ignore()  # No signal interrupts the cleanup after the exception.
        raise KeyboardInterrupt


if __name__ == "__main__":
    ensure_utf8()
    app()
