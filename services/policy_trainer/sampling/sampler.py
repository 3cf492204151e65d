"""Samples for a server's clients with the run's engines.

`Router` decides which engine gets a request. A version is loaded by the engine that gets the first request for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog

from proto.messages import (
    Ack,
    CancelSampling,
    ErrorCode,
    GetStatus,
    LoadVersion,
    Ping,
    Pong,
    RenderedPrompt,
    RenderPrompt,
    SampledTokens,
    SampleTokens,
    Status,
    UnloadVersion,
    WeightsKind,
    WeightsRef,
)
from proto.tensors import Array
from services.policy_trainer.sampling.request import SampledPrompt, SamplingRequest, version_name
from services.policy_trainer.sampling.router import (
    PATIENCE_S,
    EngineFull,
    EngineLeft,
    EngineSeen,
    FailSample,
    RecallSample,
    Router,
    RouterEvent,
    RouterTick,
    SampleAsked,
    SampleEnded,
    SendSample,
    blocks_of,
)
from shared.actor.service import ProcessState
from shared.dataplane.client import DataClient
from shared.parcel import Parcels
from shared.rpc.client import Client
from shared.rpc.errors import RpcError

T = TypeVar("T")
ENGINE = "rollout"
PING_S = 0.5
"""Seconds between two signs of life of an engine."""
LOOK_S = 5.0
"""Seconds between two look-ups of the engines that have been added."""
LOAD_S = 300.0
CALL_S = 10.0
MAX_ROW_BYTES = 4 << 20
LOADS = 3
"""Maximum number of times that a version, or a parcel, is sent again for one request."""
_ELSEWHERE = (ErrorCode.LOST, ErrorCode.DRAINING, ErrorCode.NOT_READY)
"""Codes after which another engine may carry out the request."""


@dataclass(frozen=True)
class _EngineCall:
    """A call to an engine, by the name under which the engine knows it."""

    engine: int
    name: str
    task: asyncio.Task[None]


class _OpenSample:
    """A request with its result to be, and the present call for it."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.result: asyncio.Future[SampledPrompt] = asyncio.get_running_loop().create_future()
        self.call: _EngineCall | None = None


class Sampler:
    """Samples with all engines of the run. It is used only on the service's loop."""

    def __init__(
        self,
        client_of: Callable[[str, int], Client],
        data: DataClient,
        *,
        incarnation: int,
        store: str,
        engines: int,
    ) -> None:
        """`client_of` and `incarnation` are those of the service, `store` is the store on its host, and `engines` the
        number of rollout services at the start."""
        self._client_of = client_of
        self._incarnation = incarnation
        self._parcels = Parcels(data, client_of, store=store, incarnation=incarnation)
        self._router = Router(engines)
        self._engines = set(range(engines))
        self._open: dict[int, _OpenSample] = {}
        self._numbers = itertools.count(1)
        self._cancels: set[asyncio.Task[None]] = set()
        self._first: WeightsRef | None = None
        self._begun = asyncio.Event()
        self._seen = asyncio.Event()
        """Set, and replaced by another, at every sign of life of an engine."""
        self._log = structlog.get_logger("sampling")

    async def run(self) -> None:
        """Watch the engines, and those that are added later (`ctl scale`), until cancelled."""
        async with asyncio.TaskGroup() as watches:
            watched: set[int] = set()
            while True:
                for engine in self._engines - watched:
                    watches.create_task(self._watch(engine))
                watched |= self._engines
                await asyncio.sleep(LOOK_S)
                with contextlib.suppress(RpcError):
                    status = await self._client_of("scheduler", 0).call(GetStatus(), Status, deadline_s=CALL_S)
                    self._engines |= {row.instance for row in status.services if row.service == ENGINE}

    def begin(self, ref: WeightsRef) -> None:
        """Set the version whose load proves the base of an engine. Requests for the base need it, so its weights must
        exist until the end of the run."""
        self._first = ref
        self._begun.set()

    @property
    def open(self) -> int:
        """Number of open requests."""
        return self._router.open

    async def sample(self, request: SamplingRequest) -> SampledPrompt:
        """Sample. If the caller is cancelled, the engine abandons the request.

        Raises RpcError:

        - bad_request: a value is out of range, or the prompt leaves no room in the context.
        - gone: the weights of the version no longer exist.
        - busy: every engine has too many open samples, or no place for the version. The error has `retry_after_s`.
        - lost: engines died, and no other took over.
        - deadline: there was no result within `allowance_s`.
        """
        number = next(self._numbers)
        opened = self._open[number] = _OpenSample(request)
        version = version_name(request.version)
        self._handle(SampleAsked(number, version, request.samples, blocks_of(version, request.token_ids)))
        try:
            async with asyncio.timeout(request.allowance_s):
                return await opened.result
        except TimeoutError:
            text = f"the samples were not finished within {request.allowance_s:g} s"
            raise RpcError(ErrorCode.DEADLINE, text) from None
        finally:
            self._open.pop(number, None)
            self._handle(SampleEnded(number))
            self._recall(opened)

    async def load(self, ref: WeightsRef) -> None:
        """Load and prove a version in one engine that is there. Raises the errors of `_by_any`."""
        await self._by_any(lambda engine: self._load(engine, ref, LOAD_S))

    async def unload(self, ref: WeightsRef) -> None:
        """Have all engines drop a version, whose weights are about to be deleted. Engines that are not there hold
        none."""
        request = UnloadVersion(task_id=ref.task_id, fence=ref.fence)
        calls = [self._client_of(ENGINE, engine).call(request, Ack, deadline_s=CALL_S) for engine in self._router.ready]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                self._log.warning("a version was not unloaded", version=ref.task_id, why=str(answer))

    async def render(self, row: dict[str, Any]) -> Array:
        """Return the tokens, int32 [T], of a `prompt`: a text, or messages with `tools`.

        Raises RpcError(bad_request) for what the chat template refuses, and the errors of `_by_any`.
        """
        request = RenderPrompt(row=msgspec.json.encode(row))
        if len(request.row) > MAX_ROW_BYTES:
            text = f"a prompt of {len(request.row)} bytes of JSON; at most {MAX_ROW_BYTES} are accepted"
            raise RpcError(ErrorCode.BAD_REQUEST, text)

        async def rendered(engine: int) -> Array:
            answer = await self._client_of(ENGINE, engine).call(request, RenderedPrompt, deadline_s=CALL_S)
            return (await self._parcels.unpack(answer.prompt))["token_ids"]

        return await self._by_any(rendered)

    async def _by_any(self, call: Callable[[int], Awaitable[T]]) -> T:
        """Return the result of the first engine that carries out a call. Engines that start again are waited for.

        Raises RpcError: what an engine refused, busy if all that are ready have no room, and lost or the last error if
        no engine could be reached for `PATIENCE_S`.
        """
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            seen, errors = self._seen, []
            for engine in await self._ready(until):
                try:
                    return await call(engine)
                except RpcError as error:
                    if error.code not in (*_ELSEWHERE, ErrorCode.BUSY, ErrorCode.DEADLINE):
                        raise
                    errors.append(error)
            if full := [error for error in errors if error.code == ErrorCode.BUSY]:
                raise full[0]
            if asyncio.get_running_loop().time() > until:
                raise errors[-1]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await seen.wait()

    async def _ready(self, until: float) -> list[int]:
        """Return the engines that take requests, once there is one. Raises RpcError(lost) if there is still none at
        `until`, in the event loop's time."""
        try:
            async with asyncio.timeout_at(until):
                while not self._router.ready:
                    await self._seen.wait()
        except TimeoutError:
            raise RpcError(ErrorCode.LOST, f"no engine was there for {PATIENCE_S:g} s (ctl status)") from None
        return self._router.ready

    # ---- effects

    def _handle(self, event: RouterEvent) -> None:
        for effect in self._router.handle(event, asyncio.get_running_loop().time()):
            match effect:
                case SendSample():
                    opened, name = self._open[effect.request], f"{self._incarnation:x}/{next(self._numbers)}"
                    task = asyncio.create_task(self._call(effect.request, effect.engine, name, opened))
                    opened.call = _EngineCall(effect.engine, name, task)
                case RecallSample():
                    self._recall(self._open[effect.request])
                case FailSample():
                    error = RpcError(effect.code, effect.why, retry_after_s=effect.retry_after_s)
                    _fail(self._open[effect.request].result, error)

    async def _call(self, number: int, engine: int, name: str, opened: _OpenSample) -> None:
        try:
            result = await self._sampled(engine, name, opened.request)
        except RpcError as error:
            if error.code == ErrorCode.BUSY:
                self._handle(EngineFull(number, str(error)))
            elif error.code in _ELSEWHERE:
                self._handle(EngineLeft(number, died=error.code == ErrorCode.LOST))
            else:
                _fail(opened.result, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _fail(opened.result, error)
        else:
            if not opened.result.done():
                opened.result.set_result(result)

    async def _sampled(self, engine: int, name: str, request: SamplingRequest) -> SampledPrompt:
        """Return an engine's result. Loads the version if the engine lacks it; the base, once it is published."""
        client = self._client_of(ENGINE, engine)
        until = asyncio.get_running_loop().time() + request.allowance_s
        prompt = {"token_ids": np.asarray(request.token_ids, np.int32)}
        prompt |= {} if request.targets is None else {"targets": request.targets}
        for left in reversed(range(LOADS)):
            base_is_version = self._first is not None and self._first.kind == WeightsKind.FULL
            version = self._first if request.version is None and base_is_version else request.version
            asked = SampleTokens(
                name=name,
                task_id="" if version is None else version.task_id,
                fence=0 if version is None else version.fence,
                prompt=await self._parcels.pack(prompt),
                samples=request.samples,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                stop=list(request.stop),
                stop_ids=list(request.stop_ids),
                ends=request.ends,
                seed=request.seed,
                prompt_logprobs=request.prompt_logprobs,
                top_prompt_logprobs=request.top_prompt_logprobs,
                top_logprobs=request.top_logprobs,
                texts=request.texts,
            )
            left_s = until - asyncio.get_running_loop().time()
            try:
                answer = await client.call(asked, SampledTokens, deadline_s=left_s)
                arrays = await self._parcels.unpack(answer.parcel)
            except RpcError as error:
                if error.code not in (ErrorCode.MISSING, ErrorCode.COLLECTED):
                    raise
                while (ref := version or self._first) is None:
                    await self._begun.wait()
                if not left:
                    text = f"{client.peer} dropped version {ref.task_id} {LOADS} times before it was sampled"
                    raise RpcError(ErrorCode.BUSY, text) from None
                await self._load(engine, ref, min(left_s, LOAD_S))
            else:
                return SampledPrompt.of(arrays, answer.reasons, answer.texts)
        raise AssertionError("the last round returns or raises")

    async def _load(self, engine: int, ref: WeightsRef, deadline_s: float) -> None:
        await self._client_of(ENGINE, engine).call(LoadVersion(weights=ref), Ack, deadline_s=deadline_s)

    def _recall(self, opened: _OpenSample) -> None:
        """Abandon the call for a request, if there is one, and have its engine free the rows."""
        call, opened.call = opened.call, None
        if call is not None and not call.task.done():
            call.task.cancel()
            cancel = asyncio.create_task(self._cancel(call.engine, call.name))
            self._cancels.add(cancel)
            cancel.add_done_callback(self._cancels.discard)

    async def _cancel(self, engine: int, name: str) -> None:
        with contextlib.suppress(RpcError):  # an engine that does not answer has most likely lost the request
            await self._client_of(ENGINE, engine).call(CancelSampling(name=name), Ack, deadline_s=CALL_S)

    async def _watch(self, engine: int) -> None:
        client = self._client_of(ENGINE, engine)
        while True:
            with contextlib.suppress(RpcError):
                pong = await client.call(Ping(), Pong, deadline_s=CALL_S)
                self._handle(EngineSeen(engine, pong.incarnation, pong.state == ProcessState.READY))
                self._seen.set()
                self._seen = asyncio.Event()
            self._handle(RouterTick())
            await asyncio.sleep(PING_S)


def _fail(result: asyncio.Future[SampledPrompt], error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
