"""Scores samples with functions that run in processes that can be killed (`services.rollout.user_code`).

A function that hangs, crashes, raises or exhausts memory costs its own sample, not the block, the loop or the service.

A process receives a few calls of one function at a time. If the process exceeds its time limit or dies, the sample
whose code was running fails; the other calls go to another process. Calls whose judge is unavailable are not failures:
they wait and are tried again (`rewards.judge`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from proto.messages import Trouble, TroubleKind, WaitKind, WaitRow
from services.rollout.rewards.judge import Judge, RewardCall
from services.rollout.rewards.score import JUDGE, RAISED, TIMEOUT, Score, failed, names_of, totals, weighted
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.host import Broken, UserHost
from services.rollout.user_code.load import UserFunction, is_inline, load
from services.rollout.user_code.pool import MOST_BROKEN, TEXT_CHARS, Failing, UserPool
from shared.sample import Sample
from shared.stages import MODEL_PART
from shared.topology.reward import REWARD_MODEL_FUNCTION

if TYPE_CHECKING:
    from shared.topology.reward import RewardRetry, RewardTerm

WATCH_S = 0.25
PLAIN_CALLS = 16
ASYNC_CALLS = 64


class RewardPool:
    """A pool of reward processes on the service's loop. Call `start` before the first block and `close` at the end."""

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        *,
        timeout_s: float,
        memory_bytes: int,
        processes: int,
        retry: RewardRetry,
        emit: Callable[[str, dict[str, float | str]], None],
    ) -> None:
        """`retry` limits the wait for a judge that is not answering. `emit(topic, values)` sends telemetry."""
        self._terms = list(terms)
        self._names = names_of([term.function for term in terms])
        self._weights = [term.weight for term in terms]
        self._scored_later = any(term.function == REWARD_MODEL_FUNCTION for term in terms)
        functions = [(term.function, term.params) for term in terms]
        self._pool = UserPool(Setup(Purpose.REWARD, functions, timeout_s, memory_bytes), processes)
        self._processes = processes
        self._emit = emit
        self._inline: dict[int, UserFunction] = {}
        self._judges: list[Judge] = [Judge(retry) for _ in terms]
        self._probing: dict[int, asyncio.TimerHandle] = {}
        self.reachable = asyncio.Event()
        """Event that is set while every judge is available."""
        self.reachable.set()
        self._failing = Failing(TroubleKind.REWARDS, "rewards")
        self._log = structlog.get_logger("rewards")
        self._waiting: deque[RewardCall] = deque()
        self._queue_changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Load every function once. Raises a one-line RpcError(bad_request) if a function cannot be loaded."""
        inline = {at: term for at, term in enumerate(self._terms) if is_inline(term.function)}
        self._inline = {at: load(Purpose.REWARD, term.function, term.params) for at, term in inline.items()}
        if len(inline) < len(self._terms):
            await self._pool.start(at_once=1)  # user modules are not imported in this process
            self._workers = [asyncio.create_task(self._work()) for _ in range(self._processes)]

    async def watch(self) -> None:
        """Wait until a process cannot be replaced, and raise the resulting RpcError. Without processes, wait
        forever."""
        await asyncio.gather(self._pool.watch(), *self._workers)

    async def close(self) -> None:
        """Stop every process."""
        for timer in self._probing.values():
            timer.cancel()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        await self._pool.close()

    async def score(self, groups: Sequence[Sequence[Sample]], advance: Callable[[], None]) -> list[list[Score]]:
        """Return each sample's score, the weighted sum over functions, in the shape of `groups` (one group per task).

        Meanwhile, `advance` is called every WATCH_S. This does not hide hangs, because calls have their own time
        limits, as do the start and end of a process. Raises RpcError(bad_request) if processes can no longer be
        started.
        """
        begun = asyncio.get_running_loop().time()
        flat = [sample for group in groups for sample in group]
        by_function = [[Score(0.0)] * len(flat) for _ in self._terms]
        calls: list[RewardCall] = []
        for at in range(len(self._terms)):
            if at in self._inline:
                by_function[at] = [_call_inline(self._inline[at], sample) for sample in flat]
                self._failing.count(by_function[at])
            else:
                calls += self._calls(groups, at)
        try:
            if calls:
                await self._finished(calls, advance)
        finally:
            for call in calls:
                call.done.set()  # abandoned: workers skip this call in the queue
        for call in calls:
            for place, score in zip(call.places, call.scores, strict=True):
                by_function[call.function][place] = score
        sums = [weighted(scores, self._names, self._weights) for scores in zip(*by_function, strict=True)]
        for score in sums if self._scored_later else ():
            score.parts.pop(MODEL_PART, None)  # the score does not exist yet
        self._counts["calls"] += len(calls)
        self._failing.lease_ended(well=all(score.value is not None for score in sums))
        self._report(sums, asyncio.get_running_loop().time() - begun)
        scored = iter(sums)
        return [[next(scored) for _ in group] for group in groups]

    async def _finished(self, calls: Sequence[RewardCall], advance: Callable[[], None]) -> None:
        for call in calls:
            judge = self._judges[call.function]
            (self._waiting if judge.outage is None else judge.held).append(call)
        self._queue_changed.set()
        everything = asyncio.create_task(_all_done(calls))
        try:
            while not everything.done():
                at_work = [task for task in (*self._workers, *self._pool.keepers) if not task.cancelled()]
                await asyncio.wait({everything, *at_work}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                for task in at_work:
                    if task.done() and not task.cancelled():
                        task.result()
                advance()
        finally:
            everything.cancel()
            await asyncio.gather(everything, return_exceptions=True)

    def _calls(self, groups: Sequence[Sequence[Sample]], function: int) -> list[RewardCall]:
        calls: list[RewardCall] = []
        place = 0
        for group in groups:
            places = list(range(place, place + len(group)))
            place += len(group)
            if self._pool.ready.group[function]:
                calls.append(RewardCall(function, list(group), places))
            else:
                calls += [RewardCall(function, [sample], [at]) for sample, at in zip(group, places, strict=True)]
        return calls

    def _report(self, scores: Sequence[Score], seconds: float) -> None:
        failures = [score for score in scores if score.value is None]
        self._counts.update(score.kind for score in failures)
        self._counts["restarts"] = self._pool.restarts
        values: dict[str, float | str] = {
            "samples": len(scores),
            "samples_failed": len(failures),
            "seconds": seconds,
            **{f"total/{kind}": float(count) for kind, count in sorted(self._counts.items())},
        }
        if failures:
            values["last_failure"] = failures[-1].failure
        self._emit("reward", values)

    # ---- one worker task per process

    async def _work(self) -> None:
        while True:
            # A process is reserved before a call is taken, so that the other workers can take calls in the meantime.
            async with self._pool.reserved() as process:
                calls = await self._take()
                if process.leaving.is_set():
                    self._waiting.extendleft(reversed(calls))
                    self._queue_changed.set()
                elif calls[0].alone:
                    async with self._pool.alone() as own:
                        await self._run(own, calls[0])
                else:
                    await asyncio.gather(*(self._run(process, call) for call in calls))

    async def _take(self) -> list[RewardCall]:
        while True:
            while self._waiting and self._waiting[0].done.is_set():
                given_up = self._waiting.popleft()
                if given_up.probe:
                    self._probe(given_up.function)
            if self._waiting:
                break
            self._queue_changed.clear()
            await self._queue_changed.wait()
        first = self._waiting.popleft()
        calls = [first]
        # Take a fair share, so that one process does not hold a long queue while another is idle.
        most = ASYNC_CALLS if self._pool.ready.is_async[first.function] else PLAIN_CALLS
        most = 1 if first.alone or first.probe else min(most, 1 + len(self._waiting) // self._processes)
        while len(calls) < most and self._waiting and _may_join(first, self._waiting[0]):
            calls.append(self._waiting.popleft())
        return calls

    async def _run(self, process: UserHost, call: RewardCall) -> None:
        ended = await process.make(call)
        if isinstance(ended, Broken):
            call.broken += 1
            if not (ended.certain or call.alone):
                call.alone = ended.suspect or call.broken == MOST_BROKEN
                self._put_back(call)
                return
            ended = ended.failed
        self._answered(call, call.scores_of(self._terms[call.function].function, ended))

    def _put_back(self, call: RewardCall) -> None:
        """Queue a call whose process has ended, so that another process makes it, or hold the call for its judge."""
        judge = self._judges[call.function]
        if judge.outage is None or call.probe:
            self._waiting.appendleft(call)
        else:
            judge.held.insert(0, call)
        self._queue_changed.set()

    # ---- judges

    async def waits(self) -> list[WaitRow]:
        """Return rows that describe what the reward functions are waiting for or computing."""
        now = asyncio.get_running_loop().time()
        outages = [
            WaitRow(
                WaitKind.OUTAGE,
                f"the judge of {term.function} is not responding ({judge.outage.tries} tries): {judge.outage.error}",
                now - judge.outage.began,
                judge.retry.limit_s,
            )
            for term, judge in zip(self._terms, self._judges, strict=True)
            if judge.outage is not None
        ]
        return [*outages, *await self._pool.waits()]

    def troubles(self) -> list[Trouble]:
        """Return the problems to report in the heartbeat."""
        troubles = self._failing.troubles()
        now = asyncio.get_running_loop().time()
        for term, judge in zip(self._terms, self._judges, strict=True):
            outage = judge.outage
            if outage is None:
                continue
            text = f"a judge is not responding; rewards are waiting for it: {outage.error}"
            over = judge.is_over_limit(now)
            if over:
                text = (
                    f"the judge of {term.function} has not answered for {judge.retry.limit_s:g} s "
                    f"(reward.retry.limit_s) in {outage.tries} tries: {outage.error}; repair the judge, then resume"
                )
            troubles.append(Trouble(TroubleKind.JUDGE, text[:TEXT_CHARS], over))
        return troubles

    def _answered(self, call: RewardCall, scores: list[Score]) -> None:
        """Finish `call`, or hold it until its judge answers again."""
        judge, probe = self._judges[call.function], call.probe
        call.probe = False
        refused = next((score for score in scores if score.kind == JUDGE), None)
        if refused is None and probe and any(score.kind == TIMEOUT for score in scores):
            refused = scores[0]  # a call that times out during the outage does not show that the judge is back
        if refused is None:
            self._resume(call.function)
        elif self._refused(call, judge, refused, probe=probe):
            return
        self._failing.count(scores)
        call.finish(scores)

    def _refused(self, call: RewardCall, judge: Judge, score: Score, *, probe: bool) -> bool:
        """Record the refusal, and return whether `call` is held for its judge."""
        begins = judge.outage is None
        now = asyncio.get_running_loop().time()
        if not judge.refused(call, score.failure, now, after_s=score.retry_after_s, probe=probe):
            if probe:
                self._resume(call.function)
            return False
        if begins:
            self._log.warning("judge does not answer", why=score.failure, exception=score.trace)
            self.reachable.clear()
            self._hold_back(call.function)
        if begins or probe:
            self._probe_later(call.function)
        return True

    def _hold_back(self, function: int) -> None:
        """Also hold the queued calls of `function`."""
        waiting = [call for call in self._waiting if not call.done.is_set()]
        self._judges[function].held += [call for call in waiting if call.function == function]
        self._waiting = deque(call for call in waiting if call.function != function)

    def _probe_later(self, function: int) -> None:
        outage = self._judges[function].outage
        if outage is not None:
            loop = asyncio.get_running_loop()
            self._probing[function] = loop.call_later(outage.delay_s, self._probe, function)

    def _probe(self, function: int) -> None:
        """Ask the judge again with one of the held calls."""
        self._probing.pop(function, None)
        judge = self._judges[function]
        judge.held = [call for call in judge.held if not call.done.is_set()]
        call = judge.next_try()
        if call is None:  # no call is held, so the next call will show whether the judge is answering
            self._resume(function)
            return
        call.probe = True
        self._waiting.appendleft(call)
        self._queue_changed.set()

    def _resume(self, function: int) -> None:
        """Record that the judge has answered, and queue its held calls."""
        judge = self._judges[function]
        was_out = judge.outage is not None
        self._waiting.extend(judge.answered())
        if not was_out:
            return
        timer = self._probing.pop(function, None)
        if timer is not None:
            timer.cancel()
        self._queue_changed.set()
        self._log.info("judge answers again", function=self._terms[function].function)
        if all(other.outage is None for other in self._judges):
            self.reachable.set()


async def _all_done(calls: Sequence[RewardCall]) -> None:
    for call in calls:
        await call.done.wait()


def _may_join(first: RewardCall, other: RewardCall) -> bool:
    return other.function == first.function and not (other.alone or other.probe or other.done.is_set())


def _call_inline(function: UserFunction, sample: Sample) -> Score:
    try:
        return totals(function.name, function.call(sample, **function.params), 1, group=False)[0]
    except Exception as error:
        return failed(function.name, RAISED, f"raised {type(error).__name__}: {error}")
