"""Rewards: loading by import path, every shape of function, and that a bad one costs no more than its samples."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proto.messages import ErrorCode
from services.rollout.rewards.load import RewardFunction, load_rewards
from services.rollout.rewards.scoring import Score, score_block, total
from shared.rpc.errors import RpcError
from shared.sample import Sample

MODULE = """
import asyncio, threading, time

def plain(sample, *, bonus=0.0):
    return len(sample.completion) + bonus

def by_row(sample):
    value = sample.row["reward"]
    if value == "raise":
        raise ValueError("no such answer")
    return value

async def later(sample):
    await asyncio.sleep(0.02)
    if sample.completion == "hang":
        await asyncio.sleep(60)
    return float(len(sample.completion))

def slow(sample):
    if sample.completion == "hang":
        time.sleep(60)
    return 1.0

def napping(sample):
    time.sleep(0.1)
    return 1.0

def ranked(samples):
    best = max(len(sample.completion) for sample in samples)
    return [float(len(sample.completion) == best) for sample in samples]

def too_few(samples):
    return [1.0]

def where(sample):
    return {"main": float(threading.current_thread() is threading.main_thread()), "one": 1.0}

class Broken:
    raise RuntimeError("the module is broken")
"""


@dataclass(frozen=True)
class Line:
    function: str
    weight: float = 1.0
    params: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the module `my_rewards` in it and not on Python's path yet."""
    (tmp_path / "my_rewards.py").write_text(MODULE.partition("class Broken")[0])
    (tmp_path / "my_broken.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path  # type: ignore[misc]
    for name in ("my_rewards", "my_broken"):
        sys.modules.pop(name, None)


def sample(completion: str, task: int = 0, **row: Any) -> Sample:
    return Sample(f"train/0/{task}", row, [], completion, [1], "stop")


def score(groups: list[list[Sample]], *lines: Line, timeout_s: float = 5.0) -> list[list[Score]]:
    functions = load_rewards(lines)
    return asyncio.run(score_block(groups, functions, timeout_s, lambda: None))


def values(scores: list[list[Score]]) -> list[list[float | None]]:
    return [[each.value for each in group] for group in scores]


def test_exact_match_strips_and_compares_as_text() -> None:
    group = [sample(" 132 \n", answer=132), sample("132", answer=" 132"), sample("13", answer="132")]
    assert values(score([group], Line("builtin:exact_match"))) == [[1.0, 1.0, 0.0]]


def test_exact_match_without_an_answer_fails_the_sample() -> None:
    ((only,),) = score([[sample("132")]], Line("builtin:exact_match"))
    assert only.value is None
    assert "KeyError: 'answer'" in only.failure


def test_a_module_in_the_current_directory_is_found_and_takes_its_params(folder: Path) -> None:
    assert values(score([[sample("abc")]], Line("my_rewards:plain", params={"bonus": 0.5}))) == [[3.5]]


def test_terms_are_summed_by_weight(folder: Path) -> None:
    lines = [Line("my_rewards:plain", 2.0), Line("builtin:exact_match", -1.0)]
    assert values(score([[sample("abc", answer="abc"), sample("ab", answer="x")]], *lines)) == [[5.0, 4.0]]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("builtin:exact_mach", "use builtin:exact_match"),
        ("my_rewrds:plain", "cannot be imported"),
        ("my_broken:plain", "RuntimeError: the module is broken"),
        ("my_rewards:plan", "has no function 'plan'"),
    ],
)
def test_a_reward_that_cannot_be_had_is_an_error_of_one_line(folder: Path, path: str, says: str) -> None:
    with pytest.raises(RpcError, match=says) as caught:
        load_rewards([Line(path)])
    assert caught.value.code == ErrorCode.BAD_REQUEST
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_params_that_the_function_does_not_take_are_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(RpcError, match="bogus"):
        load_rewards([Line("my_rewards:plain", params={"bogus": 1})])


def test_a_raise_and_a_nan_cost_only_their_samples(folder: Path) -> None:
    group = [sample("", reward=1.0), sample("", reward="raise"), sample("", reward=math.nan), sample("", reward="x")]
    ((good, raised, nan, text),) = score([group], Line("my_rewards:by_row"))
    assert good.value == 1.0
    assert raised.value is None
    assert "my_rewards:by_row: raised ValueError: no such answer" in raised.failure
    assert nan.value is None
    assert text.value is None


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"format": 0.25, "answer": 0.5}, 0.75),
        ({"reward": 1.0, "format": 0.25}, 1.0),
        (True, 1.0),
        (math.inf, None),
        ({"a": math.nan}, None),
        (None, None),
        ([1.0], None),
    ],
)
def test_what_a_function_answers_becomes_one_number_or_a_failure(answer: Any, value: float | None) -> None:
    assert total(answer).value == value


def test_a_dict_keeps_its_parts_and_the_function_runs_off_the_calling_thread(folder: Path) -> None:
    ((only,),) = score([[sample("")]], Line("my_rewards:where"))
    assert only.parts == {"main": 0.0, "one": 1.0}
    assert threading.current_thread() is threading.main_thread()


def test_coroutine_functions_run_concurrently(folder: Path) -> None:
    groups = [[sample("a" * (i + 1), task) for i in range(16)] for task in range(4)]
    started = time.monotonic()
    scores = score(groups, Line("my_rewards:later"))
    assert time.monotonic() - started < 64 * 0.02
    assert values(scores) == [[float(i + 1) for i in range(16)]] * 4


def test_slow_plain_functions_get_more_threads(folder: Path) -> None:
    started = time.monotonic()
    scores = score([[sample("x") for _ in range(32)]], Line("my_rewards:napping"))
    assert time.monotonic() - started < 32 * 0.1 / 2
    assert values(scores) == [[1.0] * 32]


@pytest.mark.parametrize("function", ["my_rewards:slow", "my_rewards:later"])
def test_a_hanging_call_costs_its_sample_after_the_timeout(folder: Path, function: str) -> None:
    started = time.monotonic()
    group = [sample("a"), sample("hang"), sample("b")]
    ((first, hung, last),) = score([group], Line(function), timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert first.value == last.value == 1.0
    assert hung.value is None
    assert "no answer within 0.3 s (reward.timeout_s)" in hung.failure


def test_a_group_function_sees_one_task_at_a_time(folder: Path) -> None:
    groups = [[sample("a"), sample("abc")], [sample("ab", 1), sample("a", 1), sample("bb", 1)]]
    assert values(score(groups, Line("my_rewards:ranked"))) == [[0.0, 1.0], [1.0, 0.0, 1.0]]


def test_a_group_function_that_answers_too_few_fails_its_group(folder: Path) -> None:
    ((a, b),) = score([[sample("a"), sample("b")]], Line("my_rewards:too_few"))
    assert a.value is None
    assert b.value is None
    assert "for 2 samples" in a.failure


def test_progress_is_told_while_calls_end(folder: Path) -> None:
    told: list[int] = []
    functions: list[RewardFunction] = load_rewards([Line("my_rewards:napping")])
    asyncio.run(score_block([[sample("x") for _ in range(32)]], functions, 5.0, lambda: told.append(1)))
    assert len(told) > 1
