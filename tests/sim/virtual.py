"""The surroundings of simulated processes: clocks, random ids, process ids, and files that are read repeatedly.

`surroundings` is entered once; its replacements ask the world that is running (`here`). Everything else is the
production code.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import structlog

import shared.data.source
import shared.topology
from services.batch_store.stream_server import StreamStats
from shared.topology import Topology
from shared.topology.load import _built
from tests.sim.clock import CURRENT
from tests.sim.scenario import Size

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = Path(__file__).resolve().parents[2] / "launch/topologies/models/tiny-qwen3"
EPOCH_S = 1_700_000_000.0
TRAIN_ROWS = 5
"""Number of rows of the training set. Longer runs begin a second epoch."""
_running: list[World] = []
cpu_seconds = time.process_time


def here() -> World:
    """Return the world that is running."""
    return _running[-1]


@contextmanager
def running(world: World) -> Iterator[None]:
    """Make `world` the running world."""
    _running.append(world)
    try:
        yield
    finally:
        _running.pop()


@functools.cache
def topology_of(size: Size) -> Topology:
    """Return the topology for a size. No file is parsed, because parsing takes as long as the run."""
    return _built(size.document(str(MODEL)), str(MODEL))


def check_topology(size: Size) -> None:
    """Raise TopologyError if a user could not write the topology for this size."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(size.document(str(MODEL)), file)
        file.flush()
        assert shared.topology.load(file.name) == topology_of(size)


class NoStreams:
    """Replacement for the store's streams to other hosts."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def bind(self, *_: Any) -> None: ...

    def check(self) -> None: ...

    def look_again(self) -> None: ...

    def stats(self) -> StreamStats:
        return StreamStats()

    def close(self) -> None: ...


def _no_telemetry(*_: Any, **__: Any) -> None:
    """Drop telemetry, on which nothing depends."""


class NoPasses:
    """Replacement for the thread that copies the journal's write-ahead log into the journal's file."""

    def __init__(self, *_: Any) -> None: ...

    def wrote(self, *_: Any) -> None: ...

    def order(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def surroundings(*, loud: bool = False) -> Iterator[None]:
    """Replace the parts of the machine that simulated processes would use. With `loud`, warnings are noted in the
    history."""
    import services.batch_store.server
    import services.policy_trainer.worker.start
    import services.scheduler.planning
    import services.scheduler.server
    from shared.actor.telemetry import TelemetrySender
    from shared.dataplane.mapping import BlockMapping
    from tests.sim import model
    from tests.sim.network import SimContext, SimSocket
    from tests.sim.observe import observers

    make_plan, plans = services.scheduler.planning.make_plan, dict[Size, Any]()
    read_rows, read = shared.data.source.read_rows, dict[int, Any]()
    pid, now = os.getpid, time.monotonic

    def load(_: Any) -> Topology:
        return topology_of(here().scenario.size)

    def plan(topology: Topology, where: Any) -> Any:
        size = here().scenario.size
        if size not in plans:
            made, bad = make_plan(topology, where)
            plans[size] = replace(made, rows=range(TRAIN_ROWS)), bad
        return plans[size]

    def rows_read(source: Any, count: int) -> Any:
        if count not in read:  # all runs train on the same source
            read[count] = read_rows(source, count)
        return read[count]

    def clock() -> float:
        return here().loop.time() if _running else now()

    def note(logger: Any, method: str, event: Any) -> Any:
        if _running:
            here().log(event)
        raise structlog.DropEvent

    quiet = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, disable=lambda: None, enable=lambda: None)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1))
    replaced = {
        "time.monotonic": clock,
        "time.perf_counter": clock,
        "time.thread_time": clock,
        "time.time": lambda: EPOCH_S + clock(),
        "time.time_ns": lambda: int((EPOCH_S + clock()) * 1e9),
        "secrets.randbits": lambda bits: here().ids.getrandbits(bits),
        "secrets.token_hex": lambda nbytes=32: here().ids.randbytes(nbytes).hex(),
        "secrets.token_bytes": lambda nbytes=32: here().ids.randbytes(nbytes),
        "os.getpid": lambda: node.pid if (node := CURRENT.get()) is not None else pid(),
        "zmq.Context": lambda *_, **__: SimContext(here().network, here().current()),
        "shared.rpc.client.Pump": SimSocket.pump,
        "shared.rpc.mailbox.Pump": SimSocket.pump,
        "shared.actor.service.psutil": SimpleNamespace(Process=lambda: process),
        "shared.actor.service.gc": quiet,
        "services.scheduler.planning.read_rows": rows_read,
        "shared.topology.load": load,
        "shared.topology.load_resolved": load,
        "services.scheduler.server.load_resolved": load,
        "services.scheduler.server.make_plan": plan,
        "services.scheduler.planning.open_source": functools.cache(shared.data.open_source),
        "services.scheduler.server.gc": quiet,
        "services.scheduler.server.TICK_S": 0.5,
        "services.scheduler.state.TELL_S": 3600.0,
        "services.scheduler.journal.WalCheckpoints": NoPasses,
        "launch.supervisor.runner.PING_EVERY_S": 6.0,
        "services.batch_store.server.StreamServer": NoStreams,
        "services.batch_store.server.REAP_S": 1.0,
        "services.policy_trainer.worker.start.make_backend": lambda run, trained, place, generation, _: (
            model.make_backend(here(), trained, place, generation)
        ),
        "services.policy_trainer.worker.start.Canaries": model.SimCanaries,
        "services.policy_trainer.worker.start.require_deterministic_algorithms": lambda: None,
        "services.policy_trainer.worker.calls.weights.export": model.export,
    }
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)  # Coroutines of killed processes are never awaited.
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(TelemetrySender, "emit", _no_telemetry))
        # `touch` reads pages ahead on a thread that the clock does not know about.
        stack.enter_context(mock.patch.object(BlockMapping, "touch"))
        stack.enter_context(observers())
        structlog.configure(
            processors=[note],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if loud else logging.CRITICAL),
        )
        stack.callback(structlog.reset_defaults)
        yield
