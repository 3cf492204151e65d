"""Decides whether an error in a reward function means that its judge is unavailable, and which of the calls that wait
for the judge to try again.

The functions have no clock and no timer. The module imports no HTTP library, and recognises the libraries' errors by
their names and attributes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.rollout.rewards.score import Score, failed
from services.rollout.user_code.frames import Asked, Rated, RateSamples, Returned
from services.rollout.user_code.trace import chain
from shared.sample import Sample

if TYPE_CHECKING:
    from services.rollout.user_code.host import Ended, UserHost
    from shared.topology.reward import RewardRetry

SERVER_ERROR, TOO_MANY = 500, 429
MOST_RETRY_AFTER_S = 86_400.0
MOST_REFUSALS = 5
"""Number of times that a judge may refuse one call while it answers others. After that, the sample fails, and no outage
begins."""
_SOCKET_MODULES = frozenset({"socket", "ssl"})
_AWAY_NAMES = ("ConnectionError", "ConnectError", "ConnectorError", "ServerDisconnectedError", "gaierror")
"""Suffixes of error class names that show, in any package, that a judge is unavailable."""
_CLIENTS = frozenset(
    {"aiohttp", "anthropic", "httpcore", "httpcore2", "httpx", "httpx2", "openai", "requests", "urllib3"}
)
_CLIENT_NAMES = ("Timeout", "TimeoutError", "TimeoutException", "NetworkError", "RemoteProtocolError")
"""Suffixes of error class names that show an unavailable judge only in the packages `_CLIENTS`. Elsewhere, such an
error may come from a program that the function runs."""


def unavailable(error: BaseException) -> float | None:
    """Return None if `error` is an error of the function itself. If it shows that the judge is unavailable, return the
    pause in seconds that the judge asks for (0.0 if it asks for none).

    A judge is unavailable if its connection is refused or reset, its name does not resolve, the HTTP client's own
    timeout expires, or the status is 429 with Retry-After, or at least 500. A timeout that the function sets itself
    (asyncio.timeout) does not mean that the judge is unavailable.
    """
    for cause in chain(error):
        status = _status(cause)
        if status is not None:
            after_s = _retry_after(cause)
            if status >= SERVER_ERROR or (status == TOO_MANY and after_s is not None):
                return after_s or 0.0
            return None  # the judge has answered
        if _is_away(cause):
            return 0.0
    return None


def _is_away(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return not isinstance(error, BrokenPipeError)  # more often caused by a program's pipe than by a judge
    if type(error) is TimeoutError:
        return _raised_in(error) in _SOCKET_MODULES
    for kind in type(error).__mro__:
        from_client = kind.__module__.partition(".")[0] in _CLIENTS
        if kind.__name__.endswith(_AWAY_NAMES) or (from_client and kind.__name__.endswith(_CLIENT_NAMES)):
            return True
    return False


def _raised_in(error: BaseException) -> str:
    """Return the module name of the innermost Python frame."""
    module, step = "", error.__traceback__
    while step is not None:
        module, step = str(step.tb_frame.f_globals.get("__name__", "")), step.tb_next
    return module


def _sources(error: BaseException) -> Iterator[Any]:
    """Yield an HTTP library's error, and its response if it has one."""
    with contextlib.suppress(Exception):  # an attribute may be a property that user code defines
        yield error
        response = getattr(error, "response", None)
        if response is not None:
            yield response


def _status(error: BaseException) -> int | None:
    for source in _sources(error):
        for name in ("status_code", "status"):
            value = getattr(source, name, None)
            if type(value) is int and 100 <= value < 600:
                return value
    return None


def _retry_after(error: BaseException) -> float | None:
    """Return the Retry-After header in seconds, or None if it is absent or contains a date."""
    for source in _sources(error):
        headers = getattr(source, "headers", None)
        for name in ("Retry-After", "retry-after"):
            with contextlib.suppress(Exception):
                seconds = float(headers[name])  # type: ignore[index]  # headers of any type
                if math.isfinite(seconds) and seconds >= 0:
                    return min(seconds, MOST_RETRY_AFTER_S)
    return None


@dataclass(eq=False)
class RewardCall:
    """One call of reward function number `function` for the samples at `places` in the block (`user_code.host.Work`).

    An `alone` call has a process of its own. A `probe` runs with no other call at the same time, to find out whether
    its judge is answering again. `broken` counts the processes that ended during the call.
    """

    function: int
    samples: list[Sample]
    places: list[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    alone: bool = False
    probe: bool = False
    broken: int = 0
    tries: int = 0
    """Number of times that the judge was asked and did not answer."""
    refusals: int = 0
    """Number of tries that failed although the judge had answered another call since the previous try."""
    answers: int = -1
    """`Judge.answers` at the last try; -1 before the first."""
    scores: list[Score] = field(default_factory=list)

    def finish(self, scores: list[Score]) -> None:
        self.scores = scores
        self.done.set()

    def scores_of(self, name: str, ended: Ended) -> list[Score]:
        """Return the scores of the samples, in order, from the end of the call. `name` is the function's import
        path."""
        if isinstance(ended, Rated):
            return ended.scores
        if isinstance(ended, Returned):
            raise TypeError("a reward function returned a workflow's message")
        score = failed(name, ended.kind, ended.why, at=ended.at, trace=ended.trace, retry_after_s=ended.retry_after_s)
        return [score] * len(self.samples)

    def begin(self, slot: int) -> RateSamples:
        return RateSamples(slot, self.function, self.samples)

    def asked(self, message: Asked, host: UserHost) -> None:
        """Do nothing: reward functions have nothing to ask for."""

    def end(self) -> None:
        """Do nothing."""


@dataclass
class Outage:
    """An outage of a judge. Times are in seconds on a monotonic clock; `error` is the last error, in one line."""

    began: float
    delay_s: float
    error: str
    tries: int = 1


@dataclass
class Judge:
    """The judge behind one reward function. During an outage, one call at a time is tried again."""

    retry: RewardRetry
    outage: Outage | None = None
    held: list[RewardCall] = field(default_factory=list)
    answers: int = 0
    """Number of calls answered so far."""

    def refused(self, call: RewardCall, error: str, now: float, *, after_s: float, probe: bool) -> bool:
        """Record that the judge did not answer `call`, and return whether the call is held until the judge answers
        again.

        If the call is held, and it was a `probe` or began the outage, the next probe is due in `outage.delay_s`. The
        call is not held if it has been refused `MOST_REFUSALS` times while the judge answered other calls, or if
        retries are off; the sample then fails.
        """
        call.tries += 1
        call.refusals += call.answers not in (-1, self.answers)
        call.answers = self.answers
        if call.refusals >= MOST_REFUSALS or not self.retry.limit_s:
            return False
        self.held.append(call)
        if self.outage is None:
            self.outage = Outage(now, max(self.retry.backoff_s, after_s), error)
        else:
            self.outage.error = error
            self.outage.tries += 1
            if probe:
                longer = min(2 * self.outage.delay_s, max(self.retry.max_backoff_s, self.retry.backoff_s))
                self.outage.delay_s = max(longer, after_s)
        return True

    def next_try(self) -> RewardCall | None:
        """Remove and return the held call with the fewest tries, or return None if no call is held."""
        if not self.held:
            return None
        call = min(self.held, key=lambda candidate: candidate.tries)
        self.held.remove(call)
        return call

    def answered(self) -> Sequence[RewardCall]:
        """Record that a call was answered, end the outage, and return the held calls in order."""
        self.answers += 1
        self.outage = None
        held, self.held = self.held, []
        return held

    def is_over_limit(self, now: float) -> bool:
        """Return whether the outage has lasted longer than `retry.limit_s`."""
        return self.outage is not None and now - self.outage.began > self.retry.limit_s
