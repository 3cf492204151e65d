"""Checks that reward calls survive disturbances caused by earlier and concurrent calls in the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from services.rollout.rewards.score import Score
from tests.unit.rollout.reward_rig import MIB, Line, pool, sample, values

pytestmark = pytest.mark.slow

MODULE = """
import asyncio, os, signal, threading

HELD = []

async def hoards(sample):
    if sample.completion == "hoard":
        mine = bytearray(160 << 20)
        await asyncio.sleep(0.5)
        return float(bool(mine))
    await asyncio.sleep(0.1)
    return float(bool(bytearray(120 << 20)))

def leaks(sample):
    HELD.append(bytearray(100 << 20))
    return 1.0

async def ends(sample):
    await asyncio.sleep(0.1)
    with open("tries", "a") as file:
        file.write(sample.completion + " ")
    if sample.completion == "exit":
        os._exit(3)
    await asyncio.sleep(0.1)
    return 1.0

def stops_later(sample):
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_shared.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("function", "completions"), [("hoards", ["hoard", "a", "b", "c"]), ("leaks", ["a", "b", "c", "d", "e"])]
)
def test_a_call_that_exceeds_the_memory_limit_because_of_other_calls_is_not_lost(
    folder: Path, function: str, completions: list[str]
) -> None:
    async def scored() -> list[list[Score]]:
        async with pool(Line(f"my_shared:{function}"), processes=1, memory=256 * MIB) as made:
            return await made.score([[sample(each) for each in completions]], lambda: None)

    assert values(asyncio.run(scored())) == [[1.0] * len(completions)]


def test_only_the_coroutine_that_ran_when_its_process_ended_is_repeated_alone(folder: Path) -> None:
    async def scored() -> list[list[Score]]:
        async with pool(Line("my_shared:ends"), processes=1) as made:
            return await made.score([[sample(each) for each in ("a", "b", "exit", "c")]], lambda: None)

    ((first, second, ended, last),) = asyncio.run(scored())
    assert [each.value for each in (first, second, last)] == [1.0] * 3
    assert (ended.value, ended.kind) == (None, "crashed")
    assert (folder / "tries").read_text().split().count("exit") == 2


def test_a_stopped_process_that_reads_nothing_is_replaced(folder: Path) -> None:
    async def scenario() -> None:
        async with pool(Line("my_shared:stops_later"), processes=1, timeout_s=1.0) as made:
            assert values(await made.score([[sample("a")]], lambda: None)) == [[1.0]]
            async with asyncio.timeout(60):
                while not any(
                    each.status() == psutil.STATUS_STOPPED for each in psutil.Process().children(recursive=True)
                ):
                    await asyncio.sleep(0.02)
                # This is more than fits in the socket buffers without a reader.
                assert values(await made.score([[sample("a" * (4 * MIB))]], lambda: None)) == [[1.0]]

    asyncio.run(scenario())
