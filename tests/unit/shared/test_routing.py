"""Tests routers that are watched and that replay given experts, for every family whose formula is proved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from proto.tensors import Array
from shared.model.load import allow
from shared.model.logprobs import Routing, Scores, TokenScorer
from shared.model.routing import Routers, attach, routers_of
from shared.topology.passes import FASTEST, Passes
from tests.unit.tiny_models import make_model, ragged

_TOP = {"num_experts": 8, "num_experts_per_tok": 2}
_DEEP: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_TOP, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_TOP, "moe_intermediate_size": 16, "head_dim": 12, "norm_topk_prob": True},
    "olmoe": _TOP,
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        **_DEEP,
        "n_group": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**_DEEP, "n_group": 1, "head_dim": 12},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}, "GptOssTopKRouter"),
    "phimoe": ({"num_local_experts": 4}, "PhimoeTopKRouter"),
    "jamba": ({}, "JambaForCausalLM does not declare a router"),
}
PADDED = Passes(sequences="padded", head="blocks")
WIDE_BIAS = 0.3


def mixture(kind: str, *, dtype: torch.dtype = torch.float32, passes: Passes = FASTEST, **options: Any) -> Any:
    """Return a model with watched routers. A correction bias is not zero."""
    model = make_model(kind, dtype=dtype, passes=passes, **{**FAMILIES[kind], **options})
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-WIDE_BIAS, WIDE_BIAS, generator=torch.Generator().manual_seed(1))
    assert attach(model) == ""
    return model


def routers_in(model: Any) -> Routers:
    routers = routers_of(model)
    assert routers is not None
    return routers


def passes_over(model: Any, routes: Routing, text: tuple[Array, Array, Array], size: int = 4096) -> list[Scores]:
    """Score the text, add the gradients of the sum of all log-probs, and return the scores of each micro-batch."""
    scorer, found = TokenScorer(model), list[Scores]()
    for batch in scorer.plan(*text, 1.0, size, None, routes.given):
        found.append(scorer.score(batch, 1.0, "none", None, routes))
        found[-1].outputs.sum().backward()  # type: ignore[no-untyped-call]
    return found


def recorded(model: Any, text: tuple[Array, Array, Array], size: int = 4096) -> tuple[Array, list[Scores]]:
    record = np.zeros((len(text[0]), routers_in(model).width), np.uint8)
    return record, passes_over(model, Routing(record=record), text, size)


def taken_gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_replaying_the_routes_that_a_model_chose_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    model, text = mixture(kind, dtype=dtype), ragged()
    record, chosen = recorded(model, text)
    wanted = taken_gradients(model)
    assert any(name.endswith("gate.weight") and gradient.any() for name, gradient in wanted.items())
    replayed = passes_over(model, Routing(record), text)
    for one, other in zip(chosen, replayed, strict=True):
        assert torch.equal(one.outputs, other.outputs)
        assert one.routed is not None
        assert other.routed is not None
        assert torch.equal(one.routed.counts, other.routed.counts)
        assert float(other.routed.strayed) == 0
    found = taken_gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_padded_passes_take_the_same_routes_as_packed_ones(kind: str) -> None:
    model, text = mixture(kind), ragged()
    record, packed = recorded(model, text)
    allow(model, PADDED)
    again, padded = recorded(model, text, 30)
    inputs = record.any(1) | again.any(1)
    assert np.array_equal(record[inputs], again[inputs])
    counts = [sum(scores.routed.counts for scores in each if scores.routed) for each in (packed, padded)]
    assert torch.equal(counts[0], counts[1])
    other = routers_in(model).packed(torch.randint(0, 8, (len(text[0]), routers_in(model).layers, 2)))
    allow(model, FASTEST)
    given = passes_over(model, Routing(other.numpy()), text)
    allow(model, PADDED)
    for scores in passes_over(model, Routing(other.numpy()), text, 30):
        place = {int(token): at for at, token in enumerate(given[0].tokens)}
        mine = given[0].outputs[[place[int(token)] for token in scores.tokens]]
        assert torch.allclose(scores.outputs, mine, atol=1e-5)


def test_a_token_is_counted_as_often_as_sequences_train_it() -> None:
    model = mixture("qwen3_moe")
    # Three samples share a prompt and a sampled token; the last one does not train its last token.
    ids = np.array([5, 6, 7, 9, 5, 6, 7, 10, 5, 6, 7, 9], np.int32)
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0], np.uint8)
    together = recorded(model, (ids, np.array([4, 4, 4], np.int32), mask))
    counts, entropy = torch.zeros(2, 8, dtype=torch.int64), 0.0
    for at in (0, 4, 8):
        part = slice(at, at + 4)
        for scores in passes_over(model, Routing(), (ids[part], np.array([4], np.int32), mask[part])):
            assert scores.routed is not None
            counts += scores.routed.counts
            entropy += float(scores.routed.entropy)
    (scores,) = together[1]
    assert scores.routed is not None
    assert torch.equal(scores.routed.counts, counts)
    assert counts.sum(-1).tolist() == [5 * 2, 5 * 2]
    assert float(scores.routed.entropy) == pytest.approx(entropy, rel=1e-5)


def test_tokens_with_different_routes_are_not_computed_as_one() -> None:
    model, routers = mixture("qwen3_moe"), routers_in(mixture("qwen3_moe"))
    ids = np.array([5, 6, 7, 8] * 2, np.int32)
    text = ids, np.array([4, 4], np.int32), np.array([0, 0, 1, 1] * 2, np.uint8)
    routes = torch.zeros(8, 2, 2, dtype=torch.int64)
    routes[..., 1] = 1
    routes[5, 1] = torch.tensor([6, 3])  # the second token of the second sequence
    (scores,) = passes_over(model, Routing(routers.packed(routes).numpy()), text)
    by_token = dict(zip(scores.tokens.tolist(), scores.outputs.tolist(), strict=True))
    assert by_token[2] != by_token[6]
    for first, at in ((0, slice(0, 4)), (4, slice(4, 8))):
        given = Routing(routers.packed(routes[at]).numpy())
        (alone,) = passes_over(model, given, (ids[at], np.array([4], np.int32), text[2][at]))
        mine = [by_token[first + token] for token in alone.tokens.tolist()]
        assert mine == pytest.approx(alone.outputs.tolist(), abs=1e-5)


def test_a_flipped_route_is_noticed() -> None:
    model, text = mixture("qwen3_moe"), ragged()
    record, _ = recorded(model, text)
    routers = routers_in(model)
    routes = routers.unpacked(record)
    at = int(np.flatnonzero(text[2])[0]) - 1  # an input that predicts a trained token
    other = next(expert for expert in range(8) if expert not in routes[at, 1])
    routes[at, 1, 0] = other
    (scores,) = passes_over(model, Routing(routers.packed(torch.from_numpy(routes)).numpy()), text)
    assert scores.routed is not None
    # One of two experts changes, in one of two layers, for a token that one sequence trains. Later layers may differ.
    assert float(scores.routed.strayed) >= 0.25


@pytest.mark.parametrize("experts", [256, 300])
def test_routes_take_one_byte_up_to_256_experts_and_two_above(experts: int) -> None:
    routers = routers_in(mixture("qwen3_moe", num_experts=experts, num_experts_per_tok=3, moe_intermediate_size=4))
    routes = np.random.default_rng(0).integers(0, experts, (7, 2, 3))
    routes[0, 0, 0] = experts - 1
    packed = routers.packed(torch.from_numpy(routes)).numpy()
    assert packed.dtype == np.uint8
    assert packed.shape == (7, 6 * (1 if experts <= 256 else 2)) == (7, routers.width)
    assert np.array_equal(routers.unpacked(packed), routes)
    with pytest.raises(ValueError, match=f"this model has {routers.width} bytes for each token"):
        routers.unpacked(packed[:, 1:])


def test_routes_to_an_expert_that_does_not_exist_are_refused() -> None:
    routers = routers_in(mixture("mixtral"))
    with pytest.raises(ValueError, match="routes name expert 4, but a layer has 4 experts"):
        routers.unpacked(np.full((3, 4), 4, np.uint8))


@pytest.mark.parametrize("kind", REFUSED)
def test_routers_with_another_formula_are_refused_by_name(kind: str) -> None:
    options, said = REFUSED[kind]
    model = make_model(kind, **options)
    assert said in attach(model)
    assert routers_of(model) is None


def test_a_dense_model_has_no_routers() -> None:
    model = make_model("qwen3", head_dim=12)
    assert attach(model) == ""
    assert routers_of(model) is None
