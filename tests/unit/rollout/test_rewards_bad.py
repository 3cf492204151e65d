"""A bad reward function causes the loss of only its own samples and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.rollout.user_code import frames
from shared.rpc.errors import RpcError
from tests.unit.rollout.reward_rig import Line, pool, sample, score

pytestmark = pytest.mark.slow


BAD = [
    ("bad", "segfault", "crashed", "took its process down: it died of SIGSEGV"),
    ("bad", "exit", "crashed", "took its process down: it ended with status 3"),
    ("bad", "sys.exit", "raised", "raised SystemExit: 3"),
    ("bad", "eat", "memory", "needed more memory than reward.memory allows"),
    ("bad", "spin", "timeout", "no answer within 1 s (reward.timeout_s)"),
    ("bad", "stop", "timeout", "no answer within 1 s (reward.timeout_s)"),
    ("bad", "parts", "answer", "returned a value that cannot be handed over: a message of 1782"),
    ("crash_later", "segfault", "crashed", "took its process down: it died of SIGSEGV"),
    ("crash_later", "sys.exit", "raised", "raised SystemExit: 3"),
    ("crash_later", "odd", "raised", "raised BaseException: odd"),
    ("crash_later", "spin", "timeout", "no answer within 1 s (reward.timeout_s)"),
]


@pytest.mark.parametrize(("function", "what", "kind", "says"), BAD)
def test_only_the_sample_of_a_bad_call_is_lost(folder: Path, function: str, what: str, kind: str, says: str) -> None:
    told: list[Any] = []
    groups = [[sample("fine"), sample(what, 1), sample("fine")], [sample("fine") for _ in range(24)]]
    (first, rest) = score(groups, Line(f"my_rewards:{function}"), timeout_s=1, told=told)
    assert [each.value for each in first] == [1.0, None, 1.0]
    assert [each.value for each in rest] == [1.0] * 24
    assert first[1].kind == kind
    assert f"my_rewards:{function}: {says}" in first[1].failure
    assert f"{os.sep}services{os.sep}" not in first[1].trace
    topic, reported = told[-1]
    assert topic == "reward"
    assert (reported["samples"], reported["samples_failed"], reported[f"total/{kind}"]) == (27, 1, 1)
    assert f"my_rewards:{function}: {says}" in reported["last_failure"]


def test_processes_that_a_killed_function_started_are_also_killed(folder: Path) -> None:
    ((only,),) = score([[sample("orphan", pids=str(folder / "pid"))]], Line("my_rewards:bad"), timeout_s=0.5)
    assert only.kind == "timeout"
    pid = int((folder / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_every_good_sample_among_many_bad_ones_is_scored(folder: Path) -> None:
    group = [sample("segfault" if at % 5 == 0 else "fine") for at in range(20)]
    ((*scores,),) = score([group], Line("my_rewards:bad"))
    assert [each.value for each in scores] == [None if at % 5 == 0 else 1.0 for at in range(20)]


def test_a_process_is_reused_from_call_to_call(folder: Path) -> None:
    ((*scores,),) = score([[sample("x") for _ in range(20)]], Line("my_rewards:count"), processes=1)
    assert [each.value for each in scores] == [float(at + 1) for at in range(20)]


def test_a_sample_that_cannot_be_sent_to_a_process_is_reported(folder: Path) -> None:
    odd = sample("x")
    odd.state["socket"] = object()
    ((good, bad),) = score([[sample("abc"), odd]], Line("my_rewards:plain"))
    assert good.value == 3.0
    assert "the sample cannot be handed to a process" in bad.failure


def test_no_sample_is_lost_if_output_cannot_be_printed(folder: Path) -> None:
    """Standard error goes to a full disk, as can happen to a service's log file."""
    kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, 2)
        ((*scores,),) = score([[sample("abc"), sample("x" * 100_000)]], Line("my_rewards:talk"))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(full)
    assert [each.value for each in scores] == [3.0, 100_000.0]


def test_calls_that_fit_one_by_one_but_not_together_are_sent_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "TO_PROCESS_BYTES", 1 << 20)
    group = [sample("x" * at, image="y" * 200_000) for at in range(16)]
    ((*scores,),) = score([group], Line("my_rewards:plain"), processes=1)
    assert [each.value for each in scores] == [float(at) for at in range(16)]


def test_a_timeout_error_raised_by_the_function_is_not_reported_as_a_timeout_of_the_call(folder: Path) -> None:
    ((bad, good),) = score([[sample("own"), sample("x")]], Line("my_rewards:gives_up"))
    assert (bad.kind, good.value) == ("raised", 1.0)
    assert "TimeoutError: the judge is away" in bad.failure


def test_closing_the_pool_ends_all_its_processes(folder: Path) -> None:
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
