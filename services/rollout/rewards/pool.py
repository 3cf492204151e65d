"""Scores samples in a pool of processes that can be killed.

A function that hangs, crashes, raises or exhausts memory costs its own sample, not the block, the loop or the service.

A process works through its calls one by one (coroutine functions: concurrently) and answers each. When it is late or
dies, the current call is to blame: that sample fails, and the other calls go to the process that replaces it. Calls
whose judge is unavailable are not failures; they wait and are tried again (`rewards.judge`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from proto.messages import ErrorCode, Trouble, TroubleKind
from services.rollout.failing import TEXT_CHARS, Failing
from services.rollout.rewards.frames import Answer, Ready, Setup, Work
from services.rollout.rewards.judge import Judge, Retry
from services.rollout.rewards.load import RewardFunction, Term, is_inline, load_reward
from services.rollout.rewards.score import ANSWER, CRASHED, JUDGE, RAISED, TIMEOUT, Score, add_all, failed, totals
from services.rollout.user_frames import TO_PROCESS_BYTES, UNFIT, frame
from services.rollout.user_process import GONE, START_ATTEMPTS, UserProcess, decoded
from services.rollout.user_trace import Home, StackFile, hangs_at
from shared.rpc.errors import RpcError
from shared.sample import Sample

GRACE_S = 0.5  # tolerance for calls that are late because the machine is busy
WATCH_S = 0.25
MODULE = "services.rollout.rewards.process"
PLAIN_CALLS = 16
ASYNC_CALLS = 64
LATE_CALLS = 4
"""Maximum number of late coroutines in one process. Each may have left a thread behind, and a loop has as few as five
for `asyncio.to_thread`."""
_READY = msgspec.msgpack.Decoder(Ready)
_ANSWER = msgspec.msgpack.Decoder(Answer)


@dataclass(eq=False)
class _Call:
    """One call of function `function` over the samples at `places` of the block.

    An `alone` call runs with no other call at the same time. A `fresh` call also gets a process that has made no call
    before. A `probe` runs alone to find out whether its judge answers again. See `judge.Held` for the other fields.
    """

    function: int
    samples: list[Sample]
    places: list[int]
    done: asyncio.Event
    alone: bool = False
    fresh: bool = False
    probe: bool = False
    tries: int = 0
    refusals: int = 0
    answers: int = -1
    scores: list[Score] = field(default_factory=list)

    def finish(self, scores: list[Score]) -> None:
        self.scores = scores
        self.done.set()


class RewardPool:
    """A pool of reward processes on the service's loop. Call `start` before the first block and `close` at the end."""

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        timeout_s: float,
        memory_bytes: int,
        processes: int,
        retry: Retry,
        emit: Callable[[str, dict[str, float | str]], None],
    ) -> None:
        """`retry` limits the wait for a judge that does not answer. `emit(topic, values)` sends telemetry."""
        self._terms = list(terms)
        self._setup = Setup([(term.function, term.params) for term in terms], timeout_s, memory_bytes)
        self._processes = processes
        self._emit = emit
        self._inline: dict[int, RewardFunction] = {}
        self._group: list[bool] = []
        self._is_async: list[bool] = []
        self._homes: list[Home] = []
        self._judges: list[Judge[_Call]] = [Judge(retry) for _ in terms]
        self._probing: dict[int, asyncio.TimerHandle] = {}
        self.reachable = asyncio.Event()
        """Set while no judge is unavailable."""
        self.reachable.set()
        self._failing = Failing(TroubleKind.REWARDS, "rewards")
        self._log = structlog.get_logger("rewards")
        self._waiting: deque[_Call] = deque()
        self._queue_changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._fresh: set[UserProcess] = set()
        self._late: Counter[UserProcess] = Counter()
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Load every function once. Raises RpcError(bad_request), in one line, if a function cannot be loaded."""
        inline = {at: term for at, term in enumerate(self._terms) if is_inline(term.function)}
        self._inline = {at: load_reward(term.function, term.params) for at, term in inline.items()}
        self._group = self._is_async = [False] * len(self._terms)
        if len(inline) < len(self._terms):
            first = await self._spawn()  # user modules are not imported in this process
            self._workers = [
                asyncio.create_task(self._work(first if number == 0 else None)) for number in range(self._processes)
            ]

    async def watch(self) -> None:
        """Wait until a process cannot be replaced, and raise its RpcError. Without processes, wait forever."""
        await asyncio.gather(*self._workers, asyncio.Event().wait())

    async def close(self) -> None:
        """End every process."""
        for timer in self._probing.values():
            timer.cancel()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()

    async def score(self, groups: Sequence[Sequence[Sample]], advance: Callable[[], None]) -> list[list[Score]]:
        """Return each sample's score, in the shape of `groups` (one group per task): a weighted sum over functions.

        `advance` is called every WATCH_S meanwhile. Waiting is not hanging: calls, and the start and end of a process,
        each have a time limit of their own. Raises RpcError(bad_request) if processes can no longer be started.
        """
        flat = [sample for group in groups for sample in group]
        sums = [Score(0.0) for _ in flat]
        calls: list[_Call] = []
        for at, term in enumerate(self._terms):
            if at in self._inline:
                scores = [_call_inline(self._inline[at], sample) for sample in flat]
                self._failing.count(scores)
                add_all(sums, range(len(flat)), scores, term.weight)
            else:
                calls += self._calls(groups, at)
        try:
            await self._finished(calls, advance)
        finally:
            for call in calls:
                call.done.set()  # abandoned: workers skip it in the queue
        for call in calls:
            add_all(sums, call.places, call.scores, self._terms[call.function].weight)
        self._counts["calls"] += len(calls)
        self._failing.lease_ended(well=all(each.value is not None for each in sums))
        self._report(sums)
        scored = iter(sums)
        return [[next(scored) for _ in group] for group in groups]

    async def _finished(self, calls: Sequence[_Call], advance: Callable[[], None]) -> None:
        for call in calls:
            judge = self._judges[call.function]
            (self._waiting if judge.outage is None else judge.held).append(call)
        self._queue_changed.set()
        everything = asyncio.create_task(_all_done(calls))
        try:
            while not everything.done():
                at_work = [worker for worker in self._workers if not worker.cancelled()]
                await asyncio.wait({everything, *at_work}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                for worker in at_work:
                    if worker.done() and not worker.cancelled():
                        worker.result()
                advance()
        finally:
            everything.cancel()
            await asyncio.gather(everything, return_exceptions=True)

    def _calls(self, groups: Sequence[Sequence[Sample]], function: int) -> list[_Call]:
        calls: list[_Call] = []
        place = 0
        for group in groups:
            places = list(range(place, place + len(group)))
            place += len(group)
            if self._group[function]:
                calls.append(_Call(function, list(group), places, asyncio.Event()))
            else:
                calls += [
                    _Call(function, [sample], [at], asyncio.Event()) for sample, at in zip(group, places, strict=True)
                ]
        return calls

    def _report(self, scores: Sequence[Score]) -> None:
        failures = [score for score in scores if score.value is None]
        self._counts.update(score.kind for score in failures)
        values: dict[str, float | str] = {
            "samples": len(scores),
            "samples_failed": len(failures),
            **{f"total/{kind}": float(count) for kind, count in sorted(self._counts.items())},
        }
        if failures:
            values["last_failure"] = failures[-1].failure
        self._emit("reward", values)

    # ---- one worker task per process

    async def _work(self, process: UserProcess | None) -> None:
        try:
            while True:
                # Started before there is work for it: the other workers take calls meanwhile.
                process = process or await self._spawn_again()
                calls = await self._take()
                if calls[0].fresh and process not in self._fresh:
                    await process.end()
                    process = await self._spawn_again()
                if not await self._run(process, calls):
                    process = None
        finally:
            if process is not None:
                self._fresh.discard(process)
                await process.end()

    async def _take(self) -> list[_Call]:
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
        # A fair share, so that one process does not hold a long queue while another is idle.
        most = ASYNC_CALLS if self._is_async[first.function] else PLAIN_CALLS
        most = 1 if first.alone or first.fresh or first.probe else min(most, 1 + len(self._waiting) // self._processes)
        while len(calls) < most and self._waiting and _may_join(first, self._waiting[0]):
            calls.append(self._waiting.popleft())
        return calls

    async def _run(self, process: UserProcess, calls: list[_Call]) -> bool:
        """Have `process` do `calls`. Return False if the process was ended."""
        function = calls[0].function
        name, timeout_s = self._terms[function].function, self._setup.timeout_s
        calls, later, message = _encoded(name, calls)
        self._waiting.extendleft(reversed(later))
        self._queue_changed.set()
        pending = dict(enumerate(calls))
        # If a call runs out of memory, a concurrent or an earlier call may be holding it.
        shared = len(calls) > 1 or process not in self._fresh
        self._fresh.discard(process)
        limit_s = timeout_s + GRACE_S * (2 if self._is_async[function] else 1)
        failure, why, stack = CRASHED, "", ""
        sent = ended = False
        try:
            async with asyncio.timeout(limit_s):
                await process.send(message)
            sent = True
            while pending and not ended:
                async with asyncio.timeout(limit_s):
                    answer = decoded(await process.read(), _ANSWER)
                ended = answer.last
                self._late[process] += any(score.kind == TIMEOUT for score in answer.scores)
                if ended and shared:
                    pending[answer.number].fresh = True
                else:
                    self._answered(pending.pop(answer.number), answer.scores)
        except TimeoutError:
            what = "answer" if sent else "sign that its process takes it"
            failure, why = TIMEOUT, f"no {what} within {timeout_s:g} s (reward.timeout_s)"
            stack = await process.stack.read() if process.stack is not None else ""
        except (*GONE, KeyError):
            failure = CRASHED
        except asyncio.CancelledError:
            await process.end()
            raise
        else:
            if not ended and self._late[process] < LATE_CALLS:
                return True
        del self._late[process]
        left = list(pending.values())
        broken = bool(left) and not ended
        # The socket closes a moment before the exit status is available.
        status = await process.end(GRACE_S if broken and failure == CRASHED else 0.0)
        self._counts["restarts"] += 1
        if broken:
            why = why or f"took its process down: it {status}"
            at = hangs_at(stack, self._homes[function])
            self._blame(left, failed(name, failure, why, at=at, trace=stack), begun=sent)
        elif self._is_async[function]:
            _repeat_alone(left)
        self._put_back(self._judges[function], left)
        return False

    def _blame(self, left: list[_Call], score: Score, *, begun: bool) -> None:
        """Fail the first unanswered call, which ended the process.

        If calls ran concurrently, or none was begun, no call is blamed: each is repeated alone.
        """
        if (self._is_async[left[0].function] and len(left) > 1) or not (begun or left[0].alone):
            _repeat_alone(left)
        else:
            self._answered(left[0], [score] * len(left[0].samples))

    def _put_back(self, judge: Judge[_Call], left: Sequence[_Call]) -> None:
        """Queue calls that their process did not reach for another process, or hold them for their judge."""
        for call in reversed(left):
            if call.done.is_set() or call in judge.held:
                continue
            if judge.outage is None or call.probe:
                self._waiting.appendleft(call)
            else:
                judge.held.insert(0, call)
        self._queue_changed.set()

    # ---- judges

    def troubles(self) -> list[Trouble]:
        """Return the troubles to report in the heartbeat."""
        found = self._failing.troubles()
        now = asyncio.get_running_loop().time()
        for term, judge in zip(self._terms, self._judges, strict=True):
            outage = judge.outage
            if outage is None:
                continue
            text = f"a judge does not answer, rewards wait for it: {outage.error}"
            over = judge.is_over_limit(now)
            if over:
                text = (
                    f"the judge of {term.function} has not answered for {judge.retry.limit_s:g} s "
                    f"(reward.retry.limit_s), the last of {outage.tries} tries: {outage.error}; mend it, then resume"
                )
            found.append(Trouble(TroubleKind.JUDGE, text[:TEXT_CHARS], over))
        return found

    def _answered(self, call: _Call, scores: list[Score]) -> None:
        """Finish `call`, or hold it until its judge answers again."""
        judge, probe = self._judges[call.function], call.probe
        call.probe = False
        refused = next((score for score in scores if score.kind == JUDGE), None)
        if refused is None and probe and any(score.kind == TIMEOUT for score in scores):
            refused = scores[0]  # late during the outage: no sign that the judge is back
        if refused is None:
            self._resume(call.function)
        elif self._refused(call, judge, refused, probe=probe):
            return
        self._failing.count(scores)
        call.finish(scores)

    def _refused(self, call: _Call, judge: Judge[_Call], score: Score, *, probe: bool) -> bool:
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
        """Hold the queued calls of `function`, too."""
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
        if call is None:  # no call is held: the next one will show whether the judge answers
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
        if all(each.outage is None for each in self._judges):
            self.reachable.set()

    async def _spawn_again(self) -> UserProcess:
        for attempt in range(START_ATTEMPTS):
            try:
                return await self._spawn()
            except RpcError:
                if attempt == START_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _spawn(self) -> UserProcess:
        stack = StackFile()
        process = await UserProcess.start(MODULE, (stack.descriptor,))
        process.stack = stack
        what = f"reward functions {', '.join(term.function for term in self._terms)}"
        ready = decoded(await process.ready(frame(self._setup, TO_PROCESS_BYTES), what), _READY)
        if ready.error:
            await process.end()
            raise RpcError(ErrorCode.BAD_REQUEST, ready.error)
        self._group, self._is_async, self._homes = ready.group, ready.is_async, ready.homes
        stack.belongs_to(ready.pid)
        self._fresh.add(process)
        return process


async def _all_done(calls: Sequence[_Call]) -> None:
    for call in calls:
        await call.done.wait()


def _encoded(name: str, calls: list[_Call]) -> tuple[list[_Call], list[_Call], bytes]:
    """Return the calls that fit into one Work, the remaining calls, and the encoded Work.

    Calls that are too large on their own fail here.
    """
    try:
        return calls, [], frame(Work(calls[0].function, [call.samples for call in calls]), TO_PROCESS_BYTES)
    except UNFIT:
        pass
    fit: list[_Call] = []
    for call in calls:
        try:
            frame(Work(call.function, [call.samples]), TO_PROCESS_BYTES)
        except UNFIT as error:
            call.finish([failed(name, ANSWER, f"the sample cannot be handed to a process: {error}")] * len(call.places))
        else:
            fit.append(call)
    # Only one call: together they may exceed the limit.
    return fit[:1], fit[1:], frame(Work(calls[0].function, [call.samples for call in fit[:1]]), TO_PROCESS_BYTES)


def _may_join(first: _Call, other: _Call) -> bool:
    taken_alone = other.alone or other.fresh or other.probe
    return other.function == first.function and not taken_alone and not other.done.is_set()


def _repeat_alone(calls: list[_Call]) -> None:
    for call in calls:
        call.alone = True


def _call_inline(function: RewardFunction, sample: Sample) -> Score:
    try:
        return totals(function.name, function.call(sample, **function.params), 1, group=False)[0]
    except Exception as error:
        return failed(function.name, RAISED, f"raised {type(error).__name__}: {error}")
