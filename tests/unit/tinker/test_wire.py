"""Bytes of a stranger raise BadRequest or are read; nothing is allocated for sizes that are only announced."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from services.policy_trainer.sampling.request import SampledPrompt, SampledSequence
from services.policy_trainer.tinker import bodies, protobuf
from services.policy_trainer.tinker.errors import BadRequest
from services.policy_trainer.tinker.wire import (
    ModelLimits,
    contents,
    envelope,
    forward_backward_output,
    pieces,
    prompt_targets,
    sample_response,
)
from tests.integration.tinker.client import datum, logprobs

LIMITS = ModelLimits(vocabulary=512, context=64)
ROUNDS = 4000


def request() -> bytes:
    message = protobuf.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = "s:train:0", 1, "ppo"
    message.loss_fn_config["clip_low_threshold"] = 0.9
    ratios = {"logprobs": [-1.0, -2.0], "advantages": [0.5, 0.5]}
    for _ in range(3):
        message.data.add().ParseFromString(datum([1, 2, 3], **ratios))
    return bytes(message.SerializeToString())


def read(body: bytes) -> None:
    contents(envelope(body).message, LIMITS)


def test_mutated_messages_raise_one_error() -> None:
    good, numbers, refused = request(), random.Random(1), list[str]()
    read(good)
    for _ in range(ROUNDS):
        body = bytearray(good)
        for _ in range(numbers.randint(1, 4)):
            at = numbers.randrange(len(body))
            match numbers.randrange(3):
                case 0:
                    body[at] = numbers.randrange(256)
                case 1:
                    del body[at : at + numbers.randint(1, 8)]
                case _:
                    body[at:at] = numbers.randbytes(numbers.randint(1, 8))
        try:
            read(bytes(body))
        except BadRequest as error:
            refused.append(str(error))
    assert len(refused) > ROUNDS / 3
    assert not any("\n" in message for message in refused)


def test_mutated_json_raises_one_error() -> None:
    good = b'{"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}'
    numbers = random.Random(2)
    assert bodies.read(good, bodies.SampleBody).prompt.chunks[0].tokens == [1]
    refused = 0
    for _ in range(ROUNDS):
        body = bytearray(good)
        for _ in range(numbers.randint(1, 4)):
            body[numbers.randrange(len(body))] = numbers.randrange(256)
        try:
            bodies.read(bytes(body), bodies.SampleBody)
        except BadRequest:
            refused += 1
    assert refused > ROUNDS / 3


@pytest.mark.parametrize(
    ("shape", "crow", "col"),
    [
        ([2, 2**40], [0, 0, 0], []),
        ([2**40], [0, 0, 0], []),
        ([2, 3], [0, 1, 2**40], [0]),
        ([2, 3], [0, 2, 1], [0, 1]),
        ([2, 3], [0, 1, 2], [0, 3]),
        ([2, 3], [0, 1, 2], [0, -1]),
        ([2, 3], [], []),
        ([-2, 3], [0, 1, 2], [0, 1]),
    ],
)
def test_sparse_tensors_that_do_not_fit_their_shape_allocate_nothing(
    shape: list[int], crow: list[int], col: list[int]
) -> None:
    message = protobuf.new("Datum")
    message.ParseFromString(datum([1, 2, 3]))
    tensor = message.loss_fn_inputs["target_tokens"]
    tensor.Clear()
    tensor.dtype = 2
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.zeros(len(col), "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(col, "<i8").tobytes()
    asked = protobuf.new("ForwardBackwardRequest")
    asked.model_id, asked.seq_id, asked.loss_fn = "m", 1, "cross_entropy"
    asked.data.append(message)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest):
            contents(asked, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_results_keep_their_shapes_when_the_number_of_targets_changes() -> None:
    arrays = [
        np.zeros(3, np.float32),
        np.ones((2, 4), np.float32),
        np.full((1, 4), 2, np.float32),
        np.ones(1, np.float32),
    ]
    back = logprobs(forward_backward_output(arrays, {"loss:sum": 1.0}))
    assert [one.shape for one in back] == [(3,), (2, 4), (1, 4), (1,)]
    assert all((one == two).all() for one, two in zip(arrays, back, strict=True))


def test_pieces_cover_all_data_and_none_but_a_single_datum_is_larger_than_the_quantum() -> None:
    numbers = random.Random(3)
    for _ in range(200):
        tokens = [numbers.randint(1, 30) for _ in range(numbers.randint(1, 40))]
        ranges = list(pieces(tokens, 20))
        assert [index for start, end in ranges for index in range(start, end)] == list(range(len(tokens)))
        assert all(sum(tokens[start:end]) <= 20 or end - start == 1 for start, end in ranges)


def test_a_field_that_the_server_does_not_know_is_refused_in_json() -> None:
    with pytest.raises(BadRequest, match="surprise"):
        bodies.read(msgspec.json.encode({"request_id": "a", "surprise": 1}), bodies.RetrieveFuture)


ASKED = [[3, -1], [-1, -1], [0, 511]]
"""Tokens at the places of a prompt of four."""


@pytest.mark.parametrize(
    "tensor",
    [
        {"data": [3, -1, -1, -1, 0, 511], "shape": [3, 2]},
        {"data": [3, 0, 511], "shape": [3, 2], "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [0, 0, 1]},
    ],
    ids=["dense", "sparse"],
)
def test_tokens_to_score_are_read_and_their_log_probs_have_the_same_form(tensor: dict[str, object]) -> None:
    body = msgspec.convert(tensor | {"dtype": "int64"}, bodies.TensorBody)
    targets = prompt_targets(body, 3, LIMITS)
    assert targets.dtype == np.int32
    assert targets.tolist() == ASKED
    values = np.where(targets >= 0, -0.5 - np.arange(6).reshape(3, 2), 0).astype(np.float32)
    result = SampledPrompt([], target_logprobs=values)
    sparse = body.sparse_crow_indices is not None
    message = protobuf.parse("SampleResponse", sample_response(result, targets, sparse=sparse)).target_prompt_logprobs
    assert list(message.shape) == [3, 2]
    if sparse:
        assert np.frombuffer(message.sparse_csr.crow_indices, "<i8").tolist() == body.sparse_crow_indices
        assert np.frombuffer(message.sparse_csr.col_indices, "<i8").tolist() == body.sparse_col_indices
        assert np.frombuffer(message.sparse_csr.values, "<f4").tolist() == [-0.5, -4.5, -5.5]
    else:
        assert np.frombuffer(message.dense, "<f4").reshape(3, 2).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": "float32"}, "target_prompt_logprobs: float32 of shape [3, 2]; it must be int64 [3, K]"),
        ({"shape": [6]}, "int64 of shape [6]"),
        ({"shape": [2, 3]}, "shape [2, 3]; it must be [3] or [3, K]"),
        ({"shape": [3, 2], "data": [1]}, "1 values do not fill shape [3, 2]"),
        ({"shape": [3, 65], "data": []}, "65 values a position"),
        ({"data": [0, 0, 0, 0, 0, 512]}, "token 512 is not in the vocabulary of 512"),
        ({"data": [0, 0, -2, 0, 0, 0]}, "token -2 is not in the vocabulary"),
        ({"data": [0, 0, 1 << 80, 0, 0, 0]}, "above the range of int64"),
        ({"data": [1, 2], "sparse_crow_indices": [0, 2, 2, 2], "sparse_col_indices": [1, 1]}, "must rise"),
        ({"data": [1, -1], "sparse_crow_indices": [0, 2, 2, 2], "sparse_col_indices": [0, 1]}, "-1 is listed"),
        ({"sparse_crow_indices": [0, 1]}, "the CSR indices do not fit shape [3, 2] with 6 values"),
    ],
)
def test_tokens_to_score_that_do_not_fit_are_refused(changed: dict[str, object], text: str) -> None:
    good = {"data": [0] * 6, "shape": [3, 2], "dtype": "int64"}
    with pytest.raises(BadRequest) as refused:
        prompt_targets(msgspec.convert(good | changed, bodies.TensorBody), 3, LIMITS)
    assert text in str(refused.value)


def test_the_places_of_a_sparse_tensor_are_bounded_before_there_is_memory_for_them() -> None:
    tensor = {"data": [], "shape": [1 << 18, 64], "sparse_crow_indices": [0] * ((1 << 18) + 1)}
    body = msgspec.convert(tensor | {"dtype": "int64", "sparse_col_indices": []}, bodies.TensorBody)
    tracemalloc.start()
    with pytest.raises(BadRequest, match="16777216 places, and at most 1048576 are possible"):
        prompt_targets(body, 1 << 18, LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_likeliest_tokens_of_samples_and_prompts() -> None:
    ids, logprobs = np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -2], [np.nan, -4]], np.float32)
    one = SampledSequence(ids[0], logprobs[0], ids[0], "stop", top_ids=ids, top_logprobs=logprobs)
    message = protobuf.parse("SampleResponse", sample_response(SampledPrompt([one], None, ids, logprobs)))
    for found in (message.topk_prompt_logprobs, message.sequences[0].topk_sampled_logprobs):
        assert (found.k, found.length) == (2, 2)
        assert np.frombuffer(found.token_ids, "<i4").tolist() == [1, 2, 3, 4]
        assert np.frombuffer(found.logprobs, "<f4").tolist() == [-1, -2, -99999, -4]
    assert not message.HasField("prompt_logprobs")
