"""When the journal of a run has lost its end, nothing from the lost part is mistaken for current state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proto.messages import CheckpointSaved, GetRunInfo, LeaseGrant, PublishWeights, RunInfo, StepBatch
from services.scheduler import run_state
from services.scheduler.events import Answer, Configure, DiscardRows, Rewound, TailLost
from services.scheduler.metrics_file import traces
from services.scheduler.plan import EvalPlan, Plan
from services.scheduler.recovery import TAIL_LOST
from services.scheduler.run_state import RunState
from services.scheduler.state import Scheduler
from tests.unit.scheduler.bench import LEASE_S, Bench, plan

CONFIG = Configure(40, 3, 2, False)
LAST = 5
SAVED = (2, 4)
EVALS = (EvalPlan("held", range(3), 2, 2),)
PLANS = {
    "in order": plan(evals=EVALS),
    "by completion": plan(evals=EVALS, by_completion=True),
    "deterministic": plan(evals=EVALS, deterministic=True),
}


def names(batch: StepBatch) -> list[str]:
    return [task.task_id for task in batch.batch.tasks]


def grants(bench: Bench) -> list[LeaseGrant]:
    bodies = [effect.body for effect in bench.effects if isinstance(effect, Answer)]
    return [body for body in bodies if isinstance(body, LeaseGrant)]


def train(bench: Bench, first: int, last: int) -> list[list[str]]:
    """Train steps, saving checkpoints, and return their tasks."""
    steps = []
    for step in range(first, last + 1):
        steps.append(names(bench.step(step)))
        if step in SAVED:
            bench.ask(CheckpointSaved(driver=1, step=step, kept=[each for each in SAVED if each <= step]))
    return steps


def whole(made: Plan) -> tuple[Bench, list[list[str]]]:
    """Return a run of `LAST` steps with one lease in progress, and the tasks of its steps."""
    bench = Bench(made, CONFIG)
    bench.register("batch-store", 0, 1, limit_bytes=1 << 30)
    bench.register("rollout", 0, 7)
    bench.ask(GetRunInfo(driver=1))
    bench.publish(0)
    steps = train(bench, 1, LAST)
    bench.granted()
    return bench, steps


def shortened(bench: Bench, events: int, agreed: int = LAST) -> Bench:
    """Return the run of a scheduler whose journal ends after `events` events."""
    run = bench.machine.run
    again = Bench(bench.plan, CONFIG)
    again.effects, again.journal, again.calls = [], bench.journal[:events], bench.calls
    again.machine = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in again.journal:
        again.machine.replay(event)
    agreed = min(agreed, again.machine.run.history.committed_step)
    lost = TailLost(agreed, run.history.committed_step, run.ledger.highest_fence, run.history.lineage)
    again._keep(again.machine.begin(CONFIG, 0.0, lost))
    return again


def resume(bench: Bench, saved: tuple[int, ...] = SAVED) -> RunInfo:
    """Resume as a driver that finds the checkpoints in `saved`."""
    bench.register("batch-store", 0, 1, limit_bytes=1 << 30)
    bench.register("rollout", 0, 7)
    info: RunInfo = bench.ask(GetRunInfo(driver=1))
    if info.committed_step:
        loaded = max((step for step in saved if step <= info.committed_step), default=0)
        info = bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=loaded))
        assert info.committed_step == loaded
    for step in range(max(info.committed_step - bench.plan.staleness, 0), info.committed_step + 1):
        bench.publish_again(step)
    return info


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_a_run_whose_journal_ends_anywhere_continues_without_the_effects_of_later_events(made: Plan) -> None:
    bench, steps = whole(made)
    sampled: dict[str, int] = {}
    for grant in grants(bench):
        for task in grant.batch.tasks:
            sampled[task.task_id] = max(sampled.get(task.task_id, 0), task.fence)
    last_lease = max(grant.lease_id for grant in grants(bench))
    published = {event.ref.task_id for event in bench.journal if isinstance(event, PublishWeights)}
    for events in range(len(bench.journal)):
        short = shortened(bench, events)
        info = resume(short)
        assert info.committed_step in (0, *SAVED)
        again = train(short, info.committed_step + 1, LAST + 1)
        assert steps[: info.committed_step] + again[:-1] == steps
        assert len({task for step in again for task in step}) == sum(map(len, again))
        for grant in grants(short):
            assert grant.lease_id > last_lease
            assert all(task.fence > sampled.get(task.task_id, 0) for task in grant.batch.tasks)
        later = short.journal[events:]
        assert not published & {event.ref.task_id for event in later if isinstance(event, PublishWeights)}
        replayed = RunState(made)
        for event in short.journal:
            replayed.apply(event)
        packed = run_state.dump(short.machine.run)
        assert run_state.dump(replayed) == packed
        assert run_state.dump(run_state.load(made, packed)) == packed


def test_the_rewind_is_reported_with_its_cause_even_if_the_journal_has_no_later_step() -> None:
    bench, _ = whole(PLANS["in order"])
    at = next(i for i, event in enumerate(bench.journal) if isinstance(event, CheckpointSaved))
    short = shortened(bench, at + 1)
    told = [effect for effect in short.effects if isinstance(effect, Rewound | DiscardRows)]
    assert told == [Rewound(0, 2, LAST, TAIL_LOST), DiscardRows(0, 2, {})]


def test_steps_whose_rows_are_from_another_history_are_also_rolled_back() -> None:
    bench, _ = whole(PLANS["in order"])
    short = shortened(bench, len(bench.journal) - 1, agreed=3)
    run = short.machine.run
    assert (run.history.committed_step, run.history.checkpoint_step) == (3, 3)
    assert resume(short).committed_step == 2
    assert run.history.checkpoint_step == 2


def test_every_task_is_trained_if_only_the_initial_model_is_left() -> None:
    """All checkpoints that the journal knows about were deleted when later ones were saved."""
    bench, steps = whole(PLANS["in order"])
    short = shortened(bench, len(bench.journal) - 1)
    assert resume(short, saved=()).committed_step == 0
    assert train(short, 1, LAST) == steps


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 2], (9, 2)),
        ([1, 2, 3, 4, 5], (9, 5)),
        ([1, 2, 33, 4], (2, 4)),
        ([11, 2, 3], (0, 3)),
        ([], (9, 0)),
    ],
    ids=["shorter", "longer", "contradicts", "contradicts at once", "empty"],
)
def test_row_comparison_returns_the_last_agreeing_step_and_the_newest_row(
    tmp_path: Path, rows: list[int], expected: tuple[int, int]
) -> None:
    """The journal has steps 1 to 3; a row contradicts it in a value other than the step."""

    def row(step: int, value: int) -> dict[str, Any]:
        return {"step": step, "loss": value / 2}

    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(step, value)) + "\n" for step, value in enumerate(rows, 1)]
    path.write_text("".join(lines) + '{"step": 9, "lo')
    agreed, newest = traces(path, [json.dumps({"step": float(step), "loss": step / 2}) for step in (1, 2, 3)])
    assert (min(agreed, 9), newest) == expected
