"""The samples that clients have asked for. They are not journaled: if the server dies, the SDK asks again, and the seed
of a sample follows from its sampling session and its number, so that it gets the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import structlog

from proto.messages import ErrorCode
from services.policy_trainer.sampling.request import SampledPrompt, SamplingRequest
from services.policy_trainer.sampling.sampler import Sampler as Engines
from services.policy_trainer.tinker import bodies
from services.policy_trainer.tinker.errors import BadRequest, Category
from services.policy_trainer.tinker.records import OpenSample
from services.policy_trainer.tinker.wire import ModelLimits, WireSequence, sample_response
from shared.rpc.errors import RpcError

CLONE = 10**9
"""The numbers of the samples of a clone of a sampling session begin at a multiple of this."""
KEEP_S = 600.0
"""Seconds for which the result of a sample is kept."""
MOST_SAMPLES = 1024
"""Maximum number of sequences in a request."""
_USER = (ErrorCode.BAD_REQUEST, ErrorCode.GONE)


@dataclass(eq=False)
class Future:
    """A sample that was asked for, and its result."""

    id: str
    key: str
    sampler: str
    clone: int
    task: asyncio.Task[None] | None = None
    payload: bytes = b""
    error: str = ""
    category: Category = Category.SERVER
    done: asyncio.Event = field(default_factory=asyncio.Event)
    done_at: float = 0.0
    cursor: int = 0
    died: bool = False
    """Whether it was lost with an earlier life of the server."""


class SampleFutures:
    """The samples of all clients, while the server lives."""

    def __init__(
        self, engines: Engines, remember: Callable[[OpenSample], None], forget: Callable[[str], None], most: int
    ) -> None:
        """`remember` and `forget` journal which samples are not done. `most` is the maximum number of those, by key."""
        self._engines = engines
        self._remember, self._forget = remember, forget
        self._most = most
        self._futures: dict[str, Future] = {}
        self._gone: dict[str, OpenSample] = {}
        """The samples that died with an earlier life."""
        self._cursor = int(time.time() * 1000)  # above those of an earlier life
        self._news = asyncio.Event()
        """Set, and replaced, when a sample is done."""
        self._closing = False
        self._log = structlog.get_logger("server")

    def restore(self, sample: OpenSample) -> None:
        """Record a sample that was not done when an earlier life ended."""
        self._gone[sample.id] = sample

    def submit(self, key: str, name: str, request: SamplingRequest) -> Future:
        """Return the future of a sample, which begins unless it is there. Raises BadRequest(429)."""
        sampler, _, number = name.rpartition("/")
        if (known := self._futures.get(name)) is not None and known.key == key:
            return known
        waiting = sum(1 for future in self._futures.values() if future.key == key and not future.done.is_set())
        if waiting >= self._most:
            raise BadRequest(f"the key has {waiting} open samples, and may have {self._most}; try again later", 429)
        future = self._futures[name] = Future(name, key, sampler, int(number) // CLONE)
        if self._gone.pop(name, None) is None:
            self._remember(OpenSample(id=name, key=key))
        future.task = asyncio.create_task(self._sample(future, request))
        future.task.add_done_callback(lambda task: self._end(future, task))
        return future

    async def result(self, key: str, name: str, wait_s: float) -> Future | None:
        """Return the future of a sample once it is done, or None if it is not within `wait_s`. Raises BadRequest(410)
        for one that must be asked for again."""
        future = self._futures.get(name)
        if future is not None and future.key == key and future.died:
            del self._futures[name]  # so that it can be asked for again
            future = None
        if future is None or future.key != key:
            raise BadRequest(f"sample {name[:200]!r}: is not there; ask for it again", 410)
        try:
            await asyncio.wait_for(future.done.wait(), wait_s)
        except TimeoutError:
            return None
        return future

    async def completions(self, key: str, request: bodies.RetrieveFutures, wait_s: float) -> tuple[list[Future], int]:
        """Return the samples of a clone that were done after a cursor, once there is one or `wait_s` is over, and the
        new cursor."""
        for name in request.retrieved_request_ids:
            self._drop(key, name)
        target = request.target

        def fresh() -> list[Future]:
            own = (future for future in self._futures.values() if future.sampler == target.sampling_session_id)
            clones = (future for future in own if future.key == key and future.clone == target.cloned_sampler_id)
            return sorted((one for one in clones if one.cursor > request.prev_cursor), key=lambda one: one.cursor)

        self._bury(key, target)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not fresh():
                    await self._news.wait()
        done = fresh()
        return done, max((future.cursor for future in done), default=request.prev_cursor)

    def cancel(self, key: str, name: str) -> None:
        """Stop a sample, whose rows in the engine become free."""
        future = self._futures.get(name)
        if future is not None and future.key == key and future.task is not None:
            future.task.cancel()

    def sweep(self) -> None:
        """Forget results that were kept long enough."""
        old = time.monotonic() - KEEP_S
        for name in [name for name, one in self._futures.items() if one.done.is_set() and one.done_at < old]:
            del self._futures[name]

    async def close(self) -> None:
        """Stop all samples. They count as not done, so that the next life asks for them again."""
        self._closing = True
        tasks = [future.task for future in self._futures.values() if future.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _bury(self, key: str, target: bodies.FuturesTarget) -> None:
        """Report the samples that died with an earlier life as failed, so that the client asks for them again."""
        for name, sample in list(self._gone.items()):
            sampler, _, number = name.rpartition("/")
            clone = int(number) // CLONE
            if (sampler, clone, sample.key) == (target.sampling_session_id, target.cloned_sampler_id, key):
                del self._gone[name]
                self._cursor += 1
                dead = Future(name, key, sampler, clone, died=True, cursor=self._cursor, done_at=time.monotonic())
                dead.done.set()
                self._futures[name] = dead
                self._forget(name)

    def _drop(self, key: str, name: str) -> None:
        future = self._futures.get(name)
        if future is not None and future.key == key and future.done.is_set():
            del self._futures[name]

    async def _sample(self, future: Future, request: SamplingRequest) -> None:
        try:
            future.payload = payload(await self._sampled(request))
        except RpcError as error:
            future.error = str(error)
            future.category = Category.USER if error.code in _USER else Category.SERVER

    def _end(self, future: Future, task: asyncio.Task[None]) -> None:
        """Tell those who wait that a sample is done."""
        if task.cancelled():
            future.error, future.category = "cancelled", Category.USER
        elif (error := task.exception()) is not None:
            future.error = f"{type(error).__name__}: {error}"
            self._log.error("sample failed", sample=future.id, exc_info=error)
        self._cursor += 1
        future.cursor, future.done_at = self._cursor, time.monotonic()
        future.done.set()
        if not self._closing:
            self._forget(future.id)
        self._news.set()
        self._news = asyncio.Event()

    async def _sampled(self, request: SamplingRequest) -> SampledPrompt:
        """Return what the engines have sampled. If their queues are full, wait for them."""
        while True:
            try:
                return await self._engines.sample(request)
            except RpcError as error:
                if error.code != ErrorCode.BUSY:
                    raise
                await asyncio.sleep(error.retry_after_s or 0.5)  # as the engine says


def payload(result: SampledPrompt) -> bytes:
    """Return a result as the client gets it."""
    sequences = [WireSequence(one.token_ids, one.logprobs, stopped=one.reason == "stop") for one in result.sequences]
    topk = None
    if result.top_ids is not None and result.top_logprobs is not None:
        topk = result.top_ids, result.top_logprobs
    return sample_response(sequences, result.prompt_logprobs, topk)


def prompt_of(prompt: bodies.PromptBody, limits: ModelLimits) -> list[int]:
    """Return the tokens of a prompt. Raises BadRequest."""
    for chunk in prompt.chunks:
        if chunk.type not in (None, "encoded_text"):
            raise BadRequest(f"prompt: a chunk of type {str(chunk.type)[:40]!r}; the model reads encoded_text only")
    tokens = [token for chunk in prompt.chunks for token in chunk.tokens]
    if not 1 <= len(tokens) <= limits.context:
        raise BadRequest(f"prompt: {len(tokens)} tokens; a prompt has from 1 to {limits.context}")
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        bad = min(tokens) if min(tokens) < 0 else max(tokens)
        raise BadRequest(f"prompt: token {bad} is not in the vocabulary of {limits.vocabulary}")
    return tokens


_UNSERVED = ("topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs", "prompt_logprobs_last_n")


def check_sample(body: bodies.SampleBody) -> None:
    """Check that a sample asks for what the engines compute. Raises BadRequest."""
    for name in _UNSERVED:
        if getattr(body, name):
            raise BadRequest(f"{name}: is not computed here; leave it out")
    if body.record_stability_info:
        raise BadRequest(
            "record_stability_info: serves the loss stable_reinforce, which is not computed here; use another, such as "
            "loss_fn=importance_sampling"
        )
    if not 1 <= body.num_samples <= MOST_SAMPLES:
        raise BadRequest(f"num_samples: {body.num_samples} is out of range: from 1 to {MOST_SAMPLES}")


def stops(stop: str | list[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Return the stop texts, the stop tokens, and whether the model's own end tokens stop a sample, too."""
    if stop is None:
        return (), (), True
    parts = [stop] if isinstance(stop, str) else stop
    texts = tuple(part for part in parts if isinstance(part, str))
    return texts, tuple(part for part in parts if not isinstance(part, str)), False


def token_array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(tokens, np.int32)
