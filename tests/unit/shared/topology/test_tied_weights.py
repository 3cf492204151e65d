"""Tied tensors are recognized in the files of every architecture, and compared by value in every type and layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shared.topology import tied_weights
from shared.topology.model_files import Stored, named_shapes, tied_tables
from tests.unit.tiny_models import SIZES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FEW = ("qwen3", "gpt2", "gpt_neox_japanese", "biogpt", "modernbert-decoder", "falcon_mamba", "opt")


def table(rows: int = 61) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    """Write a model with a file for each tensor."""
    files = {name: f"model-{index}.safetensors" for index, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name], "other": torch.zeros(3)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    settings = {"tie_word_embeddings": True, "vocab_size": 61} | config
    (folder / "config.json").write_text(json.dumps({key: each for key, each in settings.items() if each is not None}))
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_copy_is_equal_in_its_own_type_and_its_last_element_counts(dtype: torch.dtype, tmp_path: Path) -> None:
    embedding = table().to(dtype)
    head = embedding.clone()
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: head, EMBEDDING: embedding})) == ""
    head[-1, -1] = head[-1, -1].float() + 1
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: head, EMBEDDING: embedding})) == (
        "config.json ties lm_head.weight to model.embed_tokens.weight (tie_word_embeddings: true), but they differ in "
        "the model's files; remove lm_head.weight from the files or, to keep it as a separate weight, set "
        "tie_word_embeddings to false"
    )


def test_types_that_differ_are_compared_by_value(tmp_path: Path) -> None:
    head, embedding = table(), table().bfloat16()
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: head, EMBEDDING: embedding})) == ""
    head[0, 0] += 1e-3  # This difference is smaller than the precision of bfloat16.
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: head, EMBEDDING: embedding}))
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: table().to(torch.float8_e4m3fn), EMBEDDING: table()}))


def test_a_table_longer_than_a_block_is_compared_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_weights, "_BLOCK", 100)
    head = table()
    head[-1, -1] += 1
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: head, EMBEDDING: table()}))
    assert tied_weights.ambiguity(write(tmp_path, {HEAD: table(), EMBEDDING: table()})) == ""


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
        {"tie_word_embeddings": None},
    ],
)
def test_a_separate_head_is_right_unless_the_configuration_ties_it(config: dict[str, Any], tmp_path: Path) -> None:
    model = write(tmp_path, {HEAD: table() + 1, EMBEDDING: table()}, **config)
    assert tied_weights.ambiguity(model) == ""
    assert {HEAD, EMBEDDING} <= named_shapes(model).keys()


def test_the_configuration_of_a_nested_text_model_counts(tmp_path: Path) -> None:
    nested = {"tie_word_embeddings": None, "vocab_size": None}
    text = {"tie_word_embeddings": True, "vocab_size": 61}
    names = {"model.language_model.embed_tokens.weight": table(), HEAD: table() + 1}
    assert "ties lm_head.weight to model.language_model" in tied_weights.ambiguity(
        write(tmp_path, names, **nested, text_config=text)
    )


def test_other_tables_of_the_same_shape_are_not_compared(tmp_path: Path) -> None:
    others = ("transformer.wpe.weight", "model.layers.2.shared_head.head.weight", "mtp.embed_tokens.weight")
    tensors = {EMBEDDING: table()} | {name: table() + 1 for name in others}
    assert tied_weights.ambiguity(write(tmp_path, tensors)) == ""
    pair = {"vision.embedding.weight": table(7), "audio.embedding.weight": table(7) + 1}
    assert tied_weights.ambiguity(write(tmp_path, {EMBEDDING: table()} | pair)) == ""


def check_table(kind: str, **sizes: Any) -> bool:
    """Check that the tensors that a model of `kind` ties to its embedding are recognized, and no others.

    Return False if a model of `kind` cannot be built from `sizes`, or if it ties nothing.
    """
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    try:
        config = cast(Any, CONFIG_MAPPING[kind])(**sizes, tie_word_embeddings=True)
        with torch.device("meta"):
            model = model_class(config)
    except Exception:
        return False
    tensors = model.state_dict(keep_vars=True)
    names_of: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not re.search(r"\.\d+\.", name):
            names_of.setdefault(id(tensor), set()).add(name)
    tied = [names for names in names_of.values() if len(names) > 1]
    if not tied:
        return False
    raw = {"tie_word_embeddings": True, "vocab_size": config.get_text_config().vocab_size}
    stored = {name: Stored(Path(), "F32", tuple(each.shape), 0, 0) for name, each in tensors.items()}
    assert [set(names) for names in tied_tables(raw, stored)] == tied, kind
    return True


@pytest.mark.parametrize("kind", FEW)
def test_the_stored_copies_of_an_embedding_are_recognized(kind: str) -> None:
    assert check_table(kind, **SIZES)


@pytest.mark.long
def test_the_stored_copies_of_an_embedding_are_recognized_in_every_causal_architecture() -> None:
    assert sum(check_table(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= 140
