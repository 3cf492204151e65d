"""Compares the plain decoder's gradients with those of the model's own modules, for every architecture that it trains,
and checks which models it trains and what it keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.policy_trainer.worker.blocks import recompute_blocks
from shared.model import linear, logprobs, plain_training
from shared.model.passes import allow
from shared.model.plain_training import trains_plainly
from shared.topology.passes import Passes
from tests.unit.rollout.test_plain_decoder import MODELS, model_of
from tests.unit.tiny_models import ragged

TRAINED = {**MODELS, "llama": {"rope_parameters": MODELS["llama"]["rope_parameters"]}}
"""The plain architectures, without the biases that the plain decoder does not train."""


def passed(model: Any, max_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probs and entropies, and the gradients of all parameters, from groups with common prefixes."""
    ids, lengths, mask = ragged(3, tasks=6)
    model.zero_grad()
    found = logprobs.token_logprobs(model, ids, lengths, mask, 0.8, max_tokens, with_entropy=True)
    values = [each for each in found if each is not None]
    (values[0] * torch.linspace(-1, 1, len(ids), dtype=values[0].dtype)).sum().backward()
    return [each.detach() for each in values], [each.grad for each in model.parameters()]


def of_modules(model: Any, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
    with monkeypatch.context() as without:
        without.setattr(logprobs, "trains_plainly", lambda model: False)
        return passed(model, max_tokens)


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize(
    ("onednn", "rows", "max_tokens", "max_logits"),
    [(False, 7, 200, logprobs.MAX_LOGITS), (False, 1000, 40, 400), (True, 7, 200, logprobs.MAX_LOGITS)],
)
def test_values_and_gradients_equal_those_of_the_models_own_modules(
    kind: str, onednn: bool, rows: int, max_tokens: int, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "USES_ONEDNN", onednn)
    monkeypatch.setattr(linear, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(logprobs, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(plain_training, "BLOCK_VALUES", 0)
    monkeypatch.setattr(plain_training, "MIN_BLOCK_ROWS", rows)
    model = model_of(kind, **TRAINED[kind]).requires_grad_(True)
    assert trains_plainly(model)
    wanted = of_modules(model, max_tokens, monkeypatch)
    assert "_RestBackward" in functions_of(model)
    found = passed(model, max_tokens)
    for mine, theirs in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())
    with torch.no_grad():  # a first update must find the probabilities of the pass before it unchanged
        again, _ = logprobs.token_logprobs(model, *ragged(3, tasks=6), 0.8, max_tokens)
    assert torch.equal(again, found[0][0])


def functions_of(model: Any) -> set[str]:
    """Return the names of the functions that autograd would call for the log-probs of `model`."""
    values, _ = logprobs.token_logprobs(model, *ragged(3, tasks=40), 1.0, 4096)
    names, open_ = set(), [values.grad_fn]
    while open_:
        each = open_.pop()
        if each is not None:
            names.add(type(each).__name__)
            open_ += [function for function, _ in each.next_functions]
    return names


def test_less_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3", **TRAINED["qwen3"]).requires_grad_(True)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        functions_of(model)
        plain = sum(kept.values())
        kept.clear()
        monkeypatch.setattr(logprobs, "trains_plainly", lambda model: False)
        functions_of(model)
    assert plain <= 0.75 * sum(kept.values())


def test_only_whole_plain_models_that_are_trained_as_they_are_use_it() -> None:
    def plain(kind: str = "qwen3", **settings: Any) -> Any:
        return model_of(kind, **{**TRAINED[kind], **settings}).requires_grad_(True)

    assert trains_plainly(plain())
    assert not trains_plainly(plain("llama", attention_bias=True))
    assert not trains_plainly(plain("llama", mlp_bias=True))
    assert not trains_plainly(plain().bfloat16())
    frozen = plain()
    frozen.model.norm.weight.requires_grad_(False)
    assert not trains_plainly(frozen)
    recomputed = plain()
    recompute_blocks(recomputed, "layers")
    assert not trains_plainly(recomputed)
    other = plain()
    allow(other, Passes(sequences="packed", head="blocks"))
    assert not trains_plainly(other)
    assert not trains_plainly(nn.Linear(2, 2))
