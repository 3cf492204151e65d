"""The proof finds the fastest passes with which a model's log-probs and gradients are those of its own library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from services.rollout.engines.passes import SinglePasses, gathered, make_passes
from shared.model import attention, logprobs
from shared.model.load import allow
from shared.model.logprobs import token_logprobs
from shared.model.proof import Verdict, prove
from shared.model.reduced import MAX_PARAMETERS
from shared.topology.passes import FASTEST, Passes
from tests.unit.tiny_models import SIZES, make_model, plain_logprobs, ragged

ROPE: dict[str, Any] = {"rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 8,
    **ROPE,
}
PHI3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": 8,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **ROPE}


def verdict_of(kind: str, longest: int | None = None, **options: Any) -> Verdict:
    return prove(AutoConfig.for_model(kind, **{**SIZES, **options}), longest)


@pytest.mark.parametrize(
    ("kind", "options", "sequences"),
    [
        ("qwen3", {}, "packed"),
        ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4}, "packed"),
        ("modernbert-decoder", {"local_attention": 4}, "packed"),
        ("recurrent_gemma", {"lru_width": 48, "num_hidden_layers": 3, "head_dim": 12}, "padded"),
        ("gpt_oss", {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}, "padded"),
        ("granite_swa", {"head_dim": 12}, "padded"),
    ],
)
def test_the_fastest_right_layout_of_sequences_is_found(kind: str, options: dict[str, Any], sequences: str) -> None:
    verdict = verdict_of(kind, **options)
    assert (verdict.sequences, verdict.head, verdict.refused) == (sequences, "blocks", "")
    assert (sequences == "packed") == (verdict.reasons == [])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "falcon_h1",
            {"lm_head_multiplier": 0.5, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8},
        ),
        ("modernbert-decoder", {"local_attention": 4}),
        ("xlstm", {"hidden_size": 64, "num_heads": 2, "output_logit_soft_cap": 5.0}),
        ("gemma2", {"head_dim": 12, "final_logit_softcapping": 2.0}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)
def test_what_a_model_does_after_its_head_is_done_in_blocks_too(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(kind, dtype=torch.float64, **options)
    verdict = prove(model.config)
    assert verdict.head == "blocks"
    allow(model, verdict.passes)
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 61 * 7)
    ids, lengths, mask = ragged()
    with torch.no_grad():
        found, _ = token_logprobs(model, ids, lengths, mask, 0.7, 64)
        expected = plain_logprobs(model, ids, lengths, mask, 0.7)
    # Some models compute in float32 inside.
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_a_head_whose_result_is_used_as_it_is_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_logits", lambda model, hidden: model.get_output_embeddings()(hidden))
    assert verdict_of("granite", logits_scaling=4.0).head == "whole"
    assert verdict_of("qwen3").head == "blocks"


def test_a_tree_that_forgets_the_window_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own = attention.attend_trees

    def forgets(*arguments: Any, sliding_window: int | None = None, **others: Any) -> Any:
        return own(*arguments, **others)

    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, forgets)
    assert verdict_of("mistral", sliding_window=64).sequences == "padded"
    assert verdict_of("mistral", sliding_window=None).sequences == "packed"


def test_a_model_that_looks_ahead_is_refused() -> None:
    assert "depends on later tokens" in verdict_of("bert").refused
    assert "depends on later tokens" in verdict_of("doge", 20, keep_window_size=16).refused
    assert verdict_of("doge", 16, keep_window_size=16).sequences == "padded"


def test_sequences_that_influence_each_other_run_alone_unless_they_are_short() -> None:
    assert verdict_of("phi3", **PHI3).sequences == "single"
    assert verdict_of("phi3", 9, **PHI3).sequences == "single"
    assert verdict_of("phi3", 8, **PHI3).sequences == "packed"


def test_a_model_that_remembers_earlier_sequences_is_refused_unless_they_are_short() -> None:
    options = {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    assert "those before it" in verdict_of("llama", **options).refused
    assert verdict_of("llama", 64, **options) == verdict_of("llama", 64, **options)
    assert verdict_of("llama", 64, **options).sequences == "packed"


def test_a_large_mixture_is_reduced_with_every_kind_of_layer() -> None:
    kinds = ["full_attention", "linear_attention"] * 24
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=48, layer_types=kinds, num_experts=512)
    verdict = prove(config)
    assert 2 <= verdict.layers < 48
    assert 0 < verdict.parameters <= MAX_PARAMETERS
    assert verdict.sequences == "padded"


def test_a_configuration_that_cannot_be_built_runs_plain_and_says_so() -> None:
    verdict = verdict_of("qwen3", num_attention_heads=5, num_key_value_heads=3)
    assert verdict.passes == Passes()
    assert verdict.reasons[0].startswith("no proof: ")


def longrope() -> Any:
    return make_model("phi3", passes=Passes(sequences="single", head="blocks"), **PHI3)


def test_gradients_do_not_depend_on_the_micro_batch_where_sequences_influence_each_other() -> None:
    model = longrope()
    ids, lengths, mask = ragged(tasks=6)
    assert lengths.min() < 8 < lengths.max()
    found: list[Tensor] = []
    for max_tokens in (16, 4096):
        model.zero_grad()
        values, _ = token_logprobs(model, ids, lengths, mask, 1.0, max_tokens)
        values.sum().backward()
        found.append(torch.cat([values.detach(), *(each.grad.flatten() for each in model.parameters())]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, plain_logprobs(model, ids, lengths, mask, 1.0).float(), rtol=0, atol=1e-5)
    allow(model, FASTEST)
    packed, _ = token_logprobs(model, ids, lengths, mask, 1.0, 4096)
    assert float((packed - values).detach().abs().max()) > 1e-2


@torch.inference_mode()
def test_the_engine_samples_every_row_as_if_it_were_alone() -> None:
    model = longrope()
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 60, (3, 9)))
    lengths = [4, 9, 6]
    rows = [row[-length:] for row, length in zip(ids, lengths, strict=True)]
    passes = make_passes(model, 20)
    assert isinstance(passes, SinglePasses)
    found = passes.begin(ids, lengths)
    order = torch.tensor([2, 0, 0, 1])
    passes = gathered(model, [(passes, order)], 10)
    rows, found = [rows[at] for at in order.tolist()], found[order]
    for step in range(4):
        wanted = torch.stack([model(input_ids=row[None], use_cache=False).logits[0, -1] for row in rows])
        torch.testing.assert_close(found, wanted)
        if step == 2:
            kept = torch.tensor([0, 3])
            passes.keep(kept)
            rows = [rows[at] for at in kept.tolist()]
        tokens = torch.arange(len(rows)) + 7
        found = passes.go_on(tokens)
        rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
