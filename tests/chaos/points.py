"""Named points of the product at which a test sends a process a signal: before or after the n-th call to a function."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

HOOK = Path(__file__).with_name("hook")


@dataclass(frozen=True)
class Point:
    """Named point. `signal` is sent before or after (`when`) the `nth` call to `module:name` in a process started as
    `python -m process`. Signal 0 does nothing but create the mark."""

    process: str
    module: str
    name: str
    when: str = "before"
    nth: int = 1
    signal: int = signal.SIGKILL
    match: str = ""
    """Part of the type name of an argument, for functions that handle messages of many types."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of that argument with their values, such as the step of a request. Only calls that have them count."""
    mark: str = ""
    """File that is created when the signal is sent, so that the signal is sent only once. If the path is empty, the
    signal is sent to every incarnation of the process.
    """

    @classmethod
    def parse(cls, process: str, text: str, number: int, mark: str = "") -> Point:
        """Return the point described by a string such as `shared.rundir:RunDir.create after` or `os:rename before
        3`."""
        place, when, *nth = text.split()
        module, _, name = place.partition(":")
        return cls(process, module, name, when, int(nth[0]) if nth else 1, number, mark=mark)


def with_points(environment: Mapping[str, str], *points: Point, history: Path | None = None) -> dict[str, str]:
    """Return the environment for processes that receive the signals of `points` and record their messages in
    `history`."""
    path = [str(HOOK), *filter(None, [environment.get("PYTHONPATH", "")])]
    text = json.dumps([asdict(point) for point in points])
    found = {**environment, "PYTHONPATH": os.pathsep.join(path), "CHAOS_POINTS": text}
    return found if history is None else found | {"CHAOS_HISTORY": str(history)}


SCHEDULER, STORE = "services.scheduler", "services.batch_store"
DRIVER, WORKER = "services.policy_trainer", "services.policy_trainer.worker"
CRITIC = f"{WORKER} --model critic"
ROLLOUT, REFERENCE = "services.rollout", "services.reference"
BOTH = ("before", "after")
_PLACES = (
    # Each entry has a process, a function, the type of an argument, and the maximum n of "the n-th call".
    (SCHEDULER, "services.scheduler.journal:Journal.commit", "", 400),
    (SCHEDULER, "services.scheduler.metrics_file:MetricsFile.write", "", 8),
    (SCHEDULER, "shared.rpc.mailbox:Mailbox.answer", "StepBatch", 8),
    (SCHEDULER, "shared.rpc.mailbox:Mailbox.answer", "CompleteAck", 40),
    (SCHEDULER, "shared.rpc.mailbox:Mailbox.answer", "LeaseGrant", 40),
    (STORE, "services.batch_store.files:StoreFiles.create", "", 60),
    (STORE, "services.batch_store.files:StoreFiles.seal", "", 60),
    (STORE, "services.batch_store.tombstones:TombstoneList.append", "", 10),
    (STORE, "services.batch_store.files:StoreFiles.retire", "", 20),
    (STORE, "shared.rpc.mailbox:Mailbox.answer", "PutSealed", 60),
    (STORE, "services.batch_store.server:StoreService._clear", "", 10),
    (DRIVER, "services.policy_trainer.scheduler_calls:SchedulerCalls.next_batch", "", 8),
    (DRIVER, "services.policy_trainer.scheduler_calls:SchedulerCalls.commit", "", 8),
    (DRIVER, "services.policy_trainer.scheduler_calls:SchedulerCalls.publish", "", 8),
    (DRIVER, "services.policy_trainer.scheduler_calls:SchedulerCalls.checkpoint_saved", "", 2),
    (DRIVER, "services.policy_trainer.scheduler_calls:SchedulerCalls.finish", "", 1),
    (WORKER, "services.policy_trainer.worker.checkpoint:_write", "", 2),
    (WORKER, "pathlib:Path.rename", "", 3),
    (WORKER, "shared.dataplane.client:DataClient.put", "", 8),
    (CRITIC, "services.policy_trainer.worker.checkpoint:_write", "", 2),
    (CRITIC, "pathlib:Path.rename", "", 3),
    (CRITIC, "shared.dataplane.client:DataClient.put", "", 8),
    (CRITIC, "services.policy_trainer.worker.calls.training:TrainingCalls._update", "", 16),
    (ROLLOUT, "shared.dataplane.client:DataClient.put", "", 20),
    (ROLLOUT, "shared.rpc.client:Client.call", "Complete", 20),
    (REFERENCE, "shared.dataplane.client:DataClient.put", "", 20),
    (REFERENCE, "shared.rpc.client:Client.call", "Complete", 20),
)


def drawn(chance: random.Random, marks: Path, count: int, processes: Collection[str] = ()) -> list[Point]:
    """Return `count` different points in `processes` (default: all), each of which kills one process once."""
    places = [place for place in _PLACES if not processes or place[0] in processes]
    points = []
    for number, (process, function, match, most) in enumerate(chance.sample(places, min(count, len(places)))):
        module, _, name = function.partition(":")
        when, nth = chance.choice(BOTH), chance.randint(1, most)
        points.append(Point(process, module, name, when, nth, match=match, mark=str(marks / f"point-{number}")))
    return points
