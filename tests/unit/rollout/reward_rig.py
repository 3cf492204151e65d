"""Provides tests with user-defined rewards of every kind and with the pool that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.score import Score
from shared.sample import Sample
from shared.topology.reward import RewardRetry

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
    if what == "odd":
        raise BaseException("odd")
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
