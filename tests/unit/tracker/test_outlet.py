"""Tests the delivery to several trackers, one of which blocks, fails or is refused, and what they receive."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from services.tracker import ledger, outlet
from services.tracker.exporter import TRACKERS, End, Note, Subject, TrackerRefused
from services.tracker.exporter import make as make_exporter
from services.tracker.outlet import Outlet, finish
from services.tracker.samples import COLUMNS, SampleTable, is_due, table_of
from shared.rundir import RunDir
from shared.runfiles.metrics import CommittedRow
from shared.samples.record import FOLDER, SampleRecord, SampleState, file_of
from shared.topology import load
from shared.topology.monitor import Monitor, Tensorboard, Tracker
from tests.integration.tiny.harness import wait_for
from tests.unit.shared.topology.small_topology import make, write

LIMIT_S = 60.0


class Fake:
    """A tracker that keeps the rows that it is sent."""

    def __init__(self, *, sure: bool = True, before_send: Callable[[], None] = lambda: None) -> None:
        self.SURE = sure
        self.see = ""
        self.before_send = before_send
        self.rows: list[int] = []
        self.notes: list[str] = []
        self.opened: list[int] = []
        self.end = ""

    def open(self, subject: Subject) -> int:
        self.opened.append(subject.sent)
        return subject.sent

    def send(self, rows: Sequence[CommittedRow]) -> None:
        self.before_send()
        self.rows += [row.position for row in rows]

    def annotate(self, note: Note) -> None:
        self.notes.append(note.text)

    def show(self, table: SampleTable) -> None:
        """Keep nothing."""

    def close(self, end: End) -> None:
        self.end = end.outcome


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with two trackers and 120 rows."""
    overrides = ["monitor.tensorboard.samples=0", "monitor.trackio={project: p, samples: 0}", "policy.model=./model"]
    made = RunDir.create(tmp_path / "run", topology=load(write(make(tmp_path)), overrides), shm_root=tmp_path / "shm")
    made.metrics.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(120)))
    monkeypatch.setattr(outlet, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(outlet, "POLL_S", 0.01)
    monkeypatch.setattr(outlet, "missing", lambda _: [])
    return made


def opened(run: RunDir, monkeypatch: pytest.MonkeyPatch, **fakes: Fake) -> dict[str, Outlet]:
    monkeypatch.setattr(outlet, "make", lambda name, _: fakes[name])
    return {name: Outlet(run, load(run.topology, check_files=False), name) for name in fakes}


def feed(run: RunDir, monkeypatch: pytest.MonkeyPatch, **fakes: Fake) -> dict[str, Outlet]:
    """Feed the trackers to the end of the run and return their outlets."""
    outlets = opened(run, monkeypatch, **fakes)
    for each in outlets.values():
        each.start(End("done"))
    finish(list(outlets.values()), End("done"), LIMIT_S)
    assert all(each.done.is_set() for each in outlets.values())
    return outlets


def test_a_tracker_that_blocks_is_given_up_and_the_others_go_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "CALL_S", 0.2)
    gate = threading.Event()
    blocked, other = Fake(before_send=lambda: gate.wait(LIMIT_S) and None), Fake()
    outlets = feed(run, monkeypatch, tensorboard=blocked, trackio=other)
    assert outlets["tensorboard"].given_up == "tensorboard: no answer for 0.2 s"
    assert outlets["trackio"].given_up == ""
    assert (other.rows, other.end) == (list(range(120)), "done")
    assert ledger.unsent(run.path, "tensorboard") == "tensorboard lacks steps 0-119 (no answer for 0.2 s)"
    assert ledger.unsent(run.path, "trackio") == ""
    gate.set()


def test_a_tracker_that_is_refused_is_given_up_and_the_others_go_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise TrackerRefused("wrong key")

    other = Fake()
    outlets = feed(run, monkeypatch, tensorboard=Fake(before_send=refuse), trackio=other)
    assert outlets["tensorboard"].given_up == "tensorboard: wrong key"
    assert other.rows == list(range(120))


@pytest.mark.parametrize("sure", [True, False])
def test_rows_that_a_failed_tracker_perhaps_lacks_are_sent_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, sure: bool
) -> None:
    def fail_once() -> None:
        if len(fake.rows) == 100 and len(fake.opened) == 1:
            raise OSError("connection lost")

    fake = Fake(sure=sure, before_send=fail_once)
    fed = opened(run, monkeypatch, trackio=fake)["trackio"]
    fed.start()
    wait_for("rows sent", lambda: 119 in fake.rows, LIMIT_S)
    finish([fed], End("done"), LIMIT_S)
    assert fake.opened == [0, 100 if sure else 0]
    assert fake.rows == [*range(0 if sure else 100), *range(120)]
    assert (fed.sent, fake.end) == (120, "done")


def test_the_next_process_continues_after_the_rows_that_were_sent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Fake(), Fake()
    feed(run, monkeypatch, trackio=first)
    with run.metrics.open("a") as file:
        file.write('{"step": 120, "loss": 0.5}\n')
    run.warnings.write_text('{"at": 1.0, "step": 120, "kind": "kl", "text": "KL rose", "remedy": "lower lr"}\n')
    feed(run, monkeypatch, trackio=second)
    assert (second.opened, second.rows) == ([120], [120])
    assert second.notes == ["KL rose; lower lr", "the run ended: done"]
    third = Fake()
    feed(run, monkeypatch, trackio=third)
    assert (third.rows, third.notes) == ([], ["the run ended: done"])


def test_a_package_that_a_library_lacks_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "services.tracker.exporters.to_tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(TrackerRefused, match=r"^tensorboard\.compat\.proto\.event_pb2 not installed in this environm"):
        make_exporter("tensorboard", Tensorboard())


def test_every_tracker_of_the_topology_is_declared() -> None:
    trackers = {
        name
        for name, field in Monitor.model_fields.items()
        if field.annotation in [kind | None for kind in get_args(Tracker)]
    }
    assert set(TRACKERS) == trackers


def row(step: int, **values: float) -> CommittedRow:
    return CommittedRow(position=step, lineage=0, step=step, values=values)


@pytest.mark.parametrize(
    ("every", "recorded", "steps"),
    [
        (10, 1, [10, 20, 30]),
        (10, 7, [14, 21, 35]),  # the first recorded step from 10, 20 and 30 on
        (1, 1, list(range(1, 36))),
        (1, 16, [16, 32]),
        (100, 1, []),
    ],
)
def test_the_first_recorded_step_of_each_interval_is_due(every: int, recorded: int, steps: list[int]) -> None:
    assert [step for step in range(36) if is_due(row(step), every, recorded)] == steps


def test_a_table_has_a_column_for_each_named_reward(tmp_path: Path) -> None:
    records = [
        SampleRecord(
            task="train/0/1", reward=1.0, rewards={"exact": 1.0}, versions=[3, 4], turns=2, finish_reason="stop"
        ),
        SampleRecord(task="train/0/2", state=SampleState.FILTERED, rewards={"short": 0.5}),
        SampleRecord(task="train/0/3", sample=-1),
    ]
    path = tmp_path / FOLDER / file_of("train", 5)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    table = table_of(tmp_path, row(5), 8)
    assert table is not None
    assert table.columns == (*COLUMNS, "reward/exact", "reward/short")
    first, second = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
    wanted = {"state": "trained", "turns": 2, "versions": "3 4", "finish_reason": "stop", "reward/exact": 1.0}
    assert first | wanted == first
    assert (second["state"], second["reward/exact"], second["reward/short"]) == ("filtered", None, 0.5)


def test_a_table_has_no_more_samples_than_the_topology_allows(tmp_path: Path) -> None:
    for split, step in (("train", 5), ("eval/held", 4)):
        path = tmp_path / FOLDER / file_of(split, step)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(msgspec.json.encode(SampleRecord(task="t", split=split)) + b"\n" for _ in range(9)))
    table = table_of(tmp_path, row(5, **{"policy/version": 4.0, "eval/held/accuracy": 1.0}), 3)
    assert table is not None
    assert [cells[0] for cells in table.rows] == ["train"] * 3 + ["eval/held"] * 3
