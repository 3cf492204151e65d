"""Tests what is said about the files of a model's folder that loaders ignore, prefer or cannot use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.topology.model_files import end_tokens, largest_token, oddities, read_config, stored_tensors

WEIGHTS = {"model.embed.weight": np.zeros((4, 2), np.float32), "model.norm.weight": np.ones(2, np.float32)}


def folder(path: Path, **files: dict[str, np.ndarray]) -> Path:
    """Write safetensors files, whose names are given without their suffix and with `_` for `-`."""
    path.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, path / f"{name.replace('__', '-')}.safetensors")
    return path


def test_a_plain_folder_is_accepted_and_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", model=WEIGHTS)
    assert oddities(str(model)) == ([], [])
    (model / "pytorch_model.bin").touch()
    assert oddities(str(model)) == ([], ["pytorch_model.bin"])


def test_an_adapter_beside_weights_or_alone_is_refused(tmp_path: Path) -> None:
    for name, files in (("beside", {"model": WEIGHTS}), ("without", {})):
        model = folder(tmp_path / name, adapter_model={"lora_A.weight": np.ones((2, 2), np.float32)}, **files)
        (model / "adapter_config.json").write_text("{}")
        [error] = oddities(str(model))[0]
        assert error.startswith(f"holds an adapter {name}")
        assert "adapter_config.json, adapter_model.safetensors" in error
        assert stored_tensors(str(model)).keys() == ({} if name == "without" else WEIGHTS).keys()


def test_names_as_compiled_models_have_them_are_refused(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", model={f"_orig_mod.{name}": value for name, value in WEIGHTS.items()})
    assert oddities(str(model))[0] == [
        "its weights are named as torch.compile wraps them (_orig_mod.model.embed.weight); save the unwrapped model"
    ]


def test_a_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", model=WEIGHTS, model__1=WEIGHTS)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model-1.safetensors")})
    )
    [error] = oddities(str(model))[0]
    assert "which name different weights; remove the one that is out of date" in error


def test_hostile_files_are_read_without_harm(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", model=WEIGHTS)
    os.mkfifo(model / "extra.safetensors")
    os.mkfifo(model / "special_tokens_map.json")
    deep = "[" * 100_000
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (model / name).write_text(deep)
    (model / "tokenizer.json").write_text('{"added_tokens": [{"content": "x"}, 7], "model": {"vocab": {"a": "b"}}}')
    assert stored_tensors(str(model)).keys() == WEIGHTS.keys()
    assert read_config(str(model)) == {}
    assert largest_token(str(model)) is None
    assert end_tokens(str(model)) == []


@pytest.mark.parametrize("header", ['{"w": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', "[" * 100_000])
def test_a_header_that_no_file_can_have_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file: unreadable header"):
        stored_tensors(str(tmp_path))
