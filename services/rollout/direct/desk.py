"""Answers a server's requests to an engine: to load versions, to sample with them, and to turn text into tokens.

Samples of all requests and versions are computed side by side. The number of open samples is bounded; a request beyond
the bound is refused at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import numpy as np

from proto.messages import (
    Ack,
    CancelSampling,
    ErrorCode,
    LoadVersion,
    Parcel,
    RenderedPrompt,
    RenderPrompt,
    SampledTokens,
    SampleTokens,
    UnloadVersion,
)
from proto.registry import Message
from proto.tensors import Array
from services.rollout.direct.gate import ScoreGate
from services.rollout.direct.named import BUSY_S, HeldWeights, NamedVersions
from services.rollout.engine import (
    Engine,
    Generation,
    GenerationCancelled,
    Prompt,
    PromptScores,
    SamplingParams,
    no_targets,
)
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.weights.source import Emit
from shared.parcel import Parcels
from shared.rpc.errors import RpcError

OPEN_SAMPLES = 2048
"""Maximum number of open samples. A single request may have more of them than are left, if no other one is open."""
MAX_SAMPLES = 1024
REPORT_S = 1.0
MAX_TOP = 20
"""Maximum number of likeliest tokens at a place, and the most that vLLM returns."""
MAX_STOPS, MAX_STOP_IDS = 16, 64
MAX_STOP_BYTES = 256
DirectRequest = LoadVersion | UnloadVersion | SampleTokens | CancelSampling | RenderPrompt
_INT32 = np.dtype(np.int32)
T = TypeVar("T")


class SampleDesk:
    """Samples for a server. It is used only on the service's loop."""

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        versions: NamedVersions,
        gate: ScoreGate,
        prompts: PromptBuilder,
        parcels: Parcels,
        on_text: Callable[[Callable[[], object]], Awaitable[object]],
        emit: Emit,
        hang_s: float,
    ) -> None:
        """`name` is the service's, for errors. `gate` is that of the engine. `on_text` runs work on the tokenizer's
        thread; `emit(topic, values)` sends telemetry. An engine that makes no progress for `hang_s` has hung."""
        self._name = name
        self._engine = engine
        self._versions = versions
        self._gate = gate
        self._prompts = prompts
        self._parcels = parcels
        self._on_text = on_text
        self._emit = emit
        self._hang_s = hang_s
        self._calls = 0
        """Number of calls that the engine is computing."""
        self._open: dict[str, threading.Event] = {}
        """The events that abandon the open requests, by name."""
        self.samples = 0
        """Number of open samples."""

    async def answer(self, request: DirectRequest) -> Message:
        """Return the reply to a request."""
        match request:
            case LoadVersion():
                await self._versions.load(request.weights)
            case UnloadVersion():
                self._versions.unload((request.task_id, request.fence))
            case SampleTokens():
                return await self._sample(request)
            case CancelSampling():
                if request.name in self._open:
                    self._open[request.name].set()
            case RenderPrompt():
                return await self._render(request)
        return Ack()

    async def run(self) -> None:
        """Report what the engine does until cancelled. Raises the error after which the engine must not sample, such as
        that it has hung."""
        reported: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        progress, since = self._engine.progress, clock()
        while not self._versions.failed.done():
            if not self._calls or self._engine.progress != progress:
                progress, since = self._engine.progress, clock()
            elif clock() - since > self._hang_s:
                text = f"{self._name}: the engine made no progress for {self._hang_s:g} s (lease.lease_s)"
                self._versions.fail(RpcError(ErrorCode.INTERNAL, text))
            if (stats := self._engine.stats()) != reported:
                reported = stats
                self._emit("engine", {**stats, "open_samples": self.samples, "versions": len(self._versions)})
            await asyncio.wait({self._versions.failed}, timeout=REPORT_S)
        self._versions.failed.result()

    async def _sample(self, request: SampleTokens) -> SampledTokens:
        check_request(request)
        if self.samples and self.samples + request.samples > OPEN_SAMPLES:
            raise RpcError(
                ErrorCode.BUSY,
                f"{self._name}: {self.samples} samples are open, and {request.samples} more exceed {OPEN_SAMPLES}",
                retry_after_s=BUSY_S,
            )
        cancel = self._open[request.name] = threading.Event()
        self.samples += request.samples
        try:
            with self._versions.using((request.task_id, request.fence)) as held:
                return await self._sampled(request, held, cancel)
        except GenerationCancelled:
            raise RpcError(ErrorCode.LOST, f"{self._name}: request {request.name} was abandoned") from None
        finally:
            self.samples -= request.samples
            self._open.pop(request.name, None)

    async def _sampled(self, request: SampleTokens, held: HeldWeights, cancel: threading.Event) -> SampledTokens:
        given = await self._parcels.unpack(request.prompt)
        prompt = given.get("token_ids", np.zeros(0, _INT32))
        limit = self._check_prompt(prompt, request)
        targets = given.get("targets", no_targets(prompt))
        self._check_targets(targets, len(prompt))
        arrays: dict[str, Array] = {}
        if request.prompt_logprobs or request.top_prompt_logprobs or "targets" in given:
            scores = await self._scores(prompt, held.swaps, request.top_prompt_logprobs, targets)
            if request.prompt_logprobs:
                arrays["prompt_logprobs"] = scores.logprobs
            if request.top_prompt_logprobs:
                arrays |= {"top_ids": scores.top_ids, "top_logprobs": scores.top_logprobs}
            if "targets" in given:
                arrays["target_logprobs"] = scores.target_logprobs
        sampling = SamplingParams(
            samples=request.samples,
            temperature=request.temperature,
            max_new_tokens=limit,
            seed=request.seed,
            stop=tuple(request.stop),
            swaps=held.swaps,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_ids=tuple(request.stop_ids),
            ends=request.ends,
            seeded=True,
        )
        async with self._gate.beside():
            try:
                prompts = [Prompt("", prompt.tolist())]
                (group,) = await self._computed(self._engine.generate(prompts, sampling, cancel))
            except BaseException:
                cancel.set()  # the rows of a caller that no longer waits are freed
                raise
        arrays |= _joined(group, held)
        if request.top_logprobs:
            arrays |= await self._sample_tops(prompt, group, held.swaps, request.top_logprobs, cancel)
        texts: list[str] = []
        if request.texts:
            ids, stop = [each.token_ids.tolist() for each in group], tuple(request.stop)
            texts = await self._text(lambda: [self._prompts.completion(each, stop) for each in ids])
        parcel = await self._packed(arrays)
        return SampledTokens(parcel=parcel, reasons=[str(each.finish_reason) for each in group], texts=texts)

    async def _packed(self, arrays: dict[str, Array]) -> Parcel:
        """Return the parcel of a result. Raises RpcError(internal), after which no one samples again, if the store has
        no room for it."""
        try:
            return await self._parcels.pack(arrays)
        except RpcError as error:
            if error.code != ErrorCode.BUSY:
                raise
            size = sum(array.nbytes for array in arrays.values()) >> 20
            text = f"{self._name}: the store has no room for a result of {size} MiB"
            raise RpcError(
                ErrorCode.INTERNAL, f"{text}; ask for less at a time, or raise services.batch-store.memory"
            ) from None

    async def _computed(self, work: Awaitable[T]) -> T:
        """Return the engine's result. After a defect, the service ends, and another engine may take over the request.

        Raises RpcError(lost) after a defect.
        """
        self._calls += 1
        try:
            return await work
        except (GenerationCancelled, RpcError):
            raise
        except Exception as error:
            self._versions.fail(error)
            text = f"{self._name}: the engine failed: {type(error).__name__}: {error}"
            raise RpcError(ErrorCode.LOST, text[:500]) from error
        finally:
            self._calls -= 1

    async def _scores(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        if len(token_ids) > 1:
            async with self._gate.alone():
                return await self._computed(self._engine.score_prompt(token_ids, swaps, top, targets))
        nothing = np.zeros((0, top), np.float32)
        return PromptScores(nothing.reshape(0), nothing.astype(_INT32), nothing, np.zeros(targets.shape, np.float32))

    async def _sample_tops(
        self, prompt: Array, group: list[Generation], swaps: int, top: int, cancel: threading.Event
    ) -> dict[str, Array]:
        """Return the likeliest tokens at the places of the sampled ones, from a pass over each whole sample."""
        scores = []
        for sample in group:
            if cancel.is_set():
                raise GenerationCancelled
            whole = np.concatenate([prompt, sample.token_ids])
            scores.append(await self._scores(whole, swaps, top, no_targets(whole)))
        return {
            "sample_top_ids": np.concatenate([each.top_ids[len(prompt) - 1 :] for each in scores]),
            "sample_top_logprobs": np.concatenate([each.top_logprobs[len(prompt) - 1 :] for each in scores]),
        }

    def _check_prompt(self, prompt: Array, request: SampleTokens) -> int:
        """Return the maximum number of tokens of a sample. Raises RpcError(bad_request)."""
        max_tokens = request.max_tokens
        if prompt.ndim != 1 or prompt.dtype != _INT32 or not len(prompt):
            raise _refused("prompt: must be int32 [T] with T above 0")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._engine.vocab_size:
            worst = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
            raise _refused(f"prompt: token {worst} is not in the vocabulary of {self._engine.vocab_size}")
        room = self._engine.context_tokens - len(prompt)
        room -= bool(request.top_logprobs)  # vLLM scores a sequence only if one more token fits
        if room < max(1, max_tokens):
            raise _refused(
                f"prompt of {len(prompt)} tokens and max_tokens {max(1, max_tokens)}: the model's context has "
                f"{self._engine.context_tokens}"
            )
        return max_tokens or room

    def _check_targets(self, targets: Array, length: int) -> None:
        """Raise RpcError(bad_request) if `targets` do not fit a prompt of this length."""
        if targets.ndim != 2 or targets.dtype != _INT32 or len(targets) != length - 1:
            raise _refused(f"targets: must be int32 [{length - 1}, K]")
        if targets.size and not -1 <= int(targets.min()) <= int(targets.max()) < self._engine.vocab_size:
            raise _refused(f"targets: tokens must be from -1 (none) and below {self._engine.vocab_size}")

    async def _render(self, request: RenderPrompt) -> RenderedPrompt:
        try:
            row = msgspec.json.decode(request.row)
            if not isinstance(row, dict):
                raise ValueError("the row is not an object")
            ids = await self._text(lambda: self._prompts.token_ids(row, self._engine.context_tokens))
        except (ValueError, msgspec.DecodeError) as error:
            raise _refused(f"prompt: {error}") from None
        return RenderedPrompt(prompt=await self._parcels.pack({"token_ids": np.array(ids, _INT32)}))

    async def _text(self, work: Callable[[], T]) -> T:
        return await self._on_text(work)  # type: ignore[return-value]


def check_request(request: SampleTokens) -> None:
    """Raise RpcError(bad_request), which names the field, the value and the limit, if a value is out of range."""
    ranges: list[tuple[str, float, float, float]] = [
        ("samples", request.samples, 1, MAX_SAMPLES),
        ("max_tokens", request.max_tokens, 0, 1 << 31),
        ("temperature", request.temperature, 0, 1e6),
        ("top_k", request.top_k, 0, 1 << 31),
        ("seed", request.seed, 0, (1 << 63) - 1),
        ("top_prompt_logprobs", request.top_prompt_logprobs, 0, MAX_TOP),
        ("top_logprobs", request.top_logprobs, 0, MAX_TOP),
    ]
    for name, value, least, most in ranges:
        if not least <= value <= most:
            raise _refused(f"{name}: {value} must be from {least} to {most:g}")
    if not 0 < request.top_p <= 1:
        raise _refused(f"top_p: {request.top_p} must be above 0 and at most 1")
    if len(request.stop) > MAX_STOPS or not all(0 < len(text.encode()) <= MAX_STOP_BYTES for text in request.stop):
        raise _refused(f"stop: at most {MAX_STOPS} texts of 1 to {MAX_STOP_BYTES} bytes each")
    if len(request.stop_ids) > MAX_STOP_IDS or not all(0 <= token < 1 << 31 for token in request.stop_ids):
        raise _refused(f"stop_ids: at most {MAX_STOP_IDS} tokens, each from 0")


def _joined(group: list[Generation], held: HeldWeights) -> dict[str, Array]:
    """Return the arrays of the samples. The engine must have sampled every token with the version of the request."""
    swaps = np.concatenate([each.swaps for each in group])
    if (swaps != held.swaps).any():
        raise RpcError(ErrorCode.INTERNAL, f"tokens were sampled with versions {sorted(set(swaps.tolist()))}")
    return {
        "lengths": np.array([len(each.token_ids) for each in group], _INT32),
        "token_ids": np.concatenate([each.token_ids for each in group]),
        "logprobs": np.concatenate([each.logprobs for each in group]),
        "versions": np.full(len(swaps), held.step, _INT32),
    }


def _refused(message: str) -> RpcError:
    return RpcError(ErrorCode.BAD_REQUEST, message)
