"""Scores samples with the loaded functions. A function that raises, hangs or answers nonsense costs its own sample
and never the block, the loop or the service.

Plain functions run on daemon threads: one at first, more while calls are slow; a thread stuck in a call past
`timeout_s` is left behind and replaced. Coroutine functions run concurrently on a loop of such a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.rollout.rewards.load import RewardFunction
from shared.sample import Sample

MAX_THREADS = 16
MAX_CONCURRENT_CALLS = 64
WATCH_S = 0.05
GRACE_S = 0.5  # a call on a busy machine is not hung yet
TOTAL_KEY = "reward"


@dataclass(frozen=True, slots=True)
class Score:
    """`value` None: the sample failed, `failure` says why in one line. `parts`: what a dict reward named."""

    value: float | None
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class _Call:
    """One call of a user's function, over the samples at `places` of the block."""

    function: RewardFunction
    argument: Any
    places: list[int]
    started: float = 0.0
    done: bool = False
    scores: list[Score] = field(default_factory=list)

    def finish(self, scores: list[Score]) -> None:
        if not self.done:  # the watcher may have given it up meanwhile
            self.scores = scores
            self.done = True

    def fail(self, why: str) -> None:
        self.finish([Score(None, f"{self.function.name}: {why}")] * len(self.places))


def total(answer: Any) -> Score:
    """The score of one sample from what a function returned.

    A number counts as it is; of a dict its key `reward` if there is one, else the sum of its values. Fails for NaN,
    infinity and everything else.
    """
    try:
        if isinstance(answer, dict):
            parts = {str(key): float(value) for key, value in answer.items()}
            value = parts[TOTAL_KEY] if TOTAL_KEY in parts else math.fsum(parts.values())
        else:
            parts, value = {}, float(answer)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(None, f"answered {answer!r:.60}, must be a number or a dict of numbers ({error})")
    if not math.isfinite(value):
        return Score(None, f"answered {value}, must be finite")
    return Score(value, parts=parts)


async def score_block(
    groups: Sequence[Sequence[Sample]],
    functions: Sequence[RewardFunction],
    timeout_s: float,
    advance: Callable[[], None],
) -> list[list[Score]]:
    """Scores of every sample, in the shape of `groups` (one group a task): the weighted sum over `functions`.

    `advance` is called when calls have ended since the last look. A sample that fails in one function fails.
    """
    flat = [sample for group in groups for sample in group]
    sums = [Score(0.0) for _ in flat]
    for function in functions:
        calls = _calls(groups, function)
        await _run(calls, timeout_s, advance)
        for call in calls:
            for place, score in zip(call.places, call.scores, strict=True):
                sums[place] = _add(sums[place], score, function)
    scores = iter(sums)
    return [[next(scores) for _ in group] for group in groups]


def _add(left: Score, right: Score, function: RewardFunction) -> Score:
    if left.value is None:
        return left
    if right.value is None:
        return right
    return Score(left.value + function.weight * right.value, parts={**left.parts, **right.parts})


def _calls(groups: Sequence[Sequence[Sample]], function: RewardFunction) -> list[_Call]:
    calls: list[_Call] = []
    place = 0
    for group in groups:
        places = list(range(place, place + len(group)))
        place += len(group)
        if function.group:
            calls.append(_Call(function, list(group), places))
        else:
            calls += [_Call(function, sample, [at]) for sample, at in zip(group, places, strict=True)]
    return calls


def _take(call: _Call, answer: Any) -> None:
    answers = answer if call.function.group else [answer]
    if call.function.group and (not isinstance(answer, list | tuple) or len(answer) != len(call.places)):
        call.fail(f"answered {answer!r:.60} for {len(call.places)} samples, must be a list of as many rewards")
        return
    scores = [total(each) for each in answers]
    call.finish([s if s.value is not None else Score(None, f"{call.function.name}: {s.failure}") for s in scores])


def _raised(call: _Call, error: BaseException) -> None:
    call.fail(f"raised {type(error).__name__}: {error}"[:300].replace("\n", " "))


async def _run(calls: list[_Call], timeout_s: float, advance: Callable[[], None]) -> None:
    """Start threads for `calls` and watch them until each call is done or given up."""
    if not calls:
        return
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    waiting = deque(calls)
    serve = _serve_async if calls[0].function.is_async else _serve_plain

    def start_thread() -> None:
        def work() -> None:
            serve(waiting, timeout_s)
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)

        threading.Thread(target=work, name="reward", daemon=True).start()

    start_thread()
    threads, finished = 1, 0
    most = 1 if calls[0].function.is_async else MAX_THREADS
    while not all(call.done for call in calls):
        wake.clear()
        with contextlib.suppress(TimeoutError):  # time to look at the clock
            async with asyncio.timeout(WATCH_S):
                await wake.wait()
        hung = _give_up_hung(calls, timeout_s)
        threads = max(threads - hung, 0)
        now_finished = sum(call.done for call in calls)
        if now_finished > finished:
            finished = now_finished
            advance()
        # Calls still wait, so those under way are slow, or stuck: one more thread, up to the limit.
        if waiting and threads < most:
            start_thread()
            threads += 1


def _give_up_hung(calls: list[_Call], timeout_s: float) -> int:
    """Fail the calls that have run for too long; their threads are left behind."""
    now = time.monotonic()
    hung = [call for call in calls if call.started and not call.done and now - call.started > timeout_s + GRACE_S]
    for call in hung:
        call.fail(f"no answer within {timeout_s:g} s (reward.timeout_s)")
    return len(hung)


def _serve_plain(waiting: deque[_Call], timeout_s: float) -> None:
    while True:
        try:
            call = waiting.popleft()
        except IndexError:
            return
        call.started = time.monotonic()
        try:
            _take(call, call.function.call(call.argument, **call.function.params))
        except BaseException as error:  # a user's sys.exit(), too, costs only its sample
            _raised(call, error)
        if time.monotonic() - call.started > timeout_s + GRACE_S:
            return  # was given up and replaced meanwhile


def _serve_async(waiting: deque[_Call], timeout_s: float) -> None:
    async def one() -> None:
        while True:
            try:
                call = waiting.popleft()
            except IndexError:
                return
            call.started = time.monotonic()
            try:
                async with asyncio.timeout(timeout_s):
                    _take(call, await call.function.call(call.argument, **call.function.params))
            except TimeoutError:
                call.fail(f"no answer within {timeout_s:g} s (reward.timeout_s)")
            except Exception as error:
                _raised(call, error)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(min(MAX_CONCURRENT_CALLS, len(waiting)))))

    asyncio.run(all_of_them())
