"""Turns the protobuf of `forward_backward` into arrays, and results into protobuf.

Sizes are checked before anything is allocated. A request that names its model and its number gets a future even if its
contents are refused, because the client counts the number as used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.models import Datum, client_loss
from services.policy_trainer.sampling.request import SampledPrompt
from services.policy_trainer.tinker import protobuf
from services.policy_trainer.tinker.bodies import TensorBody
from services.policy_trainer.tinker.errors import BadRequest

MOST_DATUMS = 1024
"""Maximum number of datums in a request. The SDK sends more in several."""
MOST_TARGETS = 64
"""Maximum number of target tokens at one position."""
MOST_CELLS = 1 << 20
"""Maximum number of elements in a tensor of tokens to score, whether sparse or dense."""
_DTYPES: Mapping[int, str] = MappingProxyType({1: "<f4", 2: "<i8", 3: "<i4", 4: "<u2"})
"""numpy's names of the types of tensors. 4 is bfloat16, whose bits are read as integers."""
_BFLOAT16 = 4
_FLOAT32 = 1
_OUTPUT = "ArrayRecord"


_INPUTS: Mapping[str, str] = MappingProxyType(
    {"target_tokens": "targets", "weights": "weights", "advantages": "advantages", "logprobs": "logprobs"}
)
"""The inputs of losses, each with the field of `Datum` that it becomes."""


@dataclass(frozen=True)
class ModelLimits:
    """What the model and the server accept of a sequence."""

    vocabulary: int
    context: int


@dataclass(frozen=True)
class DataRequest:
    """A parsed `forward_backward` whose contents are not checked yet."""

    model: str
    seq: int
    forward_only: bool
    message: Any


def envelope(body: bytes) -> DataRequest:
    """Return the request in `body`. Raises BadRequest if it is no message, or names no request."""
    message = protobuf.parse("ForwardBackwardRequest", body)
    if not message.model_id:
        raise BadRequest("model_id: missing")
    if message.seq_id < 1:
        raise BadRequest(f"seq_id: {message.seq_id} is out of range: it must be 1 or more")
    return DataRequest(message.model_id, message.seq_id, message.forward_only, message)


def contents(message: Any, limits: ModelLimits) -> tuple[LossSpec, list[Datum]]:
    """Return the loss and the checked data of a request. Raises BadRequest."""
    options: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise BadRequest(f"loss_fn_config.{key[:40]}: must be a number")
        options[key] = value.number
    try:
        loss = client_loss(message.loss_fn, options)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if not 1 <= len(message.data) <= MOST_DATUMS:
        raise BadRequest(f"data: {len(message.data)} datums; a request has from 1 to {MOST_DATUMS}")
    data = []
    for index, datum in enumerate(message.data):
        try:
            data.append(_datum(datum, loss, limits))
        except BadRequest as error:
            raise BadRequest(f"data[{index}].{error}") from None
    return loss, data


def _datum(message: Any, loss: LossSpec, limits: ModelLimits) -> Datum:
    token_ids = _tokens(message.model_input, limits)
    inputs = dict(message.loss_fn_inputs)
    reads = ["target_tokens", *(["weights"] if loss.name == "cross_entropy" else ["advantages", "logprobs"])]
    for name in inputs:
        if name not in reads:
            raise BadRequest(f"loss_fn_inputs.{name[:40]}: {loss.name} does not read it; it reads {', '.join(reads)}")
    if "target_tokens" not in inputs:
        raise BadRequest("loss_fn_inputs.target_tokens: missing")
    arrays = {_INPUTS[name]: _tensor(f"loss_fn_inputs.{name}", inputs[name], len(token_ids)) for name in inputs}
    arrays["targets"] = _in_range("loss_fn_inputs.target_tokens", arrays["targets"], limits)
    return Datum(token_ids, **arrays)


def _tokens(chunks: Any, limits: ModelLimits) -> Array:
    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "empty"
            raise BadRequest(f"model_input: a chunk is {kind}, but the model reads text only (encoded_text)")
        parts.append(_buffer("model_input", chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 1 <= len(tokens) <= limits.context:
        raise BadRequest(f"model_input: {len(tokens)} tokens; a sequence has from 1 to {limits.context}")
    return _in_range("model_input", tokens, limits)


def _in_range(name: str, tokens: Array, limits: ModelLimits) -> Array:
    if tokens.dtype.kind != "i":
        raise BadRequest(f"{name}: token ids must be integers")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= limits.vocabulary):
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise BadRequest(f"{name}: token {bad} is not in the vocabulary of {limits.vocabulary}")
    return tokens.astype(np.int32)


def _tensor(where: str, message: Any, positions: int) -> Array:
    """Return a tensor of shape [positions] or [positions, K] with the type of the wire, or float32 for bfloat16."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"{where}: dtype {message.dtype} is unknown")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        return _from_csr(where, message.sparse_csr, message.dtype, shape, positions)
    values = _widened(_buffer(where, message.dense, dtype), message.dtype)
    shape = shape or [len(values)]
    if len(values) != positions * _columns(where, shape, positions):
        raise BadRequest(f"{where}: {len(values)} values do not fill shape {shape}")
    return values.reshape(shape)


def _columns(where: str, shape: Sequence[int], positions: int) -> int:
    """Return K of a shape [positions] or [positions, K]."""
    if len(shape) not in (1, 2) or shape[0] != positions:
        raise BadRequest(f"{where}: shape {list(shape)[:4]}; it must be [{positions}] or [{positions}, K]")
    columns = shape[1] if len(shape) == 2 else 1
    if not 1 <= columns <= MOST_TARGETS:
        raise BadRequest(f"{where}: {columns} values a position; from 1 to {MOST_TARGETS} are possible")
    return columns


def _from_csr(where: str, csr: Any, kind: int, shape: Sequence[int], positions: int) -> Array:
    values = _widened(_buffer(where, csr.values, _DTYPES[kind]), kind)
    rows = _buffer(where, csr.crow_indices, "<i8")
    return _filled(where, values, rows, _buffer(where, csr.col_indices, "<i8"), shape, positions, 0)


def _filled(
    where: str, values: Array, rows: Array, at: Array, shape: Sequence[int], positions: int, rest: int
) -> Array:
    """Return a tensor [positions, K] with the `values` of a compressed sparse row tensor, and `rest` elsewhere."""
    columns = _columns(where, shape, positions)
    counts = np.diff(rows)
    good = len(rows) == positions + 1 and rows[0] == 0 and rows[-1] == len(values) == len(at) and (counts >= 0).all()
    if not good or (len(at) and (at.min() < 0 or at.max() >= columns)):
        raise BadRequest(f"{where}: the CSR indices do not fit shape {list(shape)} with {len(values)} values")
    places = np.repeat(np.arange(positions), counts) * columns + at
    if (np.diff(places) <= 0).any():
        raise BadRequest(f"{where}: the columns of each row must rise in the CSR indices")
    dense = np.full(positions * columns, rest, values.dtype)
    dense[places] = values
    return dense.reshape(positions, columns)


def _buffer(where: str, data: bytes, dtype: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise BadRequest(f"{where}: {len(data)} bytes are no whole number of values of {size} bytes")
    return np.frombuffer(data, dtype)


def _widened(values: Array, kind: int) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == _BFLOAT16 else values


def prompt_targets(tensor: TensorBody, positions: int, limits: ModelLimits) -> Array:
    """Return int32 [positions, K] with the tokens whose log-probs are asked for, and -1 for none. Raises BadRequest."""
    where = "target_prompt_logprobs"
    if tensor.dtype != "int64" or len(tensor.shape) != 2:
        raise BadRequest(f"{where}: {tensor.dtype[:20]} of shape {tensor.shape[:4]}; it must be int64 [{positions}, K]")
    if positions * tensor.shape[1] > MOST_CELLS:
        text = f"{where}: {positions * tensor.shape[1]} places, and at most {MOST_CELLS} are possible"
        raise BadRequest(f"{text}; ask for fewer tokens at each place")
    try:
        values = np.array(tensor.data, np.int64)
        rows, at = (np.array(part or [], np.int64) for part in (tensor.sparse_crow_indices, tensor.sparse_col_indices))
    except OverflowError:
        raise BadRequest(f"{where}: a number is above the range of int64") from None
    if tensor.sparse_crow_indices is not None:
        if (values == -1).any():
            raise BadRequest(f"{where}: -1 is listed; a sparse tensor lists only the tokens to score")
        targets = _filled(where, values, rows, at, tensor.shape, positions, -1)
    elif len(values) == positions * _columns(where, tensor.shape, positions):
        targets = values.reshape(tensor.shape)
    else:
        raise BadRequest(f"{where}: {len(values)} values do not fill shape {tensor.shape}")
    _in_range(where, np.where(targets == -1, 0, targets), limits)
    return targets.astype(np.int32)


def forward_backward_output(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a `forward_backward`. `logprobs` has an array float32 for every datum, in the order of the
    request and with the shape of its targets, [N] or [N, K]."""
    output = protobuf.new("ForwardBackwardOutput")
    output.loss_fn_output_type = _OUTPUT
    for key, value in metrics.items():
        output.metrics[key] = value
    for trailing, group in groupby(logprobs, key=lambda values: values.shape[1:]):
        data = list(group)
        record = output.loss_fn_outputs.add(type_tag=_OUTPUT, num_datums=len(data))
        tensor = record.fields["logprobs"]
        tensor.dtype = _FLOAT32
        tensor.data = b"".join(np.ascontiguousarray(values, "<f4").tobytes() for values in data)
        tensor.offsets = np.cumsum([0, *(values.size * 4 for values in data)], dtype="<i8").tobytes()
        tensor.trailing_shape.extend(trailing)
    return bytes(output.SerializeToString())


def sample_response(result: SampledPrompt, targets: Array | None = None, *, sparse: bool = False) -> bytes:
    """Return the result of a sample. `targets` int32 [T - 1, K] are the tokens whose log-probs the
    result has. If `sparse`, these are returned as a sparse tensor."""
    response = protobuf.new("SampleResponse")
    for sequence in result.sequences:
        part = response.sequences.add(
            stop_reason=0 if sequence.reason == "stop" else 1,
            tokens=np.ascontiguousarray(sequence.token_ids, "<i4").tobytes(),
            logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
        )
        _put_likeliest(part.topk_sampled_logprobs, sequence.top_ids, sequence.top_logprobs)
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = np.ascontiguousarray(result.prompt_logprobs, "<f4").tobytes()
    _put_likeliest(response.topk_prompt_logprobs, result.top_ids, result.top_logprobs)
    if targets is not None and result.target_logprobs is not None:
        tensor, values = response.target_prompt_logprobs, result.target_logprobs
        tensor.dtype = _FLOAT32
        tensor.shape.extend(values.shape)
        if sparse:
            asked = targets >= 0
            tensor.sparse_csr.values = np.ascontiguousarray(values[asked], "<f4").tobytes()
            tensor.sparse_csr.crow_indices = np.cumsum([0, *asked.sum(1)], dtype="<i8").tobytes()
            tensor.sparse_csr.col_indices = np.nonzero(asked)[1].astype("<i8").tobytes()
        else:
            tensor.dense = np.ascontiguousarray(values, "<f4").tobytes()
    return bytes(response.SerializeToString())


def _put_likeliest(message: Any, ids: Array | None, logprobs: Array | None) -> None:
    """Write token ids int32 [P, k] and their log-probs float32 [P, k], if there are any."""
    if ids is not None and logprobs is not None:
        message.token_ids = np.ascontiguousarray(ids, "<i4").tobytes()
        message.logprobs = np.ascontiguousarray(np.where(np.isnan(logprobs), _MASKED, logprobs), "<f4").tobytes()
        message.k, message.length = ids.shape[1], len(ids)


_MASKED = -99999.0
"""The log-prob of a place of the top k that says nothing."""


def pieces(tokens: Sequence[int], quantum: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of datums into which a request is divided: at most `quantum` tokens each, or one datum."""
    start = total = 0
    for index, count in enumerate(tokens):
        if index > start and total + count > quantum:
            yield start, index
            start, total = index, 0
        total += count
    if start < len(tokens):
        yield start, len(tokens)
