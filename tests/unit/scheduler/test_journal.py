"""While a snapshot is written in parts, a kill at any moment leaves a state that can be recovered completely."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.scheduler import earlier_journal, journal_files, run_state
from services.scheduler.events import Cleared, Rewound
from services.scheduler.journal import Journal
from services.scheduler.plan import EvalPlan, Plan
from tests.unit.scheduler.bench import plan

DATA = Path(__file__).parents[2] / "data"


def evaluated_twice() -> Plan:
    other, held = EvalPlan("other", rows=[0], samples=1, every=2), EvalPlan("held", rows=[0, 1, 4], samples=4, every=2)
    return plan(evals=(other, held))


def killed_now(path: Path, folder: Path) -> Journal:
    """Return the journal as the next process finds it after a kill at this instant."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, folder / file.name)
    return Journal(folder / path.name, "plan")


def test_a_snapshot_replaces_the_events_before_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path, "plan")
    events = [Cleared("batch-store/0", number) for number in range(60)]
    for at, packed in ((0, [b"first"] * 5), (20, [b"second"] * 3)):
        for event in events[at : at + 20]:
            journal.append(event, 0.0)
        journal.write_snapshot(packed)
        killed = killed_now(path, tmp_path / f"kill-{at}")
        assert list(killed.snapshot()) == packed
        assert list(killed.events()) == []
        killed.close()
    for event in events[40:]:
        journal.append(event, 0.0)
    journal.commit()
    journal.close()
    again = Journal(path, "plan")
    assert list(again.snapshot()) == [b"second"] * 3
    assert list(again.events()) == events[40:]
    again.append(Cleared("batch-store/0", 99), 0.0)
    again.commit()
    assert list(again.events())[-1] == Cleared("batch-store/0", 99)
    again.close()


def test_a_kill_while_a_snapshot_is_written_leaves_the_previous_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", "plan")
    journal.append(Cleared("batch-store/0", 1), 0.0)
    journal.write_snapshot([b"first"])
    journal.append(Cleared("batch-store/0", 2), 0.0)
    journal.commit()
    journal._end = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        journal.write_snapshot([b"second"])
    killed = killed_now(tmp_path / "journal.sqlite", tmp_path / "killed")
    assert list(killed.snapshot()) == [b"first"]
    assert list(killed.events()) == [Cleared("batch-store/0", 2)]
    killed.close()


def test_the_checksum_of_a_row_survives_the_sign_of_zero(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", "plan")
    journal.save(Rewound(1, 0, 3), -0.0)
    journal.commit()
    journal.close()
    Journal(tmp_path / "journal.sqlite", "plan").close()


def test_journals_of_two_earlier_formats_are_read_and_the_next_snapshot_ends_them(tmp_path: Path) -> None:
    """The parts of the snapshot were written by a release with format 15. The evaluation `other` was complete. Of the
    three rows of `held`, with four samples each, the first had rewards 1, 0, 0, 1."""
    path = tmp_path / "journal.sqlite"
    parts: list[bytes] = msgspec.msgpack.decode((DATA / "snapshot_of_format_15.msgpack").read_bytes())
    journal = Journal(path, "plan")
    journal.append(Cleared("batch-store/0", 1), 0.0)
    journal.write_snapshot(parts)
    journal.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.create_function("checksum", -1, journal_files.checksum)
        db.execute("CREATE TABLE evals (name TEXT NOT NULL)")
        db.execute(journal_files.SAVE_META, ("format", "rlbus-scheduler-14"))
    for _ in range(2):  # the format stays as it was until there is another snapshot
        again = Journal(path, "plan")
        with journal_files.reading(path) as recorded:
            assert recorded.snapshot() == list(again.snapshot()) != parts
        run = run_state.load(evaluated_twice(), again.snapshot())
        again.close()
    evaluations = run.history.evaluations
    assert evaluations.rewards(0) == {"other": 1.0}
    held = evaluations.open["held", 0]
    held.score(1, {"reward": np.zeros(4, np.float32)}, 0)
    metrics = {name.removeprefix("eval/held/"): value for name, value in held.metrics().items()}
    assert (metrics["accuracy"], metrics["pass@1"], metrics["pass@4"]) == (0.25, 0.25, 0.5)
    assert "pass@2" not in metrics  # the first row's cannot be known
    again = Journal(path, "plan")
    again.append(Cleared("batch-store/0", 2), 0.0)
    again.write_snapshot(dumped := run_state.dump(run))
    again.close()
    last = Journal(path, "plan")
    assert list(last.snapshot()) == dumped
    assert run_state.dump(run_state.load(evaluated_twice(), last.snapshot())) == dumped
    last.close()


@pytest.mark.parametrize(
    ("means", "best", "graded"), [([0.5, 1.0], [1.0, 1.0], False), ([0.4], [1.0], True), ([2], [2], True)]
)
def test_a_converted_evaluation_is_graded_if_a_reward_cannot_have_been_0_or_1(
    means: list[float], best: list[float], graded: bool
) -> None:
    one = {"name": "held", "version": (0, 0), "samples": 4, "scores": means, "best": best, "left": 0}
    head = {"values": {}, "evaluations": {"open": {("held", 0): one}, "done": {}}}
    converted = msgspec.msgpack.decode(earlier_journal.converted(msgspec.msgpack.encode(head)))
    assert converted["evaluations"]["open"]["held", 0]["graded"] is graded
