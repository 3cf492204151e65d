"""Opening a damaged journal results in the same history, a reported error, or an earlier part of the history that is
known to be incomplete.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proto.messages import CheckpointSaved, GetRunInfo
from services.scheduler import run_state
from services.scheduler.events import Cleared, Configure, DiscardRows, Persist, Rewound, SaveStep, WriteRow
from services.scheduler.journal import Journal
from services.scheduler.journal_files import SLOT_BYTES, Mark, Reached
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from services.scheduler.server import rebuild
from services.scheduler.state import Scheduler
from shared.rpc.errors import RpcError
from tests.unit.scheduler.bench import Bench, plan

MAIN, LOG, MARK = FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-mark")
TABLES = ("meta", "steps", "rows", "rewinds")
PLAN = plan(evals=(EvalPlan("held", range(4), 1, 1),))


@dataclass
class History:
    """A folder with the files of a killed process, and the state and tables after each commit by that process."""

    folder: Path
    states: dict[int, list[bytes]]
    tables: dict[int, list[Any]]
    where: str = ""
    """Place where SQLite keeps the history. Data that the log and the file both contain ("copied") is read from the
    log."""

    @property
    def last(self) -> int:
        return max(self.states)


def contents(path: Path) -> list[Any]:
    """Return the rows of the readable tables, or [] if they cannot be read."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        contextlib.suppress(sqlite3.Error),
    ):
        return [db.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES]  # noqa: S608
    return []


class Recorder:
    """A recorder that drives a state machine with a real journal, which commits after every event."""

    def __init__(self, folder: Path) -> None:
        self.history = History(folder, {}, {})
        self.path = folder / FILES[0]
        self.journal = Journal(self.path, PLAN.fingerprint())
        self.journal._wal.order = lambda: None  # type: ignore[method-assign]  # the fixture copies the log
        self.bench = Bench(PLAN, Configure(40, 3, 2, False))
        keep = self.bench._keep

        def kept(effects: Any) -> Any:
            self.commit(list(effects))
            return keep(effects)

        self.commit(self.bench.effects)
        self.bench._keep = kept  # type: ignore[method-assign]

    def commit(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self.journal.append(effect.event, 1.5)
            elif isinstance(effect, SaveStep | WriteRow | Rewound | DiscardRows):
                self.journal.save(effect, 2.5)
        self.journal.commit()
        self.history.states[self.journal.seq] = run_state.dump(self.bench.machine.run)
        self.history.tables[self.journal.seq] = contents(self.path)

    def evaluate(self) -> None:
        while self.bench.machine.run.history.evaluations.open:
            self.bench.complete(self.bench.granted(), samples=1)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.evaluate()
            self.bench.step(step)
            if step % 2 == 0:
                self.bench.ask(CheckpointSaved(driver=1, step=step, kept=[step - 2, step] if step > 2 else [step]))
            self.bench.acknowledge()

    def killed(self, folder: Path) -> History:
        """Return the files that a kill at this moment leaves behind."""
        copy_files(self.history.folder, folder)
        self.journal.close()
        return History(folder, self.history.states, self.history.tables)


def copy_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copy(source / name, target / name)


def take_snapshot(journal: Journal, run: Any) -> None:
    journal.write_snapshot(run_state.dump(run))


def copy_log(path: Path, mode: str) -> None:
    """Copy the log into the file, as the `WalCheckpoints` thread does."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA wal_checkpoint({mode})")


@pytest.fixture(scope="module", params=["in the log", "in both", "copied", "in the file"])
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return the history of a run that has several steps, evaluations and checkpoints and is rewound once.

    The test is repeated for each place where SQLite keeps the history.
    """
    folder = tmp_path_factory.mktemp("run")
    made = Recorder(folder)
    bench = made.bench
    bench.register("batch-store", 0, 1, limit_bytes=1 << 30, data_id="first")
    bench.register("rollout", 0, 7)
    bench.ask(GetRunInfo(driver=1))
    bench.publish(0)
    made.steps(1, 3)
    if request.param == "in both":
        copy_log(made.path, "TRUNCATE")
    elif request.param == "in the file":
        take_snapshot(made.journal, bench.machine.run)
    bench.register("batch-store", 0, 2, limit_bytes=1 << 30, data_id="second")
    bench.ask(GetRunInfo(driver=1))
    bench.publish_again(2)
    made.steps(3, 4)
    if request.param == "copied":
        copy_log(made.path, "PASSIVE")
    elif request.param == "in the file":
        copy_log(made.path, "TRUNCATE")
        bench.register("rollout", 0, 8)
    killed = made.killed(tmp_path_factory.mktemp("killed") / "run")
    killed.where = request.param
    return killed


def opened(folder: Path) -> tuple[Journal, Scheduler]:
    """Open the journal in a folder and rebuild the state. Raises RpcError."""
    journal = Journal(folder / FILES[0], PLAN.fingerprint())
    state = Scheduler(PLAN, lease_s=10.0, incarnation=2)
    rebuild(journal, state)
    return journal, state


def found(history: History, folder: Path) -> str:
    """Open the journal in `folder` and return the outcome. Fail if it contains a different history."""
    path = folder / FILES[0]
    try:
        journal, state = opened(folder)
    except RpcError as error:
        named = re.fullmatch(rf"journal {path}: .+; (restore|use|start|make room)[^\n]+", str(error))
        return "named" if named else f"not named: {error}"
    seq, lost, read = journal.seq, journal.lost, contents(path)
    journal.close()
    expected = history.states[seq] if seq else run_state.dump(RunState(PLAN))
    if run_state.dump(state.run) != expected:
        return f"another state at event {seq}"
    if seq and read != history.tables[seq]:
        return f"other tables at event {seq}"
    if seq < history.last and not lost:
        return f"a shorter history: event {seq}"
    return "short" if lost else "same"


def test_undamaged_files_give_the_same_history(history: History, tmp_path: Path) -> None:
    copy_files(history.folder, tmp_path / "copy")
    assert found(history, tmp_path / "copy") == "same"


def outcomes(history: History, folder: Path, name: str, damages: Iterable[Callable[[bytes], bytes]]) -> Counter[str]:
    """Damage the file `name` in each of the ways in `damages` and count the outcomes."""
    counts: Counter[str] = Counter()
    for damage in damages:
        copy_files(history.folder, folder)
        (folder / "journal.sqlite-shm").unlink(missing_ok=True)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        counts[found(history, folder)] += 1
    return counts


def shortened(data: bytes, nbytes: int) -> bytes:
    return data[:nbytes]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def some(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "count", [few, pytest.param(many, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
    )


@some(30, 3000)
def test_a_log_cut_anywhere_leaves_an_earlier_history_that_is_known_to_be_incomplete(
    history: History, tmp_path: Path, count: int
) -> None:
    chance = random.Random(count)
    size = (history.folder / LOG).stat().st_size
    sizes = [0, 32, size - 1, *(chance.randrange(size) for _ in range(count))]
    counts = outcomes(history, tmp_path / "copy", LOG, (partial(shortened, nbytes=nbytes) for nbytes in sizes))
    assert counts.keys() <= {"same", "short", "named"}
    assert counts["short"] > len(sizes) / 2 or history.where == "copied"


@some(40, 3000)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_reported_or_has_no_effect(history: History, tmp_path: Path, name: str, count: int) -> None:
    chance = random.Random(count)
    size = (history.folder / name).stat().st_size
    bits = [(chance.randrange(size), chance.randrange(8)) for _ in range(count)]
    damages = (partial(flipped, at=at, bit=bit) for at, bit in bits)
    counts = outcomes(history, tmp_path / "copy", name, damages)
    assert counts.keys() <= {"same", "short", "named"}
    if name == MARK:
        assert counts.keys() == {"same"}  # The other slot is read.
    elif name == LOG:
        assert counts["short"] > 0
    else:
        assert counts["named"] > 0 or history.where != "in the file"


VALUES = {
    "events": "body = flipped(body)",
    "events at": "at = at + 1",
    "events kind": "kind = kind + 1",
    "parts": "body = flipped(body)",
    "snapshot": "parts = parts - 1",
    "steps": "task_ids = '[]'",
    "rows": "row = '{}'",
    "rewinds": "step = step - 1",
    "meta": "value = value || ' '",
}


@pytest.mark.parametrize("history", ["in the file"], indirect=True)
@pytest.mark.parametrize("what", VALUES)
def test_one_changed_value_anywhere_is_reported(history: History, tmp_path: Path, what: str) -> None:
    table = what.split()[0]
    copy_files(history.folder, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy" / MAIN)) as db:
        db.create_function("flipped", 1, lambda body: flipped(body, len(body) - 1, 0))
        last = db.execute(f"SELECT max(rowid) FROM {table}").fetchone()  # noqa: S608
        db.execute(f"UPDATE {table} SET {VALUES[what]} WHERE rowid = ?", last)  # noqa: S608
        db.commit()
    with pytest.raises(RpcError) as raised:
        opened(tmp_path / "copy")
    name = {"events": f"event {history.last}", "parts": "part ", "snapshot": "table snapshot"}
    assert f" {name.get(table, f'table {table}')}" in str(raised.value)
    assert "is damaged: " in str(raised.value)


@pytest.mark.parametrize("history", ["in the file"], indirect=True)
@pytest.mark.parametrize("table", ["events", "parts", "steps", "rows"])
def test_a_missing_row_is_reported(history: History, tmp_path: Path, table: str) -> None:
    copy_files(history.folder, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy" / MAIN)) as db:
        first = db.execute("SELECT seq + 1 FROM snapshot" if table == "events" else f"SELECT min(rowid) FROM {table}")  # noqa: S608
        db.execute(f"DELETE FROM {table} WHERE rowid = ?", first.fetchone())  # noqa: S608
        db.commit()
    assert found(history, tmp_path / "copy") == "named"


def test_another_history_of_the_same_length_is_not_mistaken_for_the_marked_one(tmp_path: Path) -> None:
    marks = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        made = Recorder(tmp_path / name)
        made.bench.register(name, 0, 1)
        marks.append((tmp_path / name / MARK).read_bytes())
        made.journal.close()
    (tmp_path / "one" / MARK).write_bytes(marks[1])
    journal, _ = opened(tmp_path / "one")
    assert journal.lost == f"event {journal.seq} is not the one that its mark names"
    journal.close()


@pytest.mark.parametrize(("kind", "name"), [(Journal, "_end"), (Mark, "write")], ids=["before commit", "after commit"])
def test_a_kill_between_commit_and_mark_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    class Killed(BaseException):
        pass

    def killed(*arguments: object) -> None:
        raise Killed

    (tmp_path / "run").mkdir()
    made = Recorder(tmp_path / "run")
    made.bench.register("rollout", 0, 1)
    monkeypatch.setattr(kind, name, killed)
    with pytest.raises(Killed):
        made.bench.register("rollout", 0, 2)
    copy_files(tmp_path / "run", tmp_path / "copy")
    monkeypatch.undo()
    journal, _ = opened(tmp_path / "copy")
    assert not journal.lost
    journal.close()
    made.journal.close()


def test_a_torn_mark_leaves_the_previous_mark_in_effect(tmp_path: Path) -> None:
    mark = Mark(tmp_path / "mark")
    first, second = (Reached(number, bytes([number]) * 16, 1, 0, 0) for number in (1, 2))
    mark.write(first)
    before = (tmp_path / "mark").read_bytes()
    mark.write(second)
    mark.close()
    after = (tmp_path / "mark").read_bytes().ljust(2 * SLOT_BYTES, b"\0")
    before = before.ljust(len(after), b"\0")
    changed = [at for at in range(len(after)) if after[at] != before[at]]
    for at in changed:
        (tmp_path / "mark").write_bytes(after[:at] + before[at:])
        torn = Mark(tmp_path / "mark")
        assert torn.found == first
        torn.close()
    (tmp_path / "mark").write_bytes(after)
    whole = Mark(tmp_path / "mark")
    assert whole.found == second
    whole.close()


@pytest.mark.parametrize(
    ("mark", "lost", "unmarked"),
    [(bytes(600), "its mark cannot be read", False), (None, "", True)],
    ids=["zeros", "none"],
)
def test_an_unreadable_mark_means_that_the_end_is_lost_but_a_missing_mark_does_not(
    tmp_path: Path, mark: bytes | None, lost: str, *, unmarked: bool
) -> None:
    (tmp_path / "run").mkdir()
    made = Recorder(tmp_path / "run")
    made.journal.close()
    if mark is None:
        (tmp_path / "run" / MARK).unlink()
    else:
        (tmp_path / "run" / MARK).write_bytes(mark)
    journal, _ = opened(tmp_path / "run")
    assert (journal.lost, journal.unmarked) == (lost, unmarked)
    journal.close()
    if mark is None:
        journal, _ = opened(tmp_path / "run")
        assert (journal.lost, journal.unmarked) == ("", False)
        journal.close()


def test_the_journal_is_synced_after_a_checkpoint_of_the_run(tmp_path: Path) -> None:
    sizes = []
    for event in (Cleared("batch-store/0", 1), CheckpointSaved(driver=1, step=1, kept=[1])):
        path = tmp_path / f"{type(event).__name__}.sqlite"
        journal = Journal(path, "plan")
        before = path.stat().st_size
        journal.append(event, 0.0)
        journal.commit()
        journal._wal.close()  # This waits for a pass in progress.
        sizes.append(path.stat().st_size > before)
        journal._db.close()
    assert sizes == [False, True]
