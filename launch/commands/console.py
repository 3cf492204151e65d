"""Prints the output of a launcher: the plan of `--dry-run`, notices and progress, and the summary at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from launch.checks import preflight
from launch.commands import evaluation
from launch.placement.book import Told
from launch.processes.plan import command_of, gpus_wanted, own_gpus, processes_at_home, threads_of, visible_gpus
from launch.spares.processes import spare_kinds
from launch.supervisor.events import Died, GivenUp, Reported, RunEnded, RunOutcome
from launch.supervisor.server import EVENTS, Supervisor
from launch.viewers.ended import resume_command
from launch.viewers.progress import (
    Metrics,
    Repeats,
    Screen,
    Troubles,
    duration,
    evaluation_lines,
    rewind_text,
    starting_text,
)
from launch.viewers.report import write_in_time
from proto.messages import Status
from services.scheduler.journal_files import rewinds
from services.tracker import ledger
from shared.actor.service import ProcessState
from shared.rundir import RunDir, checkpoint_steps, service_name
from shared.runfiles import warnings
from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import last_lines, shorten
from shared.topology import Topology, memory_plan, snapshot_bytes
from shared.topology.capacity import parameter_counts
from shared.topology.fields import format_size
from shared.topology.lora import FOLDER as ADAPTER_FOLDER
from shared.topology.memory_plan import by_place, memory_lines, uses
from shared.topology.model_files import vocabulary
from shared.topology.schema import Policy
from shared.topology.serve import MADE_KEYS

STATUS_DEADLINE_S = 2.0
POLL_S = 1.0
LOG_LINES = 10

_HERE = "this machine"
_OVER = frozenset({ProcessState.STOPPED, ProcessState.FAILED, ProcessState.DRAINED})


def show_plan(topology: Topology, path: Path, machines: Mapping[str, str]) -> None:
    """Print the processes that would run. `machines` names the machine found for each of the other hosts."""
    print(f"run directory  {path.absolute()}")
    if topology.serve is None:
        print(f"steps          {topology.last_step}")
    else:
        print(f"server         http://{topology.serve.listen} ({', '.join(topology.serve.models)})")
    print(f"store memory   {topology.services.batch_store.memory >> 20} MiB under {preflight.shm_root(topology)}")
    if topology.monitor.web is not None:
        print(f"page           http://{topology.monitor.web.listen}/")
    at_home = {service for service, _ in processes_at_home(topology)}
    print(f"spares         {'; '.join(kind.name for kind in spare_kinds(topology, at_home)) or 'none'}")
    if machines:
        print(f"hosts          {', '.join(f'{host}: {machine}' for host, machine in sorted(machines.items()))}")
    whose = preflight.trainers_named(topology)
    mib = snapshot_bytes(topology) >> 20
    print(f"snapshots      {mib} MiB of the state of {whose}, in the same folder as the store")
    names = own_gpus()
    gpus = visible_gpus(topology, names if gpus_wanted(topology) <= len(names) else None)
    plan = topology.services_plan()
    width = max(len("gpus"), *map(len, gpus.values()))
    hosts = {spec: f"{spec.host or _HERE}  " for spec in plan} if len(topology.store_hosts()) > 1 else {}
    far = max(map(len, hosts.values()), default=0)
    try:
        elements = parameter_counts(topology)
        model = {key: format_size(nbytes) for key, nbytes in memory_plan.per_process(topology, elements).items()}
        places = by_place(uses(topology, elements, gpus, vocabulary(topology.policy.model)))
        memory = memory_lines(topology, places, preflight.room_of(topology, places))
    except (OSError, ValueError):
        model, memory = {}, []  # the model is not on this machine yet, or cannot be read
    print(f"{'service':<26}{'threads':>8}  {'gpus':<{width}}  {'model':>9}  {'host' if hosts else '':<{far}}module")
    for spec in plan:
        threads, seen = threads_of(topology, spec.service), gpus[spec.service, spec.instance] or "-"
        where, holds = hosts.get(spec, ""), model.get((spec.service, spec.instance), "-")
        command = " ".join(command_of(spec.service))
        print(f"{spec.name:<26}{threads:>8}  {seen:<{width}}  {holds:>9}  {where:<{far}}{command}")
    for line in memory:
        print(line)


def failure_lines(run: RunDir, ended: RunEnded) -> list[str]:
    """Return the cause of a failed run and, unless it explains everything, the last lines of the log of the process at
    fault."""
    more = last_lines(run, ended.key, LOG_LINES) if ended.key and not ended.explained else []
    return [f"the run failed: {ended.cause}", *(f"    {line}" for line in more)]


def _export_lines(run: RunDir, policy: Policy) -> list[str]:
    """Return lines that name what was exported, and how to load it."""
    lora, model = policy.lora, "CausalLM" if policy.head == "language" else "SequenceClassification"
    adapter = run.export / ADAPTER_FOLDER
    if lora is not None and not lora.export_merged:
        return [
            f"adapter    {adapter}",
            f'load it    peft.AutoPeftModelForCausalLM.from_pretrained("{adapter}")',
        ]
    return [
        f"model      {run.export}",
        f'load it    transformers.AutoModelFor{model}.from_pretrained("{run.export}")',
        *([] if lora is None else [f"adapter    {adapter}"]),
    ]


class Console:
    """Shows a run from its start to its end: notices and the progress on `screen`, then a summary.

    Create it before the processes of this launch start. Whatever the files already contain was shown by an earlier
    launch, so it is not shown again.
    """

    def __init__(self, run: RunDir, topology: Topology, screen: Screen) -> None:
        self._run = run
        self._topology = topology
        self._screen = screen
        self._metrics = Metrics(run.path, steps=topology.last_step)
        self._begun = time.monotonic()
        self._rewinds = len(rewinds(run.journal))
        self._repeats = Repeats()
        self._warnings = FollowedFile(run.warnings)
        for _ in self._warnings.new_lines():
            continue  # An earlier launch has shown this warning.

    def begin(self) -> None:
        """Show what has been started."""
        run, serve = self._topology.run, self._topology.serve
        work = "a server" if serve is not None else "an evaluation" if run.evaluate else f"{run.steps} steps"
        self.notice(f"run {self._run.path}: {work}, {len(self._topology.services_plan())} services")
        if serve is not None:
            keys = serve.keys or f"{self._run.keys / MADE_KEYS} (made for this run)"
            self.notice(f"server http://{serve.listen} (clients' keys: {keys})")
        if self._topology.monitor.web is not None:
            self.notice(f"page http://{self._topology.monitor.web.listen}/")

    def notice(self, text: str) -> None:
        """Show `text` above the progress."""
        self._screen.notice(text)

    def tell(self, event: EVENTS) -> None:
        """Show an event of the supervisor if the user should know about it."""
        if isinstance(event, Died):
            when = f"in {event.delay_s:g} s" if event.delay_s else "now"
            self.notice(
                f"{service_name(*event.key)}: {shorten(event.cause)}; starts again {when} (restart {event.restarts}), "
                f"log: {self._run.log_file(*event.key)}"
            )
        elif isinstance(event, GivenUp):
            self.notice(
                f"{service_name(*event.key)}: {shorten(event.cause)}; the run goes on without it "
                f"(ctl restart {service_name(*event.key)} starts it again), log: {self._run.log_file(*event.key)}"
            )
        elif isinstance(event, Told):
            self.notice(event.text)
        elif isinstance(event, Reported) and event.state == ProcessState.DRAINING and event.cause:
            self.notice(f"stopping: {event.cause} (again: kill now)")

    def catch_up(self) -> None:
        """Show warnings and returns to an earlier step that have not been shown yet."""
        returns = rewinds(self._run.journal)
        for step, committed, cause in returns[self._rewinds :]:
            deterministic = self._topology.run.deterministic
            self.notice(rewind_text(step, committed, deterministic=deterministic, cause=cause))
        self._rewinds = max(self._rewinds, len(returns))
        for record in warnings.new_warnings(self._warnings):
            if shown := self._repeats.shown(warnings.line_of(record)):
                self.notice(shown)

    async def follow(self, supervisor: Supervisor, on_poll: Callable[[], None]) -> NoReturn:
        """Show the progress until cancelled. `on_poll` is called once per second."""
        status: Status | None = None
        troubles = Troubles()
        while True:
            await asyncio.sleep(POLL_S)
            self.catch_up()
            states: dict[str, str] = {
                service_name(*key): process.state for key, process in supervisor.state.processes.items()
            }
            states |= {service_name(row.service, row.instance): row.state for row in supervisor.hosts.book.rows()}
            on_poll()
            if supervisor.state.ending:
                left = [name for name, process in states.items() if process not in _OVER]
                self._screen.progress(f"ending: {', '.join(left)}")
                continue
            if states.get("scheduler/0") == ProcessState.READY:
                status = await supervisor.sockets.status(STATUS_DEADLINE_S)
                for notice in troubles.take(status) if status is not None else ():
                    self.notice(notice)
            self._metrics.poll(time.monotonic())
            steps = status if self._topology.serve is None else None  # a server has none
            text = self._metrics.text() if self._metrics.last else starting_text(states, steps)
            self._screen.progress(text, troubles=troubles.text, losses=troubles.losses)

    def summarise(self, ended: RunEnded) -> None:
        """Print how the run ended and where its results are."""
        run, topology, metrics = self._run, self._topology, self._metrics
        wall_s = time.monotonic() - self._begun
        metrics.poll(time.monotonic())
        if ended.outcome == RunOutcome.FAILED:
            for line in failure_lines(run, ended):
                print(line, file=sys.stderr)
        elif ended.outcome == RunOutcome.STOPPED:
            print(f"the run was stopped at step {metrics.step} of {metrics.steps}: {ended.cause}", file=sys.stderr)
        saved = max(checkpoint_steps(run.checkpoints), default=0)
        if ended.outcome != RunOutcome.DONE and saved < metrics.step:
            lost = f"steps {saved + 1}-{metrics.step}" if metrics.step > saved + 1 else f"step {metrics.step}"
            print(f"{lost} not saved, so --resume goes back to step {saved}", file=sys.stderr)
        evaluates, lora = topology.run.evaluate, topology.policy.lora
        for line in evaluation.table(topology, metrics.last) if evaluates else evaluation_lines(metrics):
            print(line)
        print(f"wall time  {duration(wall_s)}")
        print(f"run        {run.path}")
        print(f"report     {write_in_time(run)}")
        if ended.outcome == RunOutcome.DONE and evaluates:
            print(f"evaluated  {(lora and lora.adapter_path) or topology.policy.model}")
        elif ended.outcome == RunOutcome.DONE:
            for line in _export_lines(run, topology.policy):
                print(line)
            for model in topology.trained[1:]:
                print(f"{model.name:<10} {model.exported(run.path)}")
            for line in evaluation.best_lines(run):
                print(line)
        else:
            print(f"continue   {resume_command(run)}")
        for name in topology.monitor.trackers:
            if see := ledger.read(run.path, name).see:
                print(f"{name:<10} {see}")
            if rest := ledger.unsent(run.path, name):
                print(f"{rest}; python -m launch.ctl --run {run.path} track {name} sends the rest", file=sys.stderr)
        sys.stdout.flush()
