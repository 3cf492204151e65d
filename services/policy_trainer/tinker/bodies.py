"""The JSON requests of Tinker clients. Unknown fields are refused, because a field that is ignored changes a result in
silence."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from services.policy_trainer.tinker.errors import BadRequest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A name of a checkpoint, which becomes the name of a folder."""
_SCHEME = "tinker://"
WEIGHTS_KINDS = ("weights", "sampler_weights")
"""The kinds of checkpoints in paths and folders: for training, and for sampling."""
T = TypeVar("T")


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request. `type` repeats what the address says."""

    type: str | None = None


class ClientConfig(Body):
    sdk_version: str = ""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    session_id: str


class LoraConfig(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] = {}


class OfModel(Body):
    model_id: str


class Adam(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(OfModel):
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None
    seq_id: int | None = None


class SaveWeights(OfModel):
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class OfPath(Body):
    tinker_path: str


class SetTtl(Body):
    ttl_seconds: int | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSamplingSession(Body):
    sampling_session_id: str


class Chunk(Body):
    tokens: list[int] = []


class PromptBody(Body):
    chunks: list[Chunk]


class SamplingBody(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Body):
    """A tensor; with row pointers and columns, the listed values of a sparse one."""

    data: list[int]
    dtype: str
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(Body):
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(Body):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class CancelFuture(Body):
    request_id: str


def read(body: bytes, kind: type[T]) -> T:
    """Return the JSON in `body` as a request. Raises BadRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no {kind.__name__}: {str(error)[:300]}") from None


def checkpoint_name(given: str | None, otherwise: str) -> str:
    """Return the name of a checkpoint. Raises BadRequest for one that cannot be the name of a folder."""
    name = otherwise if given is None else given
    if not NAME.fullmatch(name):
        raise BadRequest(f"path: {name[:80]!r} has other characters than letters, digits, dots, dashes and underscores")
    return name


def weights_kind(*, sampler: bool) -> str:
    """Return the kind of a checkpoint."""
    return WEIGHTS_KINDS[sampler]


def checkpoint_path(model: str, name: str, *, sampler: bool) -> str:
    """Return the path by which clients know a checkpoint."""
    return f"{_SCHEME}{model}/{weights_kind(sampler=sampler)}/{name}"
