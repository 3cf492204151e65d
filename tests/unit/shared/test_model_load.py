"""Loading a model folder gives the same bits each time, names tied weights once, and reports errors on one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model.load import load_model, named_weights
from shared.rpc.errors import RpcError
from tests.unit.tiny_models import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3", head_dim=12, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_tied_weight_is_named_once(folder: Path) -> None:
    weights = named_weights(load_model(folder, "float32"))
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert set(weights) == set(load_file(folder / "model.safetensors"))


def test_an_untied_head_is_a_separate_weight(tmp_path: Path) -> None:
    make_model("qwen3", head_dim=12, tie_word_embeddings=False).save_pretrained(tmp_path)
    assert "lm_head.weight" in named_weights(load_model(tmp_path, "float32"))


def test_two_loads_of_a_model_give_the_same_bits(folder: Path) -> None:
    first, second = (named_weights(load_model(folder, "float32")) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_model_has_the_requested_dtype(folder: Path) -> None:
    assert {each.dtype for each in load_model(folder, "bfloat16").parameters()} == {torch.bfloat16}


def check_refused(folder: Path, match: str) -> None:
    with pytest.raises(RpcError, match=match) as caught:
        load_model(folder, "float32")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    check_refused(tmp_path / "nothing", "no config.json")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    check_refused(folder, "cannot be loaded")


def test_a_weight_missing_from_the_file_is_refused_rather_than_initialised(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    check_refused(folder, r"model\.layers\.1\.mlp\.up_proj\.weight")


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(RpcError, match="float32"):
        load_model(folder, "int4")


def test_a_padding_token_that_was_sampled_has_a_gradient_like_any_other(folder: Path) -> None:
    """transformers' embedding gives the token's row no gradient, so backends would disagree about such a sample."""
    model = load_model(folder, "float32")
    pad = int(model.config.pad_token_id)  # type: ignore[arg-type, union-attr]
    logits = model(input_ids=torch.tensor([[5, pad, 7, 9]])).logits
    logits[0, 3, 11].backward()
    weight = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    head = torch.autograd.grad(model(input_ids=torch.tensor([[5, 6, 7, 9]])).logits[0, 3, 11], weight)[0]
    assert float(head[pad].abs().max()) == 0  # This is the gradient of that row from the tied output layer.
    assert float(weight.grad[pad].abs().max()) > 1e-4
