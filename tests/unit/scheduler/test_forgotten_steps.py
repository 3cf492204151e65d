"""Tests that the journal forgets the batches and metrics rows of old steps, and that a run continues without them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proto.ids import make_task_id
from proto.messages import CheckpointSaved, GetRunInfo
from services.scheduler import journal_files, run_state, steps
from services.scheduler.events import (
    Configure,
    DiscardRows,
    ForgetSteps,
    Persist,
    Rewound,
    SaveStep,
    WriteRow,
)
from services.scheduler.journal import FORGOTTEN_AT_ONCE, Journal
from services.scheduler.journal_files import reading
from services.scheduler.metrics_file import MetricsFile, traces
from services.scheduler.plan import EvalPlan
from services.scheduler.server import rebuild
from services.scheduler.state import Scheduler
from shared.rpc.errors import RpcError
from tests.unit.scheduler.bench import Bench, plan

PLAN = plan(evals=(EvalPlan("held", range(2), 1, 4),))
REMEMBERED = 3


@pytest.fixture(autouse=True)
def _few_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "REMEMBERED_STEPS", REMEMBERED)


class Run:
    """A state machine with a real journal and metrics file. A checkpoint is saved after every second step."""

    def __init__(self, folder: Path) -> None:
        self.path, self.metrics = folder / "journal.sqlite", folder / "metrics.jsonl"
        self.journal = Journal(self.path, PLAN.fingerprint())
        self.bench = Bench(PLAN, Configure(100, 3, 2, False))
        self.file = MetricsFile(self.metrics, self.journal.rows_after, -1, 0)
        self._written = 0
        self.bench.register("batch-store", 0, 1, limit_bytes=1 << 30)
        self.bench.register("rollout", 0, 7)
        self.bench.ask(GetRunInfo(driver=1))
        self.bench.publish(0)

    def write(self) -> None:
        for effect in self.bench.effects[self._written :]:
            match effect:
                case Persist():
                    self.journal.append(effect.event, 1.0)
                case SaveStep() | Rewound() | ForgetSteps() | WriteRow():
                    self.journal.save(effect, 2.0)
                case DiscardRows():
                    self.file.discard(effect.lineage, effect.step, effect.waiting)
                    self.journal.save(effect, 2.0)
            if isinstance(effect, WriteRow):
                self.file.write(json.dumps(effect.row))
        self._written = len(self.bench.effects)
        self.journal.commit()

    def steps(self, first: int, last: int, best: Sequence[int] = ()) -> None:
        for step in range(first, last + 1):
            while self.bench.machine.run.history.evaluations.open:
                self.bench.complete(self.bench.granted(), samples=1)
            self.bench.step(step)
            if step % 2 == 0:
                kept = [step - 2, step] if step > 2 else [step]
                self.bench.ask(CheckpointSaved(driver=1, step=step, kept=[*best, *kept]))
            self.bench.acknowledge()
            self.write()

    def stored(self, table: str) -> list[int]:
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            return [step for (step,) in db.execute(f"SELECT step FROM {table} ORDER BY step")]  # noqa: S608

    def reopened(self) -> Scheduler:
        """Close the files, open them again as a new process does, and return the rebuilt state machine."""
        self.close()
        self.journal = Journal(self.path, PLAN.fingerprint())
        state = Scheduler(PLAN, lease_s=10.0, incarnation=2)
        rebuild(self.journal, state)
        self.file = MetricsFile(self.metrics, self.journal.rows_after, state.run.history.next_row - 1, 0)
        return state

    def close(self) -> None:
        self.journal.close()
        self.file.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_steps_that_no_recovery_needs_are_forgotten_and_the_metrics_file_keeps_their_rows(run: Run) -> None:
    run.steps(1, 21)
    assert run.stored("rows") == run.stored("steps") == [17, 18, 19, 20, 21]
    assert steps_in(run.metrics) == list(range(22))
    state = run.reopened()
    assert run_state.dump(state.run) == run_state.dump(run.bench.machine.run)
    assert (run.journal.forgotten, state.run.history.committed_step) == (16, 21)
    assert traces(run.metrics, run.journal.rows_after(-1))[1] == 21
    with reading(run.path) as recorded:
        assert recorded.forgotten == 16
        assert [step for step, _, _ in recorded.steps_of(make_task_id("train", 0, 79))] == [20]


def test_results_of_evaluations_are_kept_for_existing_checkpoints_only(run: Run) -> None:
    run.steps(1, 5)
    run.steps(6, 23, best=[4])
    assert sorted(run.bench.machine.run.history.evaluations.done) == [0, 4, 20]


def test_a_missing_row_that_was_not_forgotten_is_reported(run: Run) -> None:
    run.steps(1, 20)
    for table in ("rows", "steps"):
        with contextlib.closing(sqlite3.connect(run.path)) as db:
            kept = db.execute(f"SELECT * FROM {table} WHERE step = 17").fetchone()  # noqa: S608
            db.execute(f"DELETE FROM {table} WHERE step = 17")  # noqa: S608
            db.commit()
            journal = Journal(run.path, PLAN.fingerprint())
            with pytest.raises(RpcError, match=f"table {table} is damaged: the row for step 17 is missing"):
                rebuild(journal, Scheduler(PLAN, lease_s=10.0, incarnation=2))
            journal.close()
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(kept))})", kept)  # noqa: S608
            db.commit()
    run.reopened()


def test_a_run_that_returns_to_before_the_forgotten_steps_writes_their_rows_again(run: Run) -> None:
    run.steps(1, 20)
    run.bench.register("batch-store", 0, 2, limit_bytes=1 << 30, data_id="lost")
    run.bench.ask(GetRunInfo(driver=2, reload=True, loaded_step=0))
    run.write()
    assert (run.journal.forgotten, run.stored("rows"), steps_in(run.metrics)) == (0, [], [0])
    assert run.reopened().run.history.committed_step == 0


def test_a_journal_of_an_earlier_release_is_cut_down_in_parts(run: Run) -> None:
    run.steps(1, 2)
    count = FORGOTTEN_AT_ONCE + 500
    with contextlib.closing(sqlite3.connect(run.path)) as db:
        db.create_function("checksum", -1, journal_files.checksum)
        db.executemany(journal_files.SAVE_ROW, [(step, json.dumps({"step": step})) for step in range(3, count)])
        given = [(step, "TRAINED", '["train/0/0"]', 1.0, '{"loss": 1.0}') for step in range(3, count)]
        db.executemany(journal_files.SAVE_STEP, given)
        db.commit()
    for forgotten in (FORGOTTEN_AT_ONCE - 1, count - 10, count - 10):
        run.journal.save(ForgetSteps(count - 10), 1.0)
        run.journal.commit()
        assert run.journal.forgotten == forgotten
        assert run.stored("rows")[0] == run.stored("steps")[0] == forgotten + 1


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


ROWS = [{"step": step, "loss": step / 2} for step in range(6)]


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (lines(*ROWS[:4]) + b'{"step": 4, "lo', 3),
        (lines(*ROWS[:4], b'{"step": 4, "lo\x00'), 3),
        (lines(*ROWS[:3], b"\x00" * 70_000, b"[]"), 2),
        (lines(*ROWS[:3], {"loss": 1.0}), 2),
        (b"\x00" * 200_000, -1),
        (b"", -1),
    ],
)
def test_damaged_lines_at_the_end_of_the_metrics_file_are_written_again(
    tmp_path: Path, found: bytes, step: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(found)
    file = MetricsFile(path, lambda after: map(json.dumps, ROWS[after + 1 :]), 5, 0)
    file.close()
    assert file.found == step
    assert path.read_bytes() == lines(*ROWS)
