"""Whether an error of a reward function means that the judge behind it does not answer, and when to ask that again.
Pure: no clock, no timer. Must never import a user's HTTP library: its errors are known by their names and attributes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from services.rollout.user_trace import chain

SERVER_ERROR, TOO_MANY = 500, 429
MOST_RETRY_AFTER_S = 86_400.0
MOST_REFUSALS = 5
"""Times that a judge may refuse one call while it answers others; then that sample is lost, and no judge is out."""
_SOCKET_MODULES = frozenset({"socket", "ssl"})
_AWAY_NAMES = ("ConnectionError", "ConnectError", "ConnectorError", "ServerDisconnectedError", "gaierror")
"""Endings of class names, wherever the class is from."""
_CLIENTS = frozenset(
    {"aiohttp", "anthropic", "httpcore", "httpcore2", "httpx", "httpx2", "openai", "requests", "urllib3"}
)
_CLIENT_NAMES = ("Timeout", "TimeoutError", "TimeoutException", "NetworkError", "RemoteProtocolError")
"""Endings of class names of these packages only: a program that is run may well time out too."""


class Retry(Protocol):
    """Section `reward.retry` of the topology, in seconds."""

    @property
    def limit_s(self) -> float: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def max_backoff_s(self) -> float: ...


def unavailable(error: BaseException) -> float | None:
    """None when `error` is the function's own; else the judge does not answer: seconds that it asks to be left alone.

    A judge does not answer when its connection is refused or reset, its name does not resolve, the HTTP client's own
    timeout ends, or the status is 429 with Retry-After, or 500 and above. A timeout that the function sets itself
    (asyncio.timeout) says nothing of a judge.
    """
    for each in chain(error):
        status = _status(each)
        if status is not None:
            after_s = _retry_after(each)
            if status >= SERVER_ERROR or (status == TOO_MANY and after_s is not None):
                return after_s or 0.0
            return None  # it has answered
        if _is_away(each):
            return 0.0
    return None


def _is_away(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return not isinstance(error, BrokenPipeError)  # a pipe to a program, more often than a judge
    if type(error) is TimeoutError:
        return _raised_in(error) in _SOCKET_MODULES
    for kind in type(error).__mro__:
        from_client = kind.__module__.partition(".")[0] in _CLIENTS
        if kind.__name__.endswith(_AWAY_NAMES) or (from_client and kind.__name__.endswith(_CLIENT_NAMES)):
            return True
    return False


def _raised_in(error: BaseException) -> str:
    """The module of the innermost line of Python."""
    found, step = "", error.__traceback__
    while step is not None:
        found, step = str(step.tb_frame.f_globals.get("__name__", "")), step.tb_next
    return found


def _sources(error: BaseException) -> Iterator[Any]:
    """An error of an HTTP library and the response that it may hold."""
    with contextlib.suppress(Exception):  # an attribute may be a property of the user's
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
    """Seconds; None without the header, or with a date in it."""
    for source in _sources(error):
        headers = getattr(source, "headers", None)
        for name in ("Retry-After", "retry-after"):
            with contextlib.suppress(Exception):
                seconds = float(headers[name])  # type: ignore[index]  # whatever the library has
                if math.isfinite(seconds) and seconds >= 0:
                    return min(seconds, MOST_RETRY_AFTER_S)
    return None


class Held(Protocol):
    """A call that waits for its judge."""

    tries: int
    """Times that the judge was asked and did not answer."""
    refusals: int
    """Those of them between which it answered other calls."""
    answers: int
    """`Judge.answers` at the last of them; -1 before the first."""


C = TypeVar("C", bound=Held)


@dataclass
class Outage:
    """Times by any steady clock, in seconds. `error`: what the judge was last refused with, one line."""

    began: float
    delay_s: float
    error: str
    tries: int = 1


@dataclass
class Judge(Generic[C]):
    """What stands behind one reward function. While there is an outage one call at a time is tried again."""

    retry: Retry
    outage: Outage | None = None
    held: list[C] = field(default_factory=list)
    answers: int = 0
    """Calls answered so far."""

    def refused(self, call: C, error: str, now: float, *, after_s: float, probe: bool) -> bool:
        """The judge did not answer `call`. True: the call is held, try one again in `outage.delay_s`, if `probe` (or
        the outage begins with it); False: it answers others, and the sample is lost."""
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

    def next_try(self) -> C | None:
        """Take the call to ask again with: the one that was tried least."""
        if not self.held:
            return None
        call = min(self.held, key=lambda each: each.tries)
        self.held.remove(call)
        return call

    def answered(self) -> Sequence[C]:
        """It has answered a call: returns those that waited, in order, and the outage is over."""
        self.answers += 1
        self.outage = None
        held, self.held = self.held, []
        return held

    def is_over_limit(self, now: float) -> bool:
        """Whether it has been out for longer than it may be."""
        return self.outage is not None and now - self.outage.began > self.retry.limit_s
