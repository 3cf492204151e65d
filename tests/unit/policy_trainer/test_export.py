"""Tests that a trained model is exported whatever its generation_config.json says, and a value model as a reward
model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.configuration_utils import PretrainedConfig

from services.policy_trainer.worker.calls.weights import export
from shared import model_folder
from shared.model.load import load_model, named_weights
from shared.rpc.errors import BadInput
from shared.topology.model_files import end_tokens
from shared.topology.models import Head
from tests.unit.policy_trainer.training import one_rank
from tests.unit.rollout.rollout_engine import MODEL
from tests.unit.tiny_models import make_model

SAMPLING: dict[str, Any] = {
    "do_sample": False,
    "temperature": 0.6,
    "top_k": 3,
    "top_p": 0.9,
    "repetition_penalty": 1.5,
    "min_new_tokens": 4,
}
"""Settings as many chat models ship them, which transformers refuses to write."""


def model_with(folder: Path, generation: dict[str, Any] | None) -> Path:
    """Copy the shipped model with this generation_config.json, or without one."""
    shutil.copytree(MODEL, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("generation", [SAMPLING, SAMPLING | {"eos_token_id": [2, 5]}, {"eos_token_id": 5}, None])
def test_a_model_is_exported_with_its_own_settings_and_the_tokens_at_which_sampling_ended(
    tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    model = model_with(tmp_path / "model", generation)
    export(one_rank(model, "float32", max_tokens=64), model, tmp_path / "export")
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    written = json.loads((tmp_path / "export" / "generation_config.json").read_bytes())
    ends = end_tokens(str(model))
    assert written == {**(generation or {}), "eos_token_id": ends[0] if len(ends) == 1 else ends}
    named = GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id
    assert ([named] if isinstance(named, int) else named) == ends


def test_a_value_model_without_a_class_for_sequence_classification_is_exported_without_naming_one(
    tmp_path: Path,
) -> None:
    make_model("xlm").save_pretrained(tmp_path / "model")
    made = one_rank(tmp_path / "model", "float32", max_tokens=64, head="value")
    made.export(tmp_path / "export")
    assert "architectures" not in json.loads((tmp_path / "export" / "config.json").read_bytes())
    expected, read = made.weights(), named_weights(load_model(tmp_path / "export", "float32", "value"))
    assert expected.keys() == read.keys() >= {"score.weight"}
    assert all(torch.equal(read[name], value) for name, value in expected.items())


def test_a_folder_made_from_a_checkpoint_names_the_same_tokens(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", SAMPLING | {"eos_token_id": [2, 5]})
    model_folder.from_checkpoint(model, model, tmp_path / "best", "float32")
    written = json.loads((tmp_path / "best" / "generation_config.json").read_bytes())
    assert written["eos_token_id"] == end_tokens(str(model))


def test_a_configuration_that_cannot_be_written_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("rope_scaling is wrong\nand more")

    monkeypatch.setattr(PretrainedConfig, "save_pretrained", refuse)
    for head in ("language", "value"):
        with pytest.raises(BadInput, match=r"could not be exported, .* its configuration: rope_scaling is wrong; corr"):
            one_rank(MODEL, "float32", max_tokens=64, head=cast(Head, head))
