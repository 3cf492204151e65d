"""Decides which engine gets each request to sample. The module is pure: `handle(event, now) -> effects`.

Among the engines whose load is close to the lowest, the one that has sampled with the longest part of the prompt gets
the request, because it may still have the keys and values of that part; then one that holds the version.

A request whose engine dies goes to another one. It ends with an error if engines died of it repeatedly, if no engine is
there for `PATIENCE_S`, or if every engine refused it for lack of room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from proto.messages import ErrorCode
from proto.tensors import Array

PATIENCE_S = 60.0
"""Maximum seconds for which a request waits while no engine is there, not even one that is starting."""
SILENT_S = 10.0
"""Seconds without a sign of life after which an engine counts as dead."""
MAX_DEATHS = 2
"""Number of engines that may die while they have a request, before it ends with an error."""
SLACK = 32
"""Number of samples by which the load of an engine may exceed the lowest, and still be chosen for its prefixes."""
BLOCK = 64
"""Number of tokens by which prefixes are compared."""
MAX_BLOCKS = 8192
"""Maximum number of blocks of prompts that are remembered for an engine."""
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class SampleAsked:
    """A new request for `samples` samples. `blocks` are those of its prompt (`blocks_of`)."""

    request: int
    version: str
    samples: int
    blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """The request has its result, or needs none."""

    request: int


@dataclass(frozen=True, slots=True)
class EngineFull:
    """The request's engine had no room for it."""

    request: int
    why: str


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """The request's engine cannot do it: it `died` of a defect, or it is starting or ending."""

    request: int
    died: bool = False


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """An engine has answered. It takes requests if it `is_ready`."""

    engine: int
    incarnation: int
    is_ready: bool


@dataclass(frozen=True, slots=True)
class RouterTick:
    """Time has passed."""


RouterEvent = SampleAsked | SampleEnded | EngineFull | EngineLeft | EngineSeen | RouterTick


@dataclass(frozen=True, slots=True)
class SendSample:
    """Send the request to this engine."""

    request: int
    engine: int


@dataclass(frozen=True, slots=True)
class RecallSample:
    """Abandon the call of this request to this engine, whose answer no longer counts."""

    request: int
    engine: int


@dataclass(frozen=True, slots=True)
class FailSample:
    """End the request with this error."""

    request: int
    code: ErrorCode
    why: str
    retry_after_s: float = 0.0


RouterEffect = SendSample | RecallSample | FailSample


@dataclass
class _Engine:
    """`seen` is the time of its last sign of life; `load` is its number of open samples."""

    incarnation: int = 0
    is_ready: bool = False
    seen: float = 0.0
    load: int = 0
    versions: set[str] = field(default_factory=set)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks the engine has seen, from the first on."""
        for number, block in enumerate(blocks):
            if block not in self.blocks:
                return number
        return len(blocks)

    def remember(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > MAX_BLOCKS:
            self.blocks.popitem(last=False)


@dataclass
class _OpenRequest:
    """A request. `engine` is None while it waits for one; `since` is when it began to wait."""

    asked: SampleAsked
    since: float
    engine: int | None = None
    refused: dict[int, str] = field(default_factory=dict)
    """Why engines had no room for it, by engine."""
    deaths: int = 0


class Router:
    """The engines and the open requests."""

    def __init__(self, engines: int) -> None:
        self._engines = {number: _Engine() for number in range(engines)}
        self._open: dict[int, _OpenRequest] = {}

    @property
    def open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def ready(self) -> list[int]:
        """The engines that take requests, those with the lowest load first."""
        ready = [number for number, engine in self._engines.items() if engine.is_ready]
        return sorted(ready, key=lambda number: self._engines[number].load)

    def handle(self, event: RouterEvent, now: float) -> list[RouterEffect]:
        """Return what to do after an event. Events of requests that are not open are ignored."""
        match event:
            case SampleAsked():
                self._open[event.request] = _OpenRequest(event, now)
                return self._place(event.request, now)
            case EngineSeen():
                return self._seen(event, now)
            case RouterTick():
                return self._tick(now)
            case SampleEnded() | EngineFull() | EngineLeft():
                return self._back(event, now) if event.request in self._open else []

    def _back(self, event: SampleEnded | EngineFull | EngineLeft, now: float) -> list[RouterEffect]:
        """Handle a request that its engine has no longer, or that is no longer needed."""
        request = self._open[event.request]
        engine = request.engine
        self._take_back(request)
        match event:
            case SampleEnded():
                del self._open[event.request]
                return []
            case EngineFull():
                if engine is not None:
                    request.refused[engine] = event.why
            case EngineLeft():
                request.deaths += event.died
                if engine is not None:
                    self._engines[engine].is_ready = False  # until it is seen again
        request.since = now
        return self._place(event.request, now)

    def _seen(self, event: EngineSeen, now: float) -> list[RouterEffect]:
        engine = self._engines.setdefault(event.engine, _Engine())
        is_other = engine.incarnation not in (0, event.incarnation)
        effects = self._left(event.engine, now, died=True) if is_other else []
        engine = self._engines[event.engine]
        engine.incarnation, engine.is_ready, engine.seen = event.incarnation, event.is_ready, now
        return effects + self._place_waiting(now)

    def _tick(self, now: float) -> list[RouterEffect]:
        effects: list[RouterEffect] = []
        for number, engine in list(self._engines.items()):
            if engine.incarnation and now - engine.seen > SILENT_S:
                effects += self._left(number, now, died=False)
        return effects + self._place_waiting(now)

    def _left(self, number: int, now: float, *, died: bool) -> list[RouterEffect]:
        """Forget what an engine held, and find other engines for its requests. A silent engine may just be slow, so it
        does not count as one that `died` of them."""
        self._engines[number] = _Engine()
        effects: list[RouterEffect] = []
        for request, opened in list(self._open.items()):
            opened.refused.pop(number, None)
            if opened.engine == number:
                opened.engine, opened.since = None, now
                opened.deaths += died
                effects += [RecallSample(request, number), *self._place(request, now)]
        return effects

    def _place_waiting(self, now: float) -> list[RouterEffect]:
        waiting = [request for request, opened in self._open.items() if opened.engine is None]
        return [effect for request in waiting for effect in self._place(request, now)]

    def _place(self, request: int, now: float) -> list[RouterEffect]:
        """Send a request to an engine, let it wait for one, or end it."""
        opened, ready = self._open[request], self.ready
        if opened.deaths > MAX_DEATHS:
            return self._end(request, ErrorCode.LOST, f"{opened.deaths} engines died while they sampled this request")
        if not ready:
            if now - opened.since < PATIENCE_S or any(engine.incarnation for engine in self._engines.values()):
                return []
            return self._end(request, ErrorCode.LOST, f"no engine was there for {PATIENCE_S:g} s (ctl status)")
        left = [number for number in ready if number not in opened.refused]
        if not left:
            return self._end(request, ErrorCode.BUSY, "; ".join(opened.refused.values()), RETRY_S)
        least = self._engines[left[0]].load
        close = [number for number in left if self._engines[number].load <= least + SLACK]

        def worth(number: int) -> tuple[int, bool, int]:
            engine = self._engines[number]
            return engine.match(opened.asked.blocks), opened.asked.version in engine.versions, -engine.load

        number = max(close, key=worth)
        engine = self._engines[number]
        opened.engine = number
        engine.load += opened.asked.samples
        engine.versions.add(opened.asked.version)
        engine.remember(opened.asked.blocks)
        return [SendSample(request, number)]

    def _take_back(self, opened: _OpenRequest) -> None:
        if opened.engine is not None:
            self._engines[opened.engine].load -= opened.asked.samples
            opened.engine = None

    def _end(self, request: int, code: ErrorCode, why: str, retry_after_s: float = 0.0) -> list[RouterEffect]:
        del self._open[request]
        return [FailSample(request, code, why, retry_after_s)]


def blocks_of(version: str, token_ids: Array) -> list[int]:
    """Return a digest of each whole block of a prompt with all tokens before it, for one version."""
    digest = xxhash.xxh3_64_intdigest(version.encode())
    blocks = []
    for begin in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(token_ids[begin : begin + BLOCK]).data, digest)
        blocks.append(digest)
    return blocks
