"""The samples that clients have asked for. A request is journaled until its client reports that it has the result,
cancels it, or has left it for `KEEP_S`. A server that starts again samples again what is asked for, with the same seed
and so the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import structlog

from proto.messages import ErrorCode
from services.policy_trainer.sampling.request import SampledPrompt, SamplingRequest
from services.policy_trainer.sampling.sampler import Sampler as Engines
from services.policy_trainer.tinker import bodies
from services.policy_trainer.tinker.errors import BadRequest, Category
from services.policy_trainer.tinker.records import OpenSample
from services.policy_trainer.tinker.wire import ModelLimits, sample_response
from shared.rpc.errors import RpcError

CLONE = 10**9
"""The numbers of the samples of a clone of a sampling session begin at a multiple of this."""
KEEP_S = 600.0
"""Seconds for which the result of a sample is kept."""
MOST_SAMPLES = 1024
"""Maximum number of sequences in a request."""
MOST_LIKELIEST = 1 << 22
"""Maximum number of likeliest tokens in a result."""
_USER = (ErrorCode.BAD_REQUEST, ErrorCode.GONE)

Poll = tuple[str, str, int]
"""The samples that one client asks about at once, by key, sampling session and number of the clone."""


@dataclass(eq=False)
class Future:
    """A sample that was asked for, and its result."""

    sample: OpenSample
    restored: bool = False
    """Whether it was asked for in an earlier life of the server. It begins when its client asks for the result."""
    lost: bool = False
    """Whether the weights are gone since that life. The client must ask for it again."""
    task: asyncio.Task[None] | None = None
    payload: bytes = b""
    error: str = ""
    category: Category = Category.SERVER
    done: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)
    """When it was done, or else when this server first knew it."""
    cursor: int = 0

    @property
    def id(self) -> str:
        return self.sample.id

    @property
    def key(self) -> str:
        return self.sample.key

    @property
    def running(self) -> bool:
        """Whether the engines work on it."""
        return self.task is not None and not self.done.is_set()

    @property
    def poll(self) -> Poll:
        """Where its client learns that it is done."""
        sampler, _, number = self.id.rpartition("/")
        return self.key, sampler, int(number) // CLONE


class SampleFutures:
    """The samples of all clients, while the server lives."""

    def __init__(
        self,
        engines: Engines,
        write: Callable[[Iterable[OpenSample], Iterable[tuple[str, str]]], None],
        most: int,
    ) -> None:
        """`write` keeps and drops records in the journal. `most` is the maximum number of samples of a key on which the
        engines work."""
        self._engines = engines
        self._write = write
        self._most = most
        self._futures: dict[str, Future] = {}
        self._polls: dict[Poll, dict[str, Future]] = {}
        """The same futures."""
        self._cursor = int(time.time() * 1000)  # above those of an earlier life
        self._news = asyncio.Event()
        """Set, and replaced, when a sample is done."""
        self._log = structlog.get_logger("server")

    def restore(self, sample: OpenSample) -> None:
        """Record a sample of an earlier life."""
        self._add(Future(sample, restored=True))

    def submit(self, sample: OpenSample) -> Future:
        """Return the future of a sample, which begins unless it is there. Raises BadRequest(429)."""
        future = self._futures.get(sample.id)
        if future is None or future.lost:
            waiting = sum(1 for one in self._futures.values() if one.key == sample.key and one.running)
            if waiting >= self._most:
                text = f"the key has {waiting} open samples, and may have {self._most}; try again later"
                raise BadRequest(text, 429)
            self._write([sample], [])
            future = self._add(Future(sample))
        self._begin(future)
        return future

    async def result(self, key: str, name: str, wait_s: float) -> Future | None:
        """Return the future of a sample once it is done, or None if it is not within `wait_s`. Raises BadRequest(410)
        for one that must be asked for again."""
        future = self._futures.get(name)
        if future is None or future.key != key:
            raise BadRequest(f"sample {name[:200]!r}: is not there; ask for it again", 410)
        self._begin(future)
        try:
            await asyncio.wait_for(future.done.wait(), wait_s)
        except TimeoutError:
            return None
        if future.lost:
            raise BadRequest(f"sample {name[:200]!r}: its weights are gone; ask for it again", 410)
        return future

    async def completions(self, key: str, request: bodies.RetrieveFutures, wait_s: float) -> tuple[list[Future], int]:
        """Return the samples of a clone that were done after a cursor, once there is one or `wait_s` is over, and the
        new cursor."""
        poll = key, request.target.sampling_session_id, request.target.cloned_sampler_id
        own = self._polls.get(poll, {})
        self._drop([own[name] for name in set(request.retrieved_request_ids) & own.keys()])
        for future in own.values():
            self._begin(future)

        def fresh() -> list[Future]:
            done = (one for one in self._polls.get(poll, {}).values() if one.cursor > request.prev_cursor)
            return sorted(done, key=lambda one: one.cursor)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not fresh():
                    await self._news.wait()
        done = fresh()
        return done, max((future.cursor for future in done), default=request.prev_cursor)

    def cancel(self, key: str, name: str) -> None:
        """Stop a sample, whose rows in the engine become free."""
        future = self._futures.get(name)
        if future is None or future.key != key:
            return
        if future.task is None:
            self._drop([future])
        else:
            self._write([], [("sample", name)])
            future.task.cancel()

    def sweep(self) -> None:
        """Forget results that were kept long enough."""
        old = time.monotonic() - KEEP_S
        self._drop([one for one in self._futures.values() if one.since < old and not one.running])

    async def close(self) -> None:
        """Stop all samples. The journal keeps them for a server that continues this run."""
        tasks = [future.task for future in self._futures.values() if future.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, future: Future) -> None:
        """Sample, unless it was begun."""
        if future.task is None:
            future.task = asyncio.create_task(self._sample(future, future.sample.request))
            future.task.add_done_callback(lambda task: self._end(future, task))

    def _add(self, future: Future) -> Future:
        self._futures[future.id] = self._polls.setdefault(future.poll, {})[future.id] = future
        return future

    def _drop(self, futures: list[Future]) -> None:
        if futures:
            self._write([], [("sample", future.id) for future in futures])
        for future in futures:
            del self._futures[future.id]
            del self._polls[future.poll][future.id]
            if not self._polls[future.poll]:
                del self._polls[future.poll]
            if future.running and future.task is not None:
                future.task.cancel()

    async def _sample(self, future: Future, request: SamplingRequest) -> None:
        try:
            result = await self._sampled(request)
            sparse = future.sample.sparse_targets
            future.payload = sample_response(result, request.targets, sparse=sparse)
        except RpcError as error:
            future.error = str(error)
            future.category = Category.USER if error.code in _USER else Category.SERVER
            future.lost = future.restored and error.code == ErrorCode.GONE

    def _end(self, future: Future, task: asyncio.Task[None]) -> None:
        """Tell those who wait that a sample is done."""
        if task.cancelled():
            future.error, future.category = "cancelled", Category.USER
        elif (error := task.exception()) is not None:
            future.error = f"{type(error).__name__}: {error}"
            self._log.error("sample failed", sample=future.id, exc_info=error)
        self._cursor += 1
        future.cursor, future.since = self._cursor, time.monotonic()
        future.done.set()
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


def check_sample(body: bodies.SampleBody, limits: ModelLimits) -> None:
    """Check that a sample asks for what the engines compute. Raises BadRequest."""
    if body.prompt_alt_tokens_k:
        raise BadRequest("prompt_alt_tokens_k: is not computed here; leave it out")
    if body.prompt_logprobs_last_n is not None:
        raise BadRequest("prompt_logprobs_last_n: is not read here; leave it out, and use the last N of the result")
    if body.record_stability_info:
        raise BadRequest(
            "record_stability_info: serves the loss stable_reinforce, which is not computed here; use another, such as "
            "loss_fn=importance_sampling"
        )
    if not 1 <= body.num_samples <= MOST_SAMPLES:
        raise BadRequest(f"num_samples: {body.num_samples} is out of range: from 1 to {MOST_SAMPLES}")
    likeliest = body.topk_sample_logprobs * body.num_samples * (body.sampling_params.max_tokens or limits.context)
    if likeliest > MOST_LIKELIEST:
        text = f"topk_sample_logprobs: {likeliest} tokens in all samples, and at most {MOST_LIKELIEST} are possible"
        raise BadRequest(f"{text}; ask for fewer, or for fewer samples or tokens")


def stops(stop: str | list[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Return the stop texts, the stop tokens, and whether the model's own end tokens stop a sample, too."""
    if stop is None:
        return (), (), True
    parts = [stop] if isinstance(stop, str) else stop
    texts = tuple(part for part in parts if isinstance(part, str))
    return texts, tuple(part for part in parts if not isinstance(part, str)), False


def token_array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(tokens, np.int32)
