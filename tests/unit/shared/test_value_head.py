"""A value model has the weights of its language model without the output layer, takes a reward model's head, refuses
one that it cannot represent, and values the states of ragged sequences as each sequence alone does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from shared.megatron import architecture
from shared.megatron.converter import Converter
from shared.megatron.files import ModelFiles
from shared.model.load import load_model, load_shapes, named_weights
from shared.model.logprobs import score, token_logprobs
from shared.model.value_head import ValueHead, classifier_config
from shared.rpc.errors import BadInput
from shared.topology.passes import FASTEST, Passes
from tests.unit.shared.test_model_load import with_copy
from tests.unit.tiny_models import SIZES, make_model, plain_values, ragged, with_ends

QWEN3: dict[str, Any] = {"head_dim": 12, "tie_word_embeddings": True}
LLAMA4: dict[str, Any] = {"head_dim": 12, "num_local_experts": 2, "intermediate_size_mlp": 64}
LAYOUTS: dict[str, tuple[Passes, str, dict[str, Any]]] = {
    "packed": (FASTEST, "qwen3", QWEN3),
    "packed, whole head": (Passes(sequences="packed"), "qwen3", QWEN3),
    "padded": (Passes(sequences="padded"), "qwen3", QWEN3),
    "single": (Passes(), "qwen3", QWEN3),
    "a base model that the class does not name": (Passes(), "llama4_text", LLAMA4),
}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def language(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a language model."""
    make_model("qwen3", head_dim=12, tie_word_embeddings=request.param).save_pretrained(tmp_path / "language")
    return tmp_path / "language"


def reward_model(folder: Path, labels: int = 1) -> Path:
    """Save a reward model with the class of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **{**SIZES, **QWEN3, "num_labels": labels})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> Path:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pieces_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a rank of megatron-core reads."""
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    shapes = Converter(architecture.read(config, "value"), 1, 1).shapes
    files = ModelFiles(folder, shapes)
    return {name: files(name) for name in shapes}


def test_a_language_model_starts_with_a_head_of_zeros_and_without_its_output_layer(language: Path) -> None:
    weights = named_weights(load_model(language, "bfloat16", "value"))
    head = weights.pop("score.weight")
    assert (head.shape, head.dtype, int(head.count_nonzero())) == ((1, 48), torch.bfloat16, 0)
    expected = named_weights(load_model(language, "bfloat16"))
    expected.pop("lm_head.weight", None)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_the_head_of_a_reward_model_is_taken_and_its_output_layer_may_be_missing(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["score.weight"].count_nonzero() == 48
    for tied in (True, False):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        for weights in (named_weights(load_model(folder, "float32", "value")), pieces_of(folder)):
            assert weights.keys() == stored.keys()
            assert all(torch.equal(weights[name], value) for name, value in stored.items())


def test_megatron_ranks_start_with_the_weights_of_the_torch_model(language: Path) -> None:
    expected, pieces = named_weights(load_model(language, "float32", "value")), pieces_of(language)
    assert pieces.keys() == expected.keys()
    assert all(torch.equal(pieces[name], value) for name, value in expected.items())


def test_a_head_of_another_name_is_reported_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = reward_model(tmp_path)
    capfd.readouterr()
    load_model(folder, "float32", "value")
    assert (capfd.readouterr().err, caplog.messages) == ("", [])
    load_model(with_tensor(folder, "v_head.summary.weight", torch.ones(1, 48)), "float32", "value")
    assert caplog.messages == [f"model {folder}: weights without use: v_head.summary.weight"]


def test_a_bias_of_zero_is_dropped(tmp_path: Path) -> None:
    folder = with_tensor(reward_model(tmp_path), "score.bias", torch.zeros(1))
    assert "score.bias" not in named_weights(load_model(folder, "float32", "value"))
    assert "score.bias" not in pieces_of(folder)


def test_a_bias_is_refused(tmp_path: Path) -> None:
    check_refused(
        with_tensor(reward_model(tmp_path), "score.bias", torch.tensor([-0.5])),
        r"score\.bias is not zero \(up to 0\.5\)",
    )


def test_several_labels_are_refused(tmp_path: Path) -> None:
    check_refused(
        reward_model(tmp_path, labels=3), r"score\.weight has the shape \[3, 48\], and a value head needs \[1, 48\]"
    )


def test_any_other_missing_weight_is_refused(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    check_refused(folder, r"weights are missing .*: model\.layers\.1\.mlp\.up_proj\.weight;")


def check_refused(folder: Path, match: str) -> None:
    for load in (lambda: load_model(folder, "float32", "value"), lambda: pieces_of(folder)):
        with pytest.raises(BadInput, match=match) as caught:
            load()
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)


def test_an_output_layer_that_differs_from_the_embedding_does_not_matter(tmp_path: Path) -> None:
    make_model("qwen3", **QWEN3).save_pretrained(tmp_path)
    folder = with_copy(tmp_path, 0.5)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for weights in (named_weights(load_model(folder, "float32", "value")), pieces_of(folder)):
        assert torch.equal(weights["model.embed_tokens.weight"], expected)


@pytest.mark.parametrize(
    ("kind", "options", "classifier"),
    [
        ("qwen3", QWEN3, "Qwen3ForSequenceClassification"),
        ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4}, "GPT2ForSequenceClassification"),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}, "OPTForSequenceClassification"),
        (
            "zamba",
            {"num_hidden_layers": 10, "n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
            "ZambaForSequenceClassification",
        ),
        ("xlm", {}, None),
    ],
)
def test_shapes_are_those_of_the_weights_and_name_the_class_that_loads_them(
    kind: str, options: dict[str, Any], classifier: str | None, tmp_path: Path
) -> None:
    """OPT's output layer is narrower than its layers, Zamba ties layers, and XLM's classifier has a layer more."""
    make_model(kind, **options).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "value")
    shapes = {name: tuple(each.shape) for name, each in named_weights(model).items()}
    again = named_weights(load_shapes(tmp_path, "float32", "value"))
    assert shapes == {name: tuple(each.shape) for name, each in again.items()}
    written = classifier_config(model.config, shapes)
    assert written.architectures == ([classifier] if classifier else None)
    assert (written.num_labels, written.pad_token_id) == (1, SIZES["pad_token_id"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_those_of_single_sequences(layout: str) -> None:
    passes, kind, options = LAYOUTS[layout]
    model = make_model(kind, dtype=torch.float64, passes=passes, head="value", **options)
    given = with_ends(*ragged())
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(given[0])))
    expected = plain_values(model, *given)
    (expected * weights).sum().backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    found, _ = token_logprobs(model, *given, 1.0, 64)
    (found * weights).sum().backward()
    found, expected = found.detach(), expected.detach()
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    scale = max(float(each.abs().max()) for each in wanted.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - wanted[name]).abs().max()) <= 1e-12 * scale, name


def test_the_value_after_the_last_token_is_the_score_of_the_reward_model(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    ids, lengths, mask = with_ends(*ragged())
    found, _ = token_logprobs(load_model(folder, "float32", "value"), ids, lengths, mask, 1.0, 64)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ends = np.cumsum(lengths)
    with torch.no_grad():
        for begin, end in zip(ends - lengths, ends, strict=True):
            expected = classifier(input_ids=torch.from_numpy(ids[begin : end - 1].astype(np.int64))[None]).logits[0, 0]
            assert float(found[end - 1]) == pytest.approx(float(expected), abs=1e-6)


def test_a_value_has_no_entropy_and_does_not_depend_on_the_temperature() -> None:
    model = make_model("qwen3", head="value", **QWEN3)
    [one], [other] = (list(score(model, *ragged(), heat, 4096, entropy="value")) for heat in (1.0, 0.5))
    assert one.entropy is None
    assert torch.equal(one.outputs, other.outputs)


def test_values_of_16_bit_models_are_not_rounded_to_16_bits() -> None:
    head = ValueHead(2, torch.bfloat16)
    head.weight.data = torch.tensor([[1.0, 2.0**-10]], dtype=torch.bfloat16)
    value = head(torch.ones(1, 2, dtype=torch.bfloat16))
    assert value.dtype == torch.float32
    assert value.item() == 1.0009765625
