"""Tests the delivery to several trackers, one of which blocks, fails or is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from services.tracker import ledger, outlet
from services.tracker.exporter import End, Note, Subject, TrackerRefused
from services.tracker.outlet import Outlet, finish
from services.tracker.samples import SampleTable
from shared.rundir import RunDir
from shared.runfiles.metrics import CommittedRow
from shared.topology import load
from tests.integration.tiny.harness import wait_for
from tests.unit.shared.topology.small_topology import make, write

LIMIT_S = 60.0


class Fake:
    """A tracker that keeps the rows that it is sent."""

    def __init__(self, *, sure: bool = True, before_send: Callable[[], None] = lambda: None) -> None:
        self.SURE = sure
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
