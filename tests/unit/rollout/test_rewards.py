"""Rewards: loading by import path, every kind of function, and bad functions that cost only their own samples."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from proto.messages import ErrorCode
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.score import ANSWER, Score, total
from services.rollout.user_code import frames
from shared.data import open_source
from shared.rpc.errors import RpcError
from shared.sample import Sample
from shared.topology.schema import RewardRetry

pytestmark = pytest.mark.slow

MIB = 1 << 20
MODULE = """
import asyncio, ctypes, os, signal, subprocess, sys, time

COUNT = 0

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

def own_loop(sample):
    return asyncio.run(later(sample))

def slow(sample):
    if sample.completion == "hang":
        time.sleep(60)
    return 1.0

def napping(sample):
    time.sleep(0.1)
    return 1.0

LOCK = asyncio.Lock()
LOOPS = set()

async def in_turn(sample):
    LOOPS.add(asyncio.get_running_loop())
    async with LOCK:                              # contended: bound to the loop of its first use
        await asyncio.sleep(0.01)
    return {"loops": float(len(LOOPS)), "pid": float(os.getpid())}

async def in_a_thread(sample):
    await asyncio.to_thread(time.sleep, 60 if sample.completion == "hang" else 0)
    return float(os.getpid())

def ranked(samples):
    best = max(len(sample.completion) for sample in samples)
    return [float(len(sample.completion) == best) for sample in samples]

def too_few(samples):
    return [1.0]

def where(sample):
    print("for people")
    return {"pid": float(os.getpid()), "torch": float("torch" in sys.modules)}

def count(sample):
    global COUNT
    COUNT += 1
    return float(COUNT)

def bad(sample):
    what = sample.completion
    if what == "segfault":
        ctypes.string_at(0)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "eat":
        held = []
        while True:
            held.append(bytearray(16 << 20))
    if what == "spin":
        while True:
            pass
    if what == "orphan":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(sample.row["pids"], "w").write(str(child.pid))
        while True:
            pass
    if what == "parts":
        return {"x" * (17 << 20): 1.0}
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0

def talk(sample):
    print(sample.completion, flush=True)
    print(sample.completion, file=sys.stderr)
    return float(len(sample.completion))

async def gives_up(sample):
    if sample.completion == "own":
        raise TimeoutError("the judge is away")
    return 1.0

async def crash_later(sample):
    await asyncio.sleep(0.05)
    return bad(sample)

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
    """Return the current directory. It contains the module `my_rewards` and is not on Python's path."""
    (tmp_path / "my_rewards.py").write_text(MODULE.partition("class Broken")[0])
    (tmp_path / "my_broken.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample(completion: str, task: int = 0, **row: Any) -> Sample:
    return Sample(f"train/0/{task}", row, [], completion, [1], "stop")


@asynccontextmanager
async def pool(
    *lines: Line,
    timeout_s: float = 5.0,
    memory: int = 256 * MIB,
    processes: int = 2,
    told: list[Any] | None = None,
    retry: RewardRetry | None = None,
) -> AsyncIterator[RewardPool]:
    def emit(topic: str, reported: dict[str, float | str]) -> None:
        if told is not None:
            told.append((topic, reported))

    made = RewardPool(
        lines, timeout_s=timeout_s, memory_bytes=memory, processes=processes, retry=retry or RewardRetry(), emit=emit
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def score(groups: list[list[Sample]], *lines: Line, **options: Any) -> list[list[Score]]:
    async def scored() -> list[list[Score]]:
        async with pool(*lines, **options) as made:
            return await made.score(groups, lambda: None)

    return asyncio.run(scored())


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


def test_a_sum_beyond_float32_loses_only_its_sample(folder: Path) -> None:
    lines = [Line("my_rewards:plain", 1e38), Line("my_rewards:plain", 1e38)]
    ((small, large),) = score([[sample("a"), sample("abc")]], *lines)
    assert small.value == pytest.approx(2e38)
    assert (large.value, large.kind) == (None, ANSWER)
    assert large.failure.startswith("the weighted rewards add up to 6e+38, float32 holds 3.4e+38 at most")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("builtin:exact_mach", "use builtin:exact_match"),
        ("my_rewrds:plain", "cannot be imported"),
        ("my_broken:plain", "RuntimeError: the module is broken"),
        ("my_rewards:plan", "has no function 'plan'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_one_line_error(folder: Path, path: str, says: str) -> None:
    with pytest.raises(RpcError, match=says) as caught:
        score([], Line(path))
    assert caught.value.code == ErrorCode.BAD_REQUEST
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_unknown_params_of_a_function_are_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(RpcError, match="bogus"):
        score([], Line("my_rewards:plain", params={"bogus": 1}))


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


def test_threads_left_behind_by_late_coroutines_cost_no_other_sample(folder: Path) -> None:
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


BAD = [
    ("bad", "segfault", "crashed", "took its process down: it died of SIGSEGV"),
    ("bad", "exit", "crashed", "took its process down: it ended with status 3"),
    ("bad", "sys.exit", "raised", "raised SystemExit: 3"),
    ("bad", "eat", "memory", "more memory than reward.memory allows"),
    ("bad", "spin", "timeout", "no answer within 1 s (reward.timeout_s)"),
    ("bad", "stop", "timeout", "no answer within 1 s (reward.timeout_s)"),
    ("bad", "parts", "answer", "answered what cannot be handed over: 1782"),
    ("crash_later", "segfault", "crashed", "took its process down: it died of SIGSEGV"),
    ("crash_later", "sys.exit", "raised", "raised SystemExit: 3"),
    ("crash_later", "spin", "timeout", "no answer within 1 s (reward.timeout_s)"),
]


@pytest.mark.parametrize(("function", "what", "kind", "says"), BAD)
def test_a_bad_call_costs_its_sample_only(folder: Path, function: str, what: str, kind: str, says: str) -> None:
    told: list[Any] = []
    groups = [[sample("fine"), sample(what, 1), sample("fine")], [sample("fine") for _ in range(24)]]
    (first, rest) = score(groups, Line(f"my_rewards:{function}"), timeout_s=1, told=told)
    assert [each.value for each in first] == [1.0, None, 1.0]
    assert [each.value for each in rest] == [1.0] * 24
    assert first[1].kind == kind
    assert f"my_rewards:{function}: {says}" in first[1].failure
    topic, reported = told[-1]
    assert topic == "reward"
    assert (reported["samples"], reported["samples_failed"], reported[f"total/{kind}"]) == (27, 1, 1)
    assert f"my_rewards:{function}: {says}" in reported["last_failure"]


def test_processes_that_a_killed_function_started_are_killed_too(folder: Path) -> None:
    ((only,),) = score([[sample("orphan", pids=str(folder / "pid"))]], Line("my_rewards:bad"), timeout_s=0.5)
    assert only.kind == "timeout"
    pid = int((folder / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_many_bad_samples_are_all_replaced_and_the_good_ones_scored(folder: Path) -> None:
    group = [sample("segfault" if at % 5 == 0 else "fine") for at in range(20)]
    ((*scores,),) = score([group], Line("my_rewards:bad"))
    assert [each.value for each in scores] == [None if at % 5 == 0 else 1.0 for at in range(20)]


def test_a_process_is_reused_from_call_to_call(folder: Path) -> None:
    ((*scores,),) = score([[sample("x") for _ in range(20)]], Line("my_rewards:count"), processes=1)
    assert [each.value for each in scores] == [float(at + 1) for at in range(20)]


def test_a_sample_that_cannot_be_handed_over_is_named(folder: Path) -> None:
    odd = sample("x")
    odd.state["socket"] = object()
    ((good, bad),) = score([[sample("abc"), odd]], Line("my_rewards:plain"))
    assert good.value == 3.0
    assert "the sample cannot be handed to a process" in bad.failure


def test_output_that_cannot_be_printed_costs_no_sample(folder: Path) -> None:
    """Standard error is on a full disk, as a service's log file may be."""
    kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, 2)
        ((*scores,),) = score([[sample("abc"), sample("x" * 100_000)]], Line("my_rewards:talk"))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(full)
    assert [each.value for each in scores] == [3.0, 100_000.0]


def test_calls_that_fit_alone_but_not_together_are_handed_over_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "TO_PROCESS_BYTES", 1 << 20)
    group = [sample("x" * at, image="y" * 200_000) for at in range(16)]
    ((*scores,),) = score([group], Line("my_rewards:plain"), processes=1)
    assert [each.value for each in scores] == [float(at) for at in range(16)]


def test_a_timeout_error_of_the_function_is_not_reported_as_ours(folder: Path) -> None:
    ((bad, good),) = score([[sample("own"), sample("x")]], Line("my_rewards:gives_up"))
    assert (bad.kind, good.value) == ("raised", 1.0)
    assert "TimeoutError: the judge is away" in bad.failure


def test_closing_leaves_no_process_behind(folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))

    async def scenario() -> set[psutil.Process]:
        async with pool(Line("my_rewards:where"), processes=3) as made:
            await made.score([[sample("x") for _ in range(8)]], lambda: None)
            children = set(psutil.Process().children(recursive=True)) - before
            assert any("services.rollout.user_code.process" in each.cmdline() for each in children)
        return children

    assert not [each for each in asyncio.run(scenario()) if each.is_running()]


def test_a_function_that_cannot_be_reloaded_ends_the_pool_with_an_error(folder: Path) -> None:
    async def scenario() -> None:
        async with pool(Line("my_rewards:bad"), processes=1) as made:
            (folder / "my_rewards.py").write_text("broken = (")
            group = [sample("segfault"), sample("fine")]
            with pytest.raises(RpcError, match="cannot be imported"):
                await made.score([group], lambda: None)
            with pytest.raises(RpcError, match="cannot be imported"):
                await made.watch()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("completion", "params", "value"),
    [
        ("it is 1,234.5 or so", {}, 1.0),
        ("first 7, then 1,234.50", {}, 1.0),
        ("1235", {"relative": 0.001}, 1.0),
        ("1235", {"tolerance": 0.4}, 0.0),
        ("-1.2345e3", {}, 0.0),
        ("none at all", {}, 0.0),
    ],
)
def test_numeric_compares_the_last_number_within_the_tolerance(
    completion: str, params: dict[str, float], value: float
) -> None:
    assert values(score([[sample(completion, answer="1234.5")]], Line("builtin:numeric", params=params))) == [[value]]


@pytest.mark.parametrize(
    ("pattern", "completion", "value"),
    [
        (r"<answer>.*</answer>", "well, <answer>7</answer>", 1.0),
        (r"<answer>.*</answer>", "7", 0.0),
        (r"<answer>(?P<answer>.*?)</answer>", "<answer>3</answer> no: <answer> 7 </answer>", 1.0),
        (r"<answer>(?P<answer>.*?)</answer>", "<answer>3</answer>", 0.0),
    ],
)
def test_regex_checks_the_form_or_compares_the_captured_answer(pattern: str, completion: str, value: float) -> None:
    line = Line("builtin:regex", params={"pattern": pattern})
    assert values(score([[sample(completion, answer=7)]], line)) == [[value]]


def test_a_regex_that_never_ends_costs_its_sample() -> None:
    line = Line("builtin:regex", params={"pattern": "(a+)+$"})
    ((hung, good),) = score([[sample("a" * 64 + "!"), sample("aa")]], line, timeout_s=0.5)
    assert (hung.kind, good.value) == ("timeout", 1.0)


def test_an_invalid_pattern_fails_the_start() -> None:
    with pytest.raises(RpcError, match=r"cannot work \(\w*[Ee]rror: unterminated"):
        score([], Line("builtin:regex", params={"pattern": "[a"}))


def test_math_verify_compares_mathematical_meaning() -> None:
    pytest.importorskip("math_verify")
    line = Line("builtin:math_verify")
    completions = [r"so \boxed{\frac{1}{2}}", "the answer is 0.5", r"$\frac{2}{3}$", "no idea"]
    assert values(score([[sample(each, answer=r"\frac{1}{2}") for each in completions]], line, timeout_s=20)) == [
        [1.0, 1.0, 0.0, 0.0]
    ]


def test_an_extra_that_is_not_installed_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text(
        "import importlib.util as u\nfound = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'math_verify' else found(name, package)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RpcError, match=r"needs the package math_verify, .* pip install 'rlbus\[rewards\]'"):
        score([], Line("builtin:math_verify"))


@pytest.mark.parametrize("dataset", ["chain_sum", "ransom_note"])  # the second data set depends on the hash seed
def test_reasoning_gym_scores_with_the_data_set_of_the_row(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    source = open_source(f"reasoning-gym:{dataset}?size=8&seed=5", where="test")
    rows = [source.row(index) for index in range(8)]
    right = [[Sample(f"train/0/{at}", row, [], f" {row['answer']}\n", [1], "stop")] for at, row in enumerate(rows)]
    wrong = [[Sample(f"train/0/{at}", row, [], "no idea", [1], "stop")] for at, row in enumerate(rows)]
    scores = score([*right, *wrong], Line("builtin:reasoning_gym"), timeout_s=20)
    assert values(scores) == [[1.0]] * 8 + [[0.0]] * 8


def test_reasoning_gym_refuses_a_row_that_it_cannot_reproduce() -> None:
    pytest.importorskip("reasoning_gym")
    row = open_source("reasoning-gym:chain_sum?size=8&seed=5", where="test").row(0)
    ((only,),) = score(
        [[Sample("train/0/0", {**row, "prompt": "another"}, [], "1", [1], "stop")]], Line("builtin:reasoning_gym")
    )
    assert "makes another question 0 here" in only.failure
