"""Loading a model folder gives the same bits each time, names tied weights once, refuses those that differ, and reports
errors on one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.megatron.files import ModelFiles
from shared.model.load import load_model, load_shapes, named_weights
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


def with_copy(folder: Path, change: float, copy: str = "lm_head.weight", source: str = "embed_tokens.weight") -> Path:
    """Add the weight `copy` to the files in `folder`: the weight whose name ends with `source`, plus `change`."""
    weights = load_file(folder / "model.safetensors")
    [original] = [each for name, each in weights.items() if name.endswith(source)]
    weights[copy] = original + change
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_stored_copy_of_a_tied_weight_stays_tied_and_is_not_saved(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model = load_model(with_copy(folder, 0.0), "float32")
    assert named_weights(model).keys() == stored.keys()
    model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == stored.keys()
    ModelFiles(folder, {name: tuple(each.shape) for name, each in stored.items()})


def test_another_head_than_the_tied_one_is_refused(folder: Path) -> None:
    why = (
        r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight .*; remove lm_head\.weight from the files or"
    )
    check_refused(with_copy(folder, 0.5), why)
    with pytest.raises(RpcError, match=why):
        ModelFiles(folder, {})


@pytest.mark.parametrize(
    ("kind", "head", "source"),
    [
        ("gpt_neox_japanese", "embed_out.weight", "embed_in.weight"),
        ("biogpt", "output_projection.weight", "embed_tokens.weight"),
        ("xlm", "pred_layer.proj.weight", "transformer.embeddings.weight"),
    ],
)
def test_a_head_with_a_name_of_its_own_is_compared_too(kind: str, head: str, source: str, tmp_path: Path) -> None:
    make_model(kind, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert head not in named_weights(load_model(with_copy(tmp_path, 0.0, head, source), "float32"))
    check_refused(with_copy(tmp_path, 0.5, head, source), f"ties {head} to")


def test_weights_of_layers_that_are_tied_are_compared_too(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 10, "n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
    make_model("zamba", tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    source, copy = (f"model.layers.{layer}.shared_transf.feed_forward.down_proj.weight" for layer in (2, 7))
    load_model(with_copy(tmp_path, 0.0, copy, source), "float32")
    check_refused(with_copy(tmp_path, 0.5, copy, source), f"ties {copy} to {source}")


def test_a_missing_head_of_an_untied_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    check_refused(folder, "weights are missing or have the wrong shape: lm_head.weight; save the model again")


@pytest.mark.parametrize("load", [load_model, load_shapes])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nemotron", "TypeError: unsupported operand"),
        ("reformer", "AssertionError: If you want to use"),
        ("musicgen", "StrictDataclassFieldValidationError: Validation error for field 'text_encoder': "),
        ("t5", "ValueError: Unrecognized configuration class"),
        ("nonsense", "ValueError: The checkpoint you are trying to load"),
    ],
)
def test_a_model_that_transformers_cannot_build_is_refused_whatever_it_raises(
    load: Callable[[Path, str], object], kind: str, error: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(RpcError, match=f"cannot be loaded: {error}") as caught:
        load(folder, "float32")
    assert "\n" not in str(caught.value)


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
