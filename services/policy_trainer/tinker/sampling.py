"""The addresses about sampling."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from proto.messages import WeightsRef
from services.policy_trainer.sampling.request import SamplingRequest, derived_seed, version_name
from services.policy_trainer.tinker import bodies
from services.policy_trainer.tinker.errors import BadRequest, NotThere
from services.policy_trainer.tinker.exchange import answer, key_of, read
from services.policy_trainer.tinker.records import OpenSample, SamplingSession
from services.policy_trainer.tinker.samples import SampleFutures, check_sample, prompt_of, stops, token_array
from services.policy_trainer.tinker.server import Server
from services.policy_trainer.tinker.wire import ModelLimits, prompt_targets
from shared.stages import WEIGHTS
from shared.topology.serve import Serve

SEED_MODULUS = 2**63


@dataclass(frozen=True)
class ServedBase:
    """The model that clients train and sample from."""

    folder: str
    limits: ModelLimits
    seed: int
    """The seed of adapters without one of their own follows from this one and the model's number."""


class SamplingHandlers:
    """Answers requests for sampling sessions and samples."""

    def __init__(self, server: Server, samples: SampleFutures, serve: Serve, base: ServedBase) -> None:
        self._server = server
        self._own = server.state.own
        self._samples = samples
        self._serve = serve
        self._base = base

    async def create_sampling_session(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.CreateSamplingSession)
        key = key_of(request)
        session = self._own.session(key, body.session_id)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if name not in self._own.samplers:
            sampler = SamplingSession(
                id=name,
                key=key,
                session=session.id,
                at=self._server.now(),
                base=body.base_model or "",
                number=body.sampling_session_seq_id,
            )
            if body.model_path is not None:
                checkpoint = self._own.checkpoint(key, body.model_path)
                if not checkpoint.sampler:
                    path = checkpoint.path.replace("/weights/", "/sampler_weights/")
                    raise BadRequest(f"model_path: {checkpoint.path} is for training; sample from a path like {path}")
                sampler.path, sampler.version, sampler.base = checkpoint.path, checkpoint.version, checkpoint.base
            elif sampler.base not in self._serve.models:
                raise NotThere(f"base_model: {sampler.base[:80]!r} is not served; use {', '.join(self._serve.models)}")
            self._server.keep(sampler)
        return answer({"type": "create_sampling_session", "sampling_session_id": name})

    async def join_sampling_session(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.OfSamplingSession)
        sampler = self._own.sampler(key_of(request), body.sampling_session_id)
        session = self._own.sessions[sampler.session]
        session.clones[sampler.id] = count = session.clones.get(sampler.id, 0) + 1
        self._server.keep(session)
        return answer({"type": "join_sampling_session", "client_counter": count})

    async def sampler(self, request: Request) -> Response:
        sampler = self._own.sampler(key_of(request), request.path_params["sampler"])
        return answer({"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None})

    async def asample(self, request: Request) -> Response:
        body = await read(request, self._serve.body_limit, bodies.SampleBody)
        if body.sampling_session_id is None or body.seq_id is None or body.seq_id < 0:
            raise BadRequest("asample: needs sampling_session_id and seq_id (create_sampling_session)")
        key = key_of(request)
        sampler = self._own.sampler(key, body.sampling_session_id)
        name = f"{sampler.id}/{body.seq_id}"
        check_sample(body, self._base.limits)
        ref = self._weights_of(sampler)
        params = body.sampling_params
        texts, tokens, ends = stops(params.stop)
        seed = params.seed
        if seed is None:
            # A resume publishes saved weights as another version. Their seeds stay those of the first.
            weights = f"{WEIGHTS}/{sampler.version}" if sampler.path else version_name(ref)
            seed = derived_seed(sampler.inflight or sampler.base, weights, sampler.number, body.seq_id)
        token_ids = token_array(prompt_of(body.prompt, self._base.limits))
        scored = body.target_prompt_logprobs
        asked = SamplingRequest(
            version=ref,
            token_ids=token_ids,
            seed=seed % SEED_MODULUS,
            samples=body.num_samples,
            max_tokens=params.max_tokens or 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop=texts,
            stop_ids=tokens,
            ends=ends,
            prompt_logprobs=bool(body.prompt_logprobs),
            top_prompt_logprobs=body.topk_prompt_logprobs,
            targets=None if scored is None else prompt_targets(scored, len(token_ids) - 1, self._base.limits),
            top_logprobs=body.topk_sample_logprobs,
        )
        sparse = scored is not None and scored.sparse_crow_indices is not None
        self._samples.submit(OpenSample(id=name, key=key, request=asked, sparse_targets=sparse))
        ids = [f"{name}/{index}" for index in range(body.num_samples)]
        return answer({"request_id": name, "sample_sequence_ids": ids})

    def _weights_of(self, sampler: SamplingSession) -> WeightsRef | None:
        """Return the reference of the weights that a sampling session uses, or None for the base. Raises BadRequest."""
        version = self._own.versions.get(sampler.version)
        if sampler.inflight:
            version = self._own.newest_version(self._own.models[sampler.inflight].number)
        elif sampler.path in self._own.checkpoints:  # their version is another one after a resume
            version = self._own.versions.get(self._own.checkpoints[sampler.path].version)
        if version is not None:
            return version.ref
        if sampler.path and not self._own.published:
            raise BadRequest(f"sampler {sampler.id}: its weights are being published; try again", 503)
        if sampler.version:
            text = "its weights were deleted, or cannot be published again; save them again for sampling"
            raise BadRequest(f"sampler {sampler.id}: {text}")
        return None
