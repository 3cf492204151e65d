"""Tests the shards that a server holds: reconciliation leaves them alone until they are released, also after a restart
of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from proto.messages import Ack, ErrorCode, GetRunInfo, HoldShards, PutTask, ReleaseShards
from services.scheduler import run_state
from services.scheduler.events import Effect, Fail, Listed, SendClear
from services.scheduler.run_state import RunState
from tests.unit.scheduler.bench import STORE, Bench, plan


def hold(first: int, count: int, epoch: int = 3, split: str = "api", driver: int = 1) -> HoldShards:
    return HoldShards(driver=driver, split=split, epoch=epoch, first=first, count=count)


def release(first: int, count: int, epoch: int = 3, fence: int = 1) -> ReleaseShards:
    return ReleaseShards(driver=1, split="api", epoch=epoch, first=first, count=count, fence=fence)


def strays(bench: Bench, *names: str) -> list[str]:
    """Return which of these tasks the scheduler has a store delete when it lists them."""
    effects = bench.event(Listed(STORE, [PutTask(name, 1) for name in names], [[7]] * len(names), True, True))
    return [task.task_id for effect in cleared(effects) if not effect.tracked for task in effect.tasks]


def cleared(effects: list[Effect]) -> list[SendClear]:
    return [effect for effect in effects if isinstance(effect, SendClear)]


NAMES = [f"api/{model}/{index}" for model in (3, 4) for index in (4, 5, 9, 10)]


def test_only_shards_outside_the_holds_are_strays() -> None:
    bench = Bench().start()
    assert strays(bench, *NAMES) == NAMES
    assert isinstance(bench.ask(hold(5, 5)), Ack)
    assert isinstance(bench.ask(hold(0, 2)), Ack)
    assert isinstance(bench.ask(hold(7, 1, split="weights")), Ack)
    assert strays(bench, *NAMES, "weights/3/7", "api/3/1") == [
        name for name in NAMES if name not in ("api/3/5", "api/3/9")
    ]


def test_a_release_clears_the_shards_and_may_be_repeated() -> None:
    bench = Bench().start()
    bench.ask(hold(5, 3))
    bench.acknowledge()
    assert isinstance(bench.ask(release(5, 3, fence=2)), Ack)
    assert bench.acknowledge() == {(f"api/3/{index}", 2) for index in (5, 6, 7)}
    length = len(bench.journal)
    assert isinstance(bench.ask(release(5, 3)), Ack)
    assert bench.acknowledge() == set()
    assert len(bench.journal) == length  # nothing has changed
    assert strays(bench, "api/3/6") == ["api/3/6"]


def test_a_restarted_scheduler_knows_the_holds_from_its_journal_and_from_its_snapshot() -> None:
    bench = Bench().start()
    bench.ask(hold(5, 5))
    bench.ask(hold(20, 1))
    bench.ask(release(20, 1))
    assert not isinstance(bench.ask(hold(5, 5)), Fail)  # a repeated message
    replayed = RunState(plan())
    for event in bench.journal:
        replayed.apply(event)
    parts = run_state.dump(bench.machine.run)
    loaded = run_state.load(plan(), parts)
    assert run_state.dump(replayed) == run_state.dump(loaded) == parts
    for run in (replayed, loaded):
        assert [name for name in ("api/3/4", "api/3/5", "api/3/9", "api/3/20") if run.shards.holds.covers(name)] == [
            "api/3/5",
            "api/3/9",
        ]


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (hold(9, 1), ErrorCode.BAD_REQUEST, "hold of api/3/9 to 9: it overlaps with another range"),
        (hold(0, 6), ErrorCode.BAD_REQUEST, "hold of api/3/0 to 5: it overlaps"),
        (release(5, 4), ErrorCode.BAD_REQUEST, "release of api/3/5 to 8: it overlaps"),
        (hold(0, 1, split="train"), ErrorCode.BAD_REQUEST, "hold of 1 tasks of 'train' from 3/0: use api or weights"),
        (hold(0, 0), ErrorCode.BAD_REQUEST, "hold of 0 tasks"),
        (hold(0, 1 << 17), ErrorCode.BAD_REQUEST, "hold of 131072 tasks"),
        (hold(-1, 1), ErrorCode.BAD_REQUEST, "from 3/-1"),
        (hold(50, 1, driver=9), ErrorCode.CONFLICT, "driver 9: a newer driver"),
        (release(5, 5, fence=1 << 32), ErrorCode.BAD_REQUEST, "fence 4294967296"),
    ],
)
def test_a_hold_that_makes_no_sense_is_refused_and_changes_nothing(request_: Any, code: ErrorCode, text: str) -> None:
    bench = Bench().start()
    bench.ask(GetRunInfo(driver=1))
    bench.ask(hold(5, 5))
    length = len(bench.journal)
    failed = bench.ask(request_)
    assert isinstance(failed, Fail)
    assert (failed.code, text in failed.message) == (code, True), failed
    assert len(bench.journal) == length
    assert "\n" not in failed.message
