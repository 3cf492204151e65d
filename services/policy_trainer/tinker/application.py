"""The HTTP interface for Tinker clients, as the SDK 0.38 uses it. Every address is below /api/v1.

Training requests answer with the id of a future, which `retrieve_future` waits for. A future of a training request
never ends in 404 or 410, because the SDK would give up, and no poll is answered quickly with an error of the server,
because the SDK would repeat it without a pause.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from services.policy_trainer.tinker import bodies, wire
from services.policy_trainer.tinker.checkpoints import CheckpointHandlers
from services.policy_trainer.tinker.errors import BadRequest, Category
from services.policy_trainer.tinker.events import Beat
from services.policy_trainer.tinker.exchange import (
    PROTOBUF,
    answer,
    failed,
    key_of,
    left,
    not_served,
    pending,
    read,
    read_body,
    refused,
)
from services.policy_trainer.tinker.records import (
    Adapter,
    Model,
    RequestKind,
    Session,
    TrainingRequest,
)
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.sampling import SEED_MODULUS, SamplingHandlers, ServedBase
from services.policy_trainer.tinker.server import Server
from services.policy_trainer.tinker.trainer import weights_folder
from shared.rpc.errors import RpcError
from shared.topology.serve import Serve

API = "/api/v1"
WAIT_S = 30.0
"""Seconds after which a poll is answered although nothing has happened. The SDK waits for 45 s."""
SDK_CHUNK_BYTES = 5_000_000
T = TypeVar("T", bound=bodies.Body)
Answer = Callable[[Request], Awaitable[Response]]


class Handlers:
    """What the addresses do. Every method answers one kind of request."""

    def __init__(self, server: Server, samples: SampleFutures, serve: Serve, base: ServedBase) -> None:
        self._server = server
        self._state = server.state
        self._own = server.state.own
        self._samples = samples
        self._serve = serve
        self._base = base
        self._checkpoints = CheckpointHandlers(server)
        self._sampling = SamplingHandlers(server, samples, serve, base)

    def routes(self) -> list[Route]:
        """Return the addresses."""
        posts: dict[str, Answer] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "sessions/{session}/finish": self.finish_session,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "unload_model": self.unload_model,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "load_weights": self.load_weights,
            "weights_info": self._checkpoints.info,
            "copy_weights": self._checkpoints.copy,
            "create_sampling_session": self._sampling.create_sampling_session,
            "join_sampling_session": self._sampling.join_sampling_session,
            "asample": self._sampling.asample,
            "retrieve_future": self.retrieve_future,
            "retrieve_futures": self.retrieve_futures,
            "cancel_future": self.cancel_future,
        }
        gets: dict[str, Answer] = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler}": self._sampling.sampler,
            "sessions": self.sessions,
            "sessions/{session}": self.session,
            "training_runs": self._checkpoints.runs,
            "training_runs/{model}": self._checkpoints.run,
            "training_runs/{model}/checkpoints": self._checkpoints.of_run,
            "checkpoints": self._checkpoints.all,
            "training_runs/{model}/checkpoints/{kind}/{name}/archive": self._checkpoints.archive,
        }
        one = f"{API}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
        return [
            *(Route(f"{API}/{path}", answer, methods=["POST"]) for path, answer in posts.items()),
            *(Route(f"{API}/{path}", answer, methods=["GET"]) for path, answer in gets.items()),
            Route(one, self._checkpoints.delete, methods=["DELETE"]),
            Route(f"{one}/ttl", self._checkpoints.set_ttl, methods=["PUT"]),
            Route(f"{API}/{{path:path}}", not_served, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    # ---- the server and sessions

    async def healthz(self, request: Request) -> Response:
        return answer({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        await read(request, self._serve.body_limit, bodies.ClientConfig)
        flags = {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_len": wire.MOST_DATUMS,
            "fwdbwd_max_chunk_bytes_count": min(SDK_CHUNK_BYTES, self._serve.body_limit // 2),
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
        }
        return answer(flags)

    async def dynamic_config(self, request: Request) -> Response:
        return answer({"sample_cancel_enabled": True})

    async def capabilities(self, request: Request) -> Response:
        context = self._base.limits.context
        return answer(
            {
                "supported_models": [
                    {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
                    for name in self._serve.models
                ]
            }
        )

    async def create_session(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.CreateSession)
        now, info = self._server.now(), {"user_metadata": body.user_metadata, "display_name": body.display_name}
        session = Session(id=uuid.uuid4().hex, key=key_of(request), opened=now, seen=now, info=info)
        self._server.keep(session)
        return answer({"type": "create_session", "session_id": session.id})

    async def session_heartbeat(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.OfSession)
        self._server.handle(Beat(self._own.session(key_of(request), body.session_id).id))
        return answer({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        session = self._own.session(key_of(request), request.path_params["session"])
        session.finished = True
        self._server.keep(session)
        return answer({})

    async def sessions(self, request: Request) -> Response:
        own = [session.id for session in self._own.sessions.values() if session.key == key_of(request)]
        return answer({"sessions": own})

    async def session(self, request: Request) -> Response:
        session = self._own.session(key_of(request), request.path_params["session"])
        samplers = [sampler.id for sampler in self._own.samplers.values() if sampler.session == session.id]
        runs = [model.id for model in self._own.models_of(session.id)]
        return answer({"training_run_ids": runs, "sampler_ids": samplers, **session.info})

    async def telemetry(self, request: Request) -> Response:
        await read_body(request, self._serve.body_limit)
        return answer({"status": "accepted"})

    # ---- training

    async def create_model(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.CreateModel)
        session = self._own.session(key_of(request), body.session_id)
        refused = self._refused_model(body)
        lora = body.lora_config or bodies.LoraConfig(rank=0)
        groups = {"attention": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        adapter = Adapter(
            rank=lora.rank,
            seed=-1 if lora.seed is None else lora.seed,
            groups=[name for name, on in groups.items() if on and lora.rank],
        )
        model = self._model(session, body.model_seq_id, body.base_model, adapter, body.user_metadata)
        created = TrainingRequest(model=model.id, seq=0, kind=RequestKind.CREATE, at=self._server.now())
        return future(await self._server.submit(model, created, refused=refused))

    def _refused_model(self, body: bodies.CreateModel) -> str:
        """Return why a model cannot be created, or an empty string."""
        if body.base_model not in self._serve.models:
            return f"base_model: {body.base_model[:80]!r} is not served here; use {', '.join(self._serve.models)}"
        if (kind := body.optimizer_config.get("type", "adamw")) != "adamw":
            return f"optimizer_config.type: {str(kind)[:40]!r} is not computed here; use adamw"
        lora = body.lora_config
        if self._serve.full_training:
            if lora is not None and lora.rank:
                return f"lora_config.rank: {lora.rank}, but this server trains all weights; ask for rank 0"
            return ""
        if lora is None or lora.rank == 0:
            return "lora_config.rank: 0 trains all weights, which this server does not do; ask for a rank of 1 or more"
        if not 1 <= lora.rank <= self._serve.max_rank:
            return f"lora_config.rank: {lora.rank} is out of range; it must be from 1 to {self._serve.max_rank}"
        if lora.seed is not None and not 0 <= lora.seed < SEED_MODULUS:
            return f"lora_config.seed: {lora.seed} is out of range; it must be from 0 to 2^63 - 1"
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            return "lora_config: nothing is trained; set train_attn, train_mlp or train_unembed"
        return ""

    def _model(
        self,
        session: Session,
        number: int,
        base: str,
        adapter: Adapter,
        metadata: dict[str, Any] | None,
        origin: str = "",
        *,
        optimizer: bool = False,
    ) -> Model:
        """Return the model `number` of a session, which is made unless it is there."""
        name, now = f"{session.id}:train:{number}", self._server.now()
        if (known := self._own.models.get(name)) is not None:
            return known
        own = self._own.next_number()
        seed = adapter.seed if adapter.seed >= 0 else (self._base.seed + own) % SEED_MODULUS
        model = Model(
            id=name,
            number=own,
            key=session.key,
            session=session.id,
            base=base,
            adapter=msgspec.structs.replace(adapter, seed=seed),
            opened=now,
            used=now,
            metadata=metadata,
            origin=origin,
            origin_optimizer=optimizer,
        )
        self._server.keep(model)
        return model

    async def get_info(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.OfModel)
        model = self._own.model(key_of(request), body.model_id)
        return answer(
            {
                "type": "get_info",
                "model_data": {"arch": "transformer", "model_name": model.base, "tokenizer_id": model.base},
                "model_id": model.id,
                "is_lora": model.adapter.rank > 0,
                "lora_rank": model.adapter.rank,
                "model_name": model.base,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        given = await asyncio.to_thread(wire.envelope, await read_body(request, self._serve.body_limit))
        model = self._own.model(key_of(request), given.model)
        kind = RequestKind.FORWARD if given.forward_only else RequestKind.FORWARD_BACKWARD
        asked = TrainingRequest(model=model.id, seq=given.seq, kind=kind, at=self._server.now())
        try:
            loss, data = await asyncio.to_thread(wire.contents, given.message, self._base.limits)
        except BadRequest as error:
            return future(await self._server.submit(model, asked, refused=str(error)))
        return future(await self._server.submit(model, asked, loss, data))

    async def optim_step(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.OptimStepBody)
        refused = "" if body.optimizer_params is None else "optimizer_params: only adam_params are computed here"
        adam = body.adam_params or bodies.Adam()
        numbers = {name: value for name, value in msgspec.structs.asdict(adam).items() if name != "type"}
        return await self._future(request, body.model_id, body.seq_id, RequestKind.OPTIM_STEP, numbers, refused)

    async def save_weights(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.SaveWeights)
        model = self._own.model(key_of(request), body.model_id)
        return await self._save(model, body, RequestKind.SAVE, overwrite=body.overwrite)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.SaveForSampler)
        model = self._own.model(key_of(request), body.model_id)
        if body.path is not None:
            return await self._save(model, body, RequestKind.SAVE_SAMPLER, overwrite=False)
        refused = (
            "" if body.kind in ("snapshot", "inflight") else f"kind: {body.kind[:40]!r} is not snapshot or inflight"
        )
        number = body.sampling_session_seq_id
        if number is None:
            number = len(self._own.samplers)
        about = {
            "sampling_session_id": f"{model.session}:sample:{number}",
            "number": number,
            "kind": body.kind,
        }
        return await self._future(request, model.id, body.seq_id, RequestKind.SAVE_SAMPLER, about, refused)

    async def _save(
        self, model: Model, body: bodies.SaveWeights | bodies.SaveForSampler, kind: RequestKind, *, overwrite: bool
    ) -> Response:
        refused, sampler = "", kind == RequestKind.SAVE_SAMPLER
        seq = self._state.next_seq(model) if body.seq_id is None else body.seq_id
        name, about = f"{seq:06d}", dict[str, Any]()
        try:
            name = bodies.checkpoint_name(body.path, name)
        except BadRequest as error:
            refused = str(error)
        path = bodies.checkpoint_path(model.id, name, sampler=sampler)
        if path in self._own.checkpoints and not overwrite and not self._is_known(model, seq):
            refused = f"path: there is a checkpoint {path}; choose another name" + (
                "" if sampler else ", or overwrite it"
            )
        if body.ttl_seconds is not None and body.ttl_seconds < 1:
            refused = f"ttl_seconds: {body.ttl_seconds} is out of range; it must be 1 or more"
        if not refused:
            about = {
                "tinker_path": path,
                "folder": weights_folder(model, name, sampler=sampler),
                "ttl_seconds": body.ttl_seconds,
                "user_metadata": body.user_metadata,
            }
        asked = TrainingRequest(model=model.id, seq=seq, kind=kind, at=self._server.now(), body=about)
        return future(await self._server.submit(model, asked, refused=refused))

    def _is_known(self, model: Model, seq: int) -> bool:
        return seq <= model.reached or f"{model.id}/{seq}" in self._state.requests

    async def load_weights(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.LoadWeights)
        key = key_of(request)
        checkpoint = self._own.checkpoint(key, body.path)
        if body.session_id is not None and body.model_seq_id is not None:
            session = self._own.session(key, body.session_id)
            base, adapter = body.base_model or checkpoint.base, checkpoint.adapter
            refused = "" if base in self._serve.models else f"base_model: {base[:80]!r} is not served here"
            model = self._model(
                session,
                body.model_seq_id,
                base,
                adapter,
                body.user_metadata,
                checkpoint.folder,
                optimizer=body.optimizer,
            )
            asked = TrainingRequest(
                model=model.id, seq=0, kind=RequestKind.CREATE, at=self._server.now(), body={"path": checkpoint.path}
            )
            return future(await self._server.submit(model, asked, refused=refused))
        if body.model_id is None:
            raise BadRequest("load_weights: names no model; give model_id and seq_id, or session_id and model_seq_id")
        model = self._own.model(key, body.model_id)
        refused = ""
        if (checkpoint.adapter.rank, checkpoint.adapter.groups) != (model.adapter.rank, model.adapter.groups):
            refused = f"path: the checkpoint is another adapter (rank {checkpoint.adapter.rank}) than the model's"
        about: dict[str, Any] = {"path": checkpoint.path, "folder": checkpoint.folder, "optimizer": body.optimizer}
        return await self._future(request, model.id, body.seq_id, RequestKind.LOAD, about, refused)

    async def unload_model(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.OfModel)
        return await self._future(request, body.model_id, None, RequestKind.UNLOAD, {}, "")

    async def _future(
        self, request: Request, name: str, seq: int | None, kind: RequestKind, about: dict[str, Any], refused: str
    ) -> Response:
        model = self._own.model(key_of(request), name)
        number = self._state.next_seq(model) if seq is None else seq
        if number < 1:
            raise BadRequest(f"seq_id: {number} is out of range: it must be 1 or more")
        asked = TrainingRequest(model=model.id, seq=number, kind=kind, at=self._server.now(), body=about)
        return future(await self._server.submit(model, asked, refused=refused))

    # ---- futures

    async def retrieve_future(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.RetrieveFuture)
        key, name = key_of(request), body.request_id
        if ":sample:" in name:
            return await self._sampled(key, name)
        done = await self._server.wait(key, name, WAIT_S)
        if done is None:
            return pending(name)
        if done.error:
            self._server.fetched(done)
            return failed(done.error, done.category)
        if done.kind not in (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD):
            self._server.fetched(done)
            return answer(result_of(done))
        try:
            payload = await self._server.output(done)
        except RpcError as error:
            return failed(f"the result cannot be read: {error}", Category.SERVER)
        self._server.fetched(done)
        return Response(payload, media_type=PROTOBUF)

    async def _sampled(self, key: str, name: str) -> Response:
        done = await self._samples.result(key, name, WAIT_S)
        if done is None:
            return pending(name)
        return failed(done.error, done.category) if done.error else Response(done.payload, media_type=PROTOBUF)

    async def retrieve_futures(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.RetrieveFutures)
        key = key_of(request)
        self._own.sampler(key, body.target.sampling_session_id)
        wait_s = WAIT_S if body.timeout is None else max(0.0, min(body.timeout, WAIT_S))
        done, cursor = await self._samples.completions(key, body, wait_s)
        completions = [
            {"state": "failed", "request_id": one.id}
            if one.error
            else {"state": "finished", "request_id": one.id, "response_payload_uncompressed_size": len(one.payload)}
            for one in done
        ]
        return answer({"completions": completions, "cursor": cursor})

    async def cancel_future(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.CancelFuture)
        self._samples.cancel(key_of(request), body.request_id)
        return answer({})


def future(request: TrainingRequest) -> Response:
    """Return the answer to a training request that is journaled."""
    return answer({"request_id": request.id, "model_id": request.model})


def result_of(request: TrainingRequest) -> dict[str, Any]:
    """Return the result of a request that has no data."""
    match request.kind:
        case RequestKind.CREATE if "path" in request.body:
            return {"type": "load_weights", "path": request.body["path"], "model_id": request.model}
        case RequestKind.CREATE | RequestKind.UNLOAD:
            return {"type": request.kind, "model_id": request.model}
        case RequestKind.OPTIM_STEP:
            return {"metrics": {"grad_norm": request.sums["grad_norm"]}}
        case RequestKind.LOAD:
            return {"type": request.kind, "path": request.body["path"], "model_id": request.model}
        case _:
            return {"type": request.kind, **request.result}


def application(handlers: Handlers, others: list[BaseRoute]) -> Starlette:
    """Return the application without the check of keys."""
    return Starlette(
        routes=[*handlers.routes(), *others], exception_handlers={BadRequest: refused, ClientDisconnect: left}
    )
