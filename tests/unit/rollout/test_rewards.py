"""Tests rewards: loading by import path, every kind of function, timeouts and progress."""

from __future__ import annotations

import asyncio
import math
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.rollout.rewards.score import ANSWER, INFO_CHARS, Score, total, weighted
from shared.rpc.errors import BadInput, RpcError
from tests.unit.rollout.reward_rig import Line, pool, sample, score, values

pytestmark = pytest.mark.slow


def test_a_module_in_the_current_directory_is_found_and_takes_its_params(folder: Path) -> None:
    assert values(score([[sample("abc")]], Line("my_rewards:plain", params={"bonus": 0.5}))) == [[3.5]]


def test_terms_are_summed_by_weight(folder: Path) -> None:
    lines = [Line("my_rewards:plain", 2.0), Line("builtin:exact_match", -1.0)]
    assert values(score([[sample("abc", answer="abc"), sample("ab", answer="x")]], *lines)) == [[5.0, 4.0]]


def test_only_the_sample_whose_sum_exceeds_float32_is_lost(folder: Path) -> None:
    lines = [Line("my_rewards:plain", 1e38), Line("my_rewards:plain", 1e38)]
    ((small, large),) = score([[sample("a"), sample("abc")]], *lines)
    assert small.value == pytest.approx(2e38)
    assert (large.value, large.kind) == (None, ANSWER)
    assert large.failure.startswith("the weighted rewards add up to 6e+38, but float32 holds at most 3.4e+38")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("builtin:exact_mach", "use builtin:exact_match"),
        ("my_rewrds:plain", "cannot be imported"),
        ("my_broken:plain", "RuntimeError: the module is broken"),
        ("my_rewards:plan", "has no function 'plan'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_causes_a_one_line_error(folder: Path, path: str, says: str) -> None:
    with pytest.raises(RpcError, match=says) as caught:
        score([], Line(path))
    assert isinstance(caught.value, BadInput) != (path == "my_broken:plain")  # a RuntimeError may pass
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_unknown_parameters_of_a_function_are_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(RpcError, match="bogus"):
        score([], Line("my_rewards:plain", params={"bogus": 1}))


def test_only_a_sample_whose_reward_raises_or_is_not_a_number_is_lost(folder: Path) -> None:
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
        (1e300, None),
        (-3.5e38, None),
        ({"a": 3e38, "b": 3e38}, None),
        ({"a": math.nan}, None),
        (None, None),
        ([1.0], None),
    ],
)
def test_the_result_of_a_function_becomes_one_number_or_a_failure(answer: Any, value: float | None) -> None:
    assert total(answer).value == value


def test_texts_in_a_dict_are_kept_beside_the_reward() -> None:
    long = total({"reward": 1.0, "format": 0.5, "found": "é\ud800" + "x" * 2 * INFO_CHARS})
    assert (long.value, long.parts) == (1.0, {"reward": 1.0, "format": 0.5})
    assert long.info == {"found": "é?" + "x" * (INFO_CHARS - 2)}
    for answer in ({"reward": "1.0", "format": 0.5}, {"found": "1.0"}):
        assert total(answer).value is None
        assert total(answer).kind == ANSWER


def test_each_function_of_a_sum_is_a_part_under_a_unique_name_and_without_its_weight(folder: Path) -> None:
    one, two = Line("my_rewards:plain", weight=2.0, params={"bonus": -0.5}), Line("builtin:exact_match", weight=-1.0)
    three = Line("my_rewards:plain", params={"bonus": -0.75})
    ((sum_,),) = score([[sample("3", answer=3)]], one, two, three)
    assert sum_.value == 2 * 0.5 - 1.0 + 0.25
    assert sum_.parts == {"plain": 0.5, "exact_match": 1.0, "plain-2": 0.25}
    ((alone,),) = score([[sample("3", answer=3)]], Line("builtin:exact_match"))
    assert (alone.value, alone.parts) == (1.0, {})  # the reward itself
    ((half,),) = score([[sample("3", answer=3)]], Line("builtin:exact_match", weight=0.5))
    assert (half.value, half.parts) == (0.5, {"exact_match": 1.0})


def test_parts_of_the_same_name_get_the_name_of_their_function() -> None:
    left = Score(1.5, parts={"form": 1.0, "sense": 0.5}, info={"found": "3", "unit": "m"})
    right = Score(0.25, parts={"form": 0.25, "left": 0.0}, info={"found": "4"})
    sum_ = weighted([left, right], ["left", "right"], [1.0, 1.0])
    assert sum_.value == 1.75
    assert sum_.parts == {
        "left": 1.5,
        "right": 0.25,
        "left/form": 1.0,
        "sense": 0.5,
        "right/form": 0.25,
        "right/left": 0.0,
    }
    assert sum_.info == {"left/found": "3", "unit": "m", "right/found": "4"}


def test_a_dict_keeps_its_parts_and_the_function_runs_in_a_separate_light_process(folder: Path) -> None:
    ((only,),) = score([[sample("")]], Line("my_rewards:where"))
    assert only.parts["pid"] != os.getpid()
    assert only.parts["torch"] == 0


def test_coroutine_functions_run_concurrently(folder: Path) -> None:
    groups = [[sample("a" * (i + 1), task) for i in range(16)] for task in range(4)]
    started = time.monotonic()
    scores = score(groups, Line("my_rewards:later"))
    assert time.monotonic() - started < 64 * 0.02
    assert values(scores) == [[float(i + 1) for i in range(16)]] * 4


def test_coroutines_of_all_blocks_share_one_loop_and_its_resources(folder: Path) -> None:
    async def scenario() -> None:
        async with pool(Line("my_rewards:in_turn"), Line("my_rewards:plain"), processes=1) as made:
            found = [await made.score([[sample("x") for _ in range(4)]], lambda: None) for _ in range(3)]
        parts = [each.parts for ((*group,),) in found for each in group]
        assert [each["loops"] for each in parts] == [1.0] * 12
        assert len({each["pid"] for each in parts}) == 1

    asyncio.run(scenario())


def test_a_plain_function_may_run_its_own_event_loop(folder: Path) -> None:
    scores = score([[sample("a"), sample("abc")]], Line("my_rewards:own_loop"), Line("my_rewards:later"))
    assert values(scores) == [[2.0, 6.0]]


def test_threads_left_behind_by_late_coroutines_do_not_affect_other_samples(folder: Path) -> None:
    async def scenario() -> list[float | None]:
        async with pool(Line("my_rewards:in_a_thread"), processes=1, timeout_s=0.7) as made:
            pids: list[float | None] = []
            for hanging in (2, 2, 0):
                group = [*(sample("hang") for _ in range(hanging)), sample("")]
                ((*hung, good),) = await made.score([group], lambda: None)
                assert [each.kind for each in hung] == ["timeout"] * hanging
                pids.append(good.value)
        return pids

    first, second, third = asyncio.run(scenario())
    assert first == second != third


def test_slow_plain_functions_run_in_all_processes(folder: Path) -> None:
    async def scenario() -> float:
        async with pool(Line("my_rewards:napping"), processes=4) as made:
            started = time.monotonic()
            scores = await made.score([[sample("x") for _ in range(64)]], lambda: None)
            assert values(scores) == [[1.0] * 64]
            return time.monotonic() - started

    assert asyncio.run(scenario()) < 64 * 0.1 * 0.75


@pytest.mark.parametrize("function", ["my_rewards:slow", "my_rewards:later"])
def test_the_sample_of_a_hanging_call_is_lost_after_the_timeout(folder: Path, function: str) -> None:
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


def test_a_group_function_that_returns_too_few_values_fails_its_group(folder: Path) -> None:
    ((a, b),) = score([[sample("a"), sample("b")]], Line("my_rewards:too_few"))
    assert a.value is None
    assert b.value is None
    assert "for 2 samples" in a.failure


def test_progress_is_reported_while_a_call_is_within_its_timeout(folder: Path) -> None:
    told: list[float] = []

    async def scenario() -> None:
        async with pool(Line("my_rewards:slow"), timeout_s=1) as made:
            told.append(time.monotonic())
            ((hung,),) = await made.score([[sample("hang")]], lambda: told.append(time.monotonic()))
            assert hung.kind == "timeout"

    asyncio.run(scenario())
    assert told[-1] - told[0] > 1
    assert max(later - before for before, later in pairwise(told)) < 1.0


@pytest.mark.parametrize(
    ("answer", "value", "turns"),
    [
        ({"reward": 1.0, "turns": [0.1, 0.4]}, 1.5, [0.1, 0.4]),
        ({"turns": [0.25]}, 0.25, [0.25]),
        ({"format": 0.5, "exact": 1.0, "turns": (1,)}, 2.5, [1.0]),
        ({"reward": 1.0, "turns": ["a"]}, None, []),
        ({"reward": 1.0, "turns": [float("nan")]}, None, []),
        ({"reward": 1.0, "turns": 3}, 1.0, []),
    ],
)
def test_a_dict_may_reward_turns(answer: Any, value: float | None, turns: list[float]) -> None:
    score = total(answer)
    assert score.value == (value if value is None else pytest.approx(value))
    assert score.turns == turns
    assert "turns" not in score.parts or answer["turns"] == 3


def test_rewards_of_turns_are_summed_by_weight() -> None:
    one, other, plain = Score(1.0, turns=[1.0, 0.0]), Score(3.0, turns=[1.0, 2.0]), Score(1.0)
    assert weighted([one, other, plain], ["a", "b", "c"], [1.0, 0.5, 2.0]).turns == [1.5, 1.0]
    refused = weighted([one, Score(1.0, turns=[1.0])], ["a", "b"], [1.0, 1.0])
    assert refused.failure == "the functions returned rewards for 2 and 1 turns of one sample"


def test_the_score_of_a_reward_model_is_no_part_of_a_reward_before_it_exists() -> None:
    lines = [Line("builtin:reward_model", 0.5), Line("builtin:exact_match", 1.0)]
    [[found]] = score([[sample("abc", answer="abc")]], *lines)
    assert (found.value, found.parts) == (1.0, {"exact_match": 1.0})
