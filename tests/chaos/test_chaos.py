"""Tests a short disturbed run, and tests that the checks detect histories that break a promise."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.chaos import disturbances, history, points, rounds
from tests.chaos.history import Record

SEED = 11


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_disturbed_run_keeps_the_promises(tmp_path: Path) -> None:
    """The run suffers kills at named points and at random, stops, clock jumps, full memory, and a store without
    descriptors.

    Only services that restart within seconds are killed. CHAOS_SEED sets the seed of the draw.
    """
    try:
        with rounds.mounted(tmp_path / "try", 1 << 20):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a tmpfs is not allowed here: {error}")
    light = [disturbances.SERVICES[name] for name in disturbances.LIGHT]
    result = rounds.disturbed(
        tmp_path / "round",
        int(os.environ.get("CHAOS_SEED", SEED)),
        disturbances.GENTLE,
        reference=None,
        points=lambda chance, marks: points.drawn(chance, marks, 3, light),
        services=disturbances.LIGHT,
        steps=4,
        say=print,
    )
    assert result.violations == []
    assert result.kills.total() >= 2


def record(kind: str, at: float, *tasks: tuple[str, int], **values: object) -> Record:
    return {"kind": kind, "begun": at, "at": at + 0.5, "tasks": [list(task) for task in tasks], **values}


def test_history_of_a_put_a_read_and_a_collection_is_accepted() -> None:
    task = ("train/0/1", 2)
    told = [
        record("put", 1, task, keys=["token_ids", "lengths"]),
        record("accepted", 2, task, stage="rollout"),
        record("accepted", 2, task, stage="rollout"),
        record("refused", 2.5, task, code="missing", keys=["token_ids", "advantages"]),
        record("read", 3, task),
        record("clear", 4, task),
        record("refused", 5, task, code="collected", keys=["token_ids"]),
        record("refused", 5, ("train/0/2", 1), code="missing", keys=["token_ids"]),
    ]
    assert history.violations(told) == []


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([record("clear", 1, ("t", 3)), record("read", 2, ("t", 2))], "t fence 2: read 0.500 s after its collection"),
        (
            [
                record("put", 1, ("t", 2), keys=["token_ids", "lengths"]),
                record("refused", 2, ("t", 2), code="missing", keys=["lengths"]),
            ],
            "missing 0.500 s after its put",
        ),
        (
            [record("accepted", 1, ("t", 1), stage="rollout"), record("accepted", 2, ("t", 2), stage="rollout")],
            "accepted under fence 1 and again under 2",
        ),
    ],
    ids=["read after collection", "acknowledged put lost", "accepted task sampled again"],
)
def test_history_that_breaks_a_promise_is_found(told: list[Record], found: str) -> None:
    [violation] = history.violations(told)
    assert found in violation


def test_steps_that_train_a_task_twice_or_lose_a_commit_are_found(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal") as tables:
        tables.execute("CREATE TABLE steps (step, state, task_ids)")
        rows = [(1, "COMMITTED", '["a", "b"]'), (2, "COMMITTED", '["b"]'), (3, "TAKEN_BACK", '["a"]')]
        tables.executemany("INSERT INTO steps VALUES (?, ?, ?)", rows)
    written: list[Record] = [{"step": 0}, {"step": 1}, {"step": 2}]
    told: list[Record] = [{"kind": "commit", "step": 3}]
    assert history.journal_violations(tmp_path / "journal", written, told, 2) == [
        "b: in 2 steps",
        "step 3: its commit was acknowledged, but it has no row",
    ]


def test_a_seed_always_draws_the_same_points(tmp_path: Path) -> None:
    one, other = (points.drawn(random.Random(5), tmp_path, 6) for _ in range(2))
    assert one == other
    assert len({(point.module, point.name, point.match) for point in one}) == 6
