"""Starts and watches the spare processes of a run (`launch.spares.spare`), and has services forked from them.

A spare imports the modules that several services need, once for all of them. There is at most one spare of a kind. One
transition is missing on purpose: a kind of spare that was given up is not tried again, because its imports would fail
again; its services start without a spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import structlog

from launch.processes.plan import OUTSIDE_KILLS, SUPERVISOR, Key, Resources, describe_exit
from launch.processes.programs import Child, Programs, own_environment, rss_bytes
from proto.messages import SpareRow
from shared.rundir import RunDir, service_name
from shared.topology import Topology, model_files

MIB = 1 << 20
SPARE: Key = ("spare", 0)
"""Stands for a spare wherever the key of a process is needed."""
COMMAND_BYTES = 1024
"""Length of a spare's command line, which each fork overwrites with the command line of its service."""
FORK_LIMIT_S = 5.0
"""Maximum time, in seconds, for a warm spare to fork. The supervisor does nothing else during this time."""
WINDOW_S = 300.0
KILL_LIMIT = 3
"""If spares of a kind are killed this many times within `WINDOW_S`, the kind is given up, because memory may be
short."""
_LIGHT = {
    "scheduler": "services.scheduler.server",
    "batch-store": "services.batch_store.server",
    "monitor": "services.monitor.server",
    "policy-trainer": "services.policy_trainer.service",
    "recorder": "services.recorder.server",
}
"""The services of most runs that do not compute with a model, and their imports."""
_VLLM = ("services.rollout.engines.vllm_setup:import_vllm",)
_TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


class SpareKind(NamedTuple):
    """The services that are forked from the same spare, and the imports of that spare."""

    services: tuple[str, ...]
    imports: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.services)


@dataclass
class _Spare:
    """A spare process, the socket for its orders, and the end of the time for its imports."""

    child: Child
    orders: socket.socket
    limit: asyncio.TimerHandle
    warm: bool = False
    """Whether the spare has imported everything and can be forked."""


class SpareProcesses:
    """The spares of one run. The object belongs to the main thread's event loop, on which it was created."""

    def __init__(
        self,
        run: RunDir,
        programs: Programs,
        kinds: Iterable[SpareKind],
        *,
        start_limit_s: float,
        on_settled: Callable[[Collection[str]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        """A kind whose spare does not finish its imports within `start_limit_s` seconds is given up. `on_settled` is
        called with the names of services once their spare can be used or has failed. `on_notice` is called with lines
        for the user: how much memory the spares use, or the reason why a kind has none."""
        self._run = run
        self._programs = programs
        self._kinds = list(kinds)
        self._start_limit_s = start_limit_s
        self._on_settled = on_settled
        self._on_notice = on_notice
        self._spares: dict[SpareKind, _Spare] = {}
        self._kills: dict[SpareKind, deque[float]] = {kind: deque() for kind in self._kinds}
        """When spares were killed, for each kind that has not been given up."""
        self._reported = False
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger(SUPERVISOR)

    def fill(self) -> None:
        """Start the missing spares."""
        for kind in [kind for kind in self._kills if kind not in self._spares]:
            self._start(kind)

    def fork(self, key: Key, resources: Resources, command: Sequence[str], output: BinaryIO) -> Child | None:
        """Fork a spare to run `command` as the process `key`. Return the fork, or None if no spare can be used."""
        kind = next((candidate for candidate in self._kinds if key[0] in candidate.services), None)
        spare = self._spares.get(kind) if kind is not None else None
        if kind is None or spare is None or not spare.warm:
            return None
        spare.child.signal(signal.SIGCONT)  # someone may have stopped it
        ours, theirs = socket.socketpair()
        order = json.dumps([command[2:], own_environment(resources)]).encode()
        try:
            with ours:
                with theirs:
                    socket.send_fds(spare.orders, [order], [output.fileno(), theirs.fileno()])
                ours.settimeout(FORK_LIMIT_S)
                if not (pid := ours.recv(32)):
                    raise ConnectionError("the fork has ended")
                child = self._programs.adopt(key, int(pid))
                with contextlib.suppress(OSError):  # it has just died, which its pidfd reports
                    ours.send(b"!")
        except OSError as error:  # it has just died, was stopped again, or cannot fork
            self._log.warning("spare lost", services=kind.services, pid=spare.child.pid, error=str(error))
            spare.warm = False
            spare.child.signal(signal.SIGKILL)
            return None
        self._log.info("spare forked", name=service_name(*key), pid=child.pid)
        return child

    def rows(self) -> list[SpareRow]:
        return [
            SpareRow(list(kind.services), spare.child.pid, spare.warm, rss_bytes(spare.child.pid))
            for kind, spare in self._spares.items()
        ]

    def close(self) -> None:
        """Kill all spares. Services that were forked from them keep running."""
        for kind in list(self._spares):
            child = self._release(kind)
            child.signal(signal.SIGKILL)
            self._programs.reap(child)

    def _start(self, kind: SpareKind) -> None:
        try:
            child, ours = self._started(kind)
        except OSError as error:
            self._give_up(kind, str(error))
            self._loop.call_soon(self._on_settled, kind.services)
            return
        limit = self._loop.call_later(self._start_limit_s, self._on_limit, kind)
        self._spares[kind] = _Spare(child, ours, limit)
        self._loop.add_reader(child.descriptor, self._on_exit, kind)
        self._loop.add_reader(ours, self._on_warm, kind)

    def _started(self, kind: SpareKind) -> tuple[Child, socket.socket]:
        """Start a spare. Return it with the socket for its orders. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "launch.spares.spare", str(theirs.fileno()), "--run", str(self._run.path)]
        command.append("-" * max(COMMAND_BYTES - sum(len(os.fsencode(argument)) + 1 for argument in command), 1))
        try:
            with theirs, self._output(kind).open("ab") as output:
                ours.send(json.dumps(kind.imports).encode())  # the socket buffers this until the spare reads it
                child = self._programs.start(SPARE, Resources(), command, output, (theirs.fileno(),))
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        return child, ours

    def _release(self, kind: SpareKind) -> Child:
        """Stop watching the spare of `kind`."""
        spare = self._spares.pop(kind)
        spare.limit.cancel()
        self._loop.remove_reader(spare.child.descriptor)
        self._loop.remove_reader(spare.orders)
        spare.orders.close()
        return spare.child

    def _on_warm(self, kind: SpareKind) -> None:
        spare = self._spares[kind]
        self._loop.remove_reader(spare.orders)
        with contextlib.suppress(OSError):
            spare.warm = bool(spare.orders.recv(1))
        if not spare.warm:
            return  # it has died, which its pidfd also reports
        spare.limit.cancel()
        pid = spare.child.pid
        self._log.info("spare warm", services=kind.services, pid=pid, rss_bytes=rss_bytes(pid))
        complete = self._kills.keys() <= self._spares.keys() and all(other.warm for other in self._spares.values())
        if complete and not self._reported:
            self._reported = True
            size = sum(row.rss_bytes for row in self.rows())
            count = sum(len(kind.services) for kind in self._spares)
            self._on_notice(f"libraries imported once for {count} services: {size / MIB:.0f} MiB")
        self._on_settled(kind.services)

    def _on_exit(self, kind: SpareKind) -> None:
        child = self._release(kind)
        status = self._programs.reap(child)
        self._log.warning("spare died", services=kind.services, pid=child.pid, status=status)
        if kind in self._kills and (cause := why_to_give_up(self._kills[kind], status, self._loop.time())):
            self._give_up(kind, cause)
        self._on_settled(kind.services)

    def _on_limit(self, kind: SpareKind) -> None:
        self._give_up(kind, f"its imports did not finish within {self._start_limit_s:g} s (run.start_limit_s)")
        self._spares[kind].child.signal(signal.SIGKILL)

    def _give_up(self, kind: SpareKind, cause: str) -> None:
        del self._kills[kind]
        self._log.warning("spare given up", services=kind.services, cause=cause)
        self._on_notice(f"{kind.name}: started without a spare process from now on: {cause}, log: {self._output(kind)}")

    def _output(self, kind: SpareKind) -> Path:
        return self._run.logs / f"spare-{self._kinds.index(kind)}.out"


def why_to_give_up(kills: deque[float], status: int, now: float) -> str:
    """Return why no further spare of a kind is started after one has exited with `status`, or an empty string.

    `kills` are the times at which spares of the kind were killed. A kill is added to them.
    """
    if status not in OUTSIDE_KILLS:
        return describe_exit(status)
    kills.append(now)
    while kills[0] < now - WINDOW_S:
        kills.popleft()
    if len(kills) < KILL_LIMIT:
        return ""
    return f"{describe_exit(status)} (kill {len(kills)} in {WINDOW_S:g} s, limit {KILL_LIMIT})"


def spare_kinds(topology: Topology, services: Collection[str]) -> list[SpareKind]:
    """Return the kinds of spare process that a host keeps if it runs `services`, or an empty list if
    `run.spares` is false.

    An import is `module`, or `module:function` for a function that does the imports. A module that is missing here is
    imported by each service for itself, which only makes the service start more slowly.
    Rollouts with vLLM have a spare of their own, because importing vLLM takes longer than all other imports together.
    So have the services that do not compute with a model, if there are several: they need not wait for torch.
    """
    if not topology.run.spares:
        return []
    model = (*_TRANSFORMERS, *chain(*map(_modeling, topology.model_folders())))
    engine = topology.services.rollout.engine
    imports = {
        trained.service: (
            "services.policy_trainer.worker.service",
            "services.policy_trainer.worker.start",
            *(("services.policy_trainer.worker.megatron.backend",) if trained.settings.backend == "megatron" else ()),
        )
        for trained in topology.trained
    }
    for frozen in topology.frozen:
        backend = {"torch": "frozen", "megatron": "frozen_megatron"}.get(frozen.settings.backend, "frozen_server")
        imports[frozen.service] = (
            "services.reference.service",
            "services.reference.scoring",
            "services.reference.scorer",
            f"services.reference.{backend}",
        )
    if engine != "openai":  # This engine is a client of a server.
        imports["rollout"] = ("services.rollout.service", f"services.rollout.engines.{engine}_engine")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for service in imports:
        if service in services:
            own = _VLLM if service == "rollout" and engine == "vllm" else ()
            kinds.setdefault(own, []).append(service)
    heavy = [
        SpareKind(tuple(forks), tuple(dict.fromkeys([*chain(*(imports[fork] for fork in forks)), *own, *model])))
        for own, forks in kinds.items()
    ]
    modules = _LIGHT | ({"policy-trainer": "services.policy_trainer.tinker.service"} if topology.serve else {})
    light = {service: module for service, module in modules.items() if service in services}
    return [SpareKind(tuple(light), tuple(light.values())), *heavy] if len(light) > 1 else heavy


def _modeling(model: str) -> tuple[str, ...]:
    """Return the transformers module that defines the model, or () if it does not have the usual name."""
    kind = str(model_files.read_config(model).get("model_type", "")).replace("-", "_")
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not kind.isidentifier():
        return ()
    file = Path(spec.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return (f"transformers.models.{kind}.modeling_{kind}",) if file.exists() else ()
