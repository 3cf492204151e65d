"""Checks that the trace of a model whose loaders slice and fuse weights finds each weight's place and reports wrong
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from services.rollout.engine import WeightsMismatch
from services.rollout.engines.proof.load_trace import LoadTrace, Proof, WeightPart
from services.rollout.engines.proof.weights import check_proofs
from shared.weights.digests import digests_of
from shared.weights.weight_set import WeightSet

pytestmark = pytest.mark.slow

Loader = Callable[[Iterable[tuple[str, Tensor]]], None]
VOCABULARY, PADDED, HIDDEN, HEADS, KEY_HEADS, INNER = 10, 16, 8, 4, 1, 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Attention(nn.Module):
    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, rows, dtype=dtype)
        self.o_proj = nn.Linear(width, HIDDEN, bias=False, dtype=dtype)


class Half(nn.Module):
    """One of two ranks of a small decoder with fused projections, a padded vocabulary, and one key head that is
    on both ranks."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.embed_tokens = nn.Embedding(PADDED // 2, HIDDEN, dtype=dtype)
        self.attention = Attention(HEADS // 2 + 2 * KEY_HEADS, INNER // 2, dtype)
        self.lm_head = nn.Linear(1, 1, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.norm = nn.LayerNorm(HIDDEN, bias=False, dtype=dtype)
        self.skip, self.order = "", ["q_proj", "k_proj", "v_proj"]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name != self.skip:
                self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        rank = self.rank
        if name == "embed_tokens.weight":
            mine = tensor[rank * PADDED // 2 : (rank + 1) * PADDED // 2]
            self.embed_tokens.weight[: len(mine)].data.copy_(mine)
            self.embed_tokens.weight[len(mine) :].data.fill_(0)
        elif name == "norm.weight":
            staged = torch.empty_like(self.norm.weight)  # Like vLLM, this fills a buffer, then copies it into place.
            staged.copy_(tensor)
            self.norm.weight.data.copy_(staged)
            self.norm.weight.data.copy_(self.norm.weight)  # vLLM does this with biases.
        elif name == "attention.o_proj.weight":
            columns = INNER // 2
            self.attention.o_proj.weight.data.copy_(tensor.narrow(1, rank * columns, columns))
        else:
            leaf, kind = name.split(".")[1:]
            begins = {"q_proj": 0, "k_proj": HEADS // 2, "v_proj": HEADS // 2 + KEY_HEADS}
            at = begins[self.order[["q_proj", "k_proj", "v_proj"].index(leaf)]]
            rows = HEADS // 2 if leaf == "q_proj" else KEY_HEADS
            mine = tensor.narrow(0, rank * rows if leaf == "q_proj" else 0, rows)
            getattr(self.attention.qkv_proj, kind).data.narrow(0, at, rows).copy_(mine)


def made(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    shapes["attention.o_proj.weight"] = (HIDDEN, INNER)
    for leaf, rows in (("q_proj", HEADS), ("k_proj", KEY_HEADS), ("v_proj", KEY_HEADS)):
        shapes |= {f"attention.{leaf}.weight": (rows, HIDDEN), f"attention.{leaf}.bias": (rows,)}
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def traced(model: Half, weights: dict[str, Tensor]) -> LoadTrace:
    trace = LoadTrace()
    with trace.over(model):
        model.load_weights(iter(weights.items()))
    return trace


def loaded(model: Half, weights: dict[str, Tensor]) -> Proof:
    return Proof.of(traced(model, weights).proof(model).plain())


def check(proofs: list[Proof], weights: dict[str, Tensor]) -> None:
    check_proofs(proofs, WeightSet.of(weights), digests_of(weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_of_sliced_fused_replicated_and_padded_weights_add_up_across_ranks(dtype: torch.dtype) -> None:
    weights = made(1, dtype)
    proofs = [loaded(Half(rank, dtype), weights) for rank in (0, 1)]
    check(proofs, weights)
    parts = {part for proof in proofs for part, _ in proof.parts}
    assert WeightPart("attention.o_proj.weight", 0, INNER // 2, HIDDEN, INNER // 2) in parts
    assert WeightPart("embed_tokens.weight", 8, 0, 2, HIDDEN) in parts  # Two of the 8 rows are not padding.
    with pytest.raises(WeightsMismatch, match="have wrong bits"):
        check(proofs[:1], weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(made(1, torch.float32)))
def test_each_weight_that_is_missing_stale_or_off_by_a_bit_is_reported(name: str, dtype: torch.dtype) -> None:
    old, new = made(1, dtype), made(2, dtype)
    models = [Half(rank, dtype) for rank in (0, 1)]
    for model in models:
        loaded(model, old)
        model.skip = name
    proofs = [loaded(model, new) for model in models]
    with pytest.raises(WeightsMismatch, match="not all of it was loaded"):
        check(proofs, new)
    for model in models:
        model.skip = ""
    stale = {**new, name: old[name]}
    with pytest.raises(WeightsMismatch, match=f"^1 of 9 parameters have wrong bits: {name}$"):
        check([loaded(model, stale) for model in models], new)
    changed = new[name].clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    with pytest.raises(WeightsMismatch, match=f"^1 of 9 parameters have wrong bits: {name}$"):
        check([loaded(model, {**new, name: changed}) for model in models], new)
    check([loaded(model, new) for model in models], new)


def test_a_weight_overwritten_after_the_load_is_found() -> None:
    weights, models = made(1, torch.float32), [Half(rank, torch.float32) for rank in (0, 1)]
    traces = [traced(model, weights) for model in models]
    with torch.no_grad():
        models[1].attention.qkv_proj.weight[0].mul_(1.01)
    with pytest.raises(WeightsMismatch, match=r"q_proj\.weight$"):
        check([trace.proof(model) for trace, model in zip(traces, models, strict=True)], weights)


def test_swapped_weights_are_found_although_each_is_present() -> None:
    weights, models = made(1, torch.float32), [Half(rank, torch.float32) for rank in (0, 1)]
    for model in models:
        model.order = ["q_proj", "v_proj", "k_proj"]
    with pytest.raises(WeightsMismatch, match=r"qkv_proj\.weight: its parts are in a different order"):
        check([loaded(model, weights) for model in models], weights)


def test_nonzero_padding_is_refused() -> None:
    weights, models = made(1, torch.float32), [Half(rank, torch.float32) for rank in (0, 1)]
    traces = [traced(model, weights) for model in models]
    with torch.no_grad():
        models[1].embed_tokens.weight[-1, 0] = 1
    with pytest.raises(WeightsMismatch, match=r"embed_tokens\.weight: not all of it was loaded"):
        check([trace.proof(model) for trace, model in zip(traces, models, strict=True)], weights)


def test_a_weight_that_a_loader_modifies_is_refused() -> None:
    weights, model = made(1, torch.float32), Half(0, torch.float32)
    load = model.load

    def doubled(name: str, tensor: Tensor) -> None:
        load(name, tensor * 2 if name == "norm.weight" else tensor)

    model.load = doubled  # type: ignore[method-assign]
    with pytest.raises(WeightsMismatch, match=r"norm\.weight: not all of it was loaded"):
        check([loaded(model, weights), loaded(Half(1, torch.float32), weights)], weights)


EXPERTS, EXPERT_ROWS = 3, 4


class Experts(nn.Module):
    """One of two ranks of a layer of experts, as in vLLM: each rank has half of the rows of gate and up projection and
    half of the columns of the down projection."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts, rows = nn.Module(), EXPERT_ROWS // 2
        self.experts.routed_experts = nn.Module()
        self.experts.routed_experts.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * rows, HIDDEN))
        self.experts.routed_experts.w2_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, rows))
        self.rank, self.order, self.halves = rank, list(range(EXPERTS)), ["gate", "up"]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rows, held = EXPERT_ROWS // 2, self.experts.routed_experts
        for name, tensor in weights:
            expert, half = name.split(".")
            at = self.order[int(expert)]
            if half == "down":
                held.w2_weight[at].data.copy_(tensor.narrow(1, self.rank * rows, rows))
            else:
                begin = self.halves.index(half) * rows
                held.w13_weight[at].narrow(0, begin, rows).data.copy_(tensor.narrow(0, self.rank * rows, rows))


def divided(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Divide the weights of all experts as transformers does."""
    for name, tensor in weights:
        halves = {"gate": 0, "up": 1} if name.endswith("gate_up_proj") else {"down": 0}
        for half, index in halves.items():
            whole = tensor.chunk(len(halves), 1)[index].contiguous()
            yield from ((f"{expert}.{half}", whole[expert]) for expert in range(EXPERTS))


def expert_weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"gate_up_proj": (EXPERTS, 2 * EXPERT_ROWS, HIDDEN), "down_proj": (EXPERTS, HIDDEN, EXPERT_ROWS)}
    return {f"experts.{name}": torch.randn(shape, generator=random) for name, shape in shapes.items()}


def experts_loaded(model: Experts, weights: dict[str, Tensor]) -> Proof:
    trace = LoadTrace(divided)
    with trace.over(model):
        model.load_weights(iter(weights.items()))
    return trace.proof(model)


def test_experts_on_two_ranks_are_proved_under_the_names_of_the_version_in_few_parts() -> None:
    weights = expert_weights()
    proofs = [experts_loaded(Experts(rank), weights) for rank in (0, 1)]
    check(proofs, weights)
    whole = WeightPart("experts.down_proj", 0, EXPERT_ROWS // 2, EXPERTS * HIDDEN, EXPERT_ROWS // 2)
    assert [part for part, _ in proofs[1].parts if part.name == "experts.down_proj"] == [whole]


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.down_proj"])
@pytest.mark.parametrize("expert", range(EXPERTS))
def test_an_expert_that_is_stale_or_off_by_a_bit_is_reported(expert: int, name: str) -> None:
    weights = expert_weights()
    for change in (
        lambda values: values.mul_(2),
        lambda values: values.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1),
    ):
        wrong = weights[name].clone()
        change(wrong[expert])
        with pytest.raises(WeightsMismatch, match=f"^1 of 2 parameters have wrong bits: {name}$"):
            check([experts_loaded(Experts(rank), {**weights, name: wrong}) for rank in (0, 1)], weights)


def test_experts_that_a_kernel_permutes_are_refused_by_name() -> None:
    weights, model = expert_weights(), Experts(0)
    load = model.load_weights

    def permuted(weights: Iterable[tuple[str, Tensor]]) -> None:
        load(weights)
        w13 = model.experts.routed_experts.w13_weight
        with torch.no_grad():
            w13.copy_(w13.unflatten(1, (2, -1)).flip(1).flatten(1, 2))  # as for vLLM's FlashInfer kernels

    model.load_weights = permuted  # type: ignore[method-assign]
    with pytest.raises(WeightsMismatch, match=r"routed_experts\.w13_weight: not all of it was loaded"):
        check([experts_loaded(model, weights), experts_loaded(Experts(1), weights)], weights)


@pytest.mark.parametrize(("order", "halves"), [([1, 0, 2], ["gate", "up"]), ([0, 1, 2], ["up", "gate"])])
def test_experts_and_their_halves_in_the_wrong_places_are_reported(order: list[int], halves: list[str]) -> None:
    weights, models = expert_weights(), [Experts(0), Experts(1)]
    for model in models:
        model.order, model.halves = order, halves
    with pytest.raises(WeightsMismatch, match="w13_weight: its parts are in a different order"):
        check([experts_loaded(model, weights) for model in models], weights)
