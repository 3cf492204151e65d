"""Tests the check, before a start, that rows have the answers that a run learns from, and that of a value head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.checks import preflight
from launch.checks.critic import check_head
from launch.checks.findings import Findings
from launch.checks.sources import check_answers
from shared.topology import load
from tests.unit.rollout.rollout_engine import MODEL

TOPOLOGY = """\
run: {{name: pairs, steps: 3}}
policy: {{model: {model}, head: {head}}}
data: {{train: {{source: "jsonl:rows.jsonl", max_prompt_tokens: 32}}}}
sampling: {{max_new_tokens: 8}}
algorithm: {{tasks_per_step: 2, loss: {{name: {loss}}}}}
optimizer: {{lr: 1.0e-3}}
"""
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def found(
    folder: Path, *rows: dict[str, Any], loss: str = "simpo", head: str = "language", model: Path = MODEL
) -> Findings:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "t.yaml"
    path.write_text(TOPOLOGY.format(model=model, loss=loss, head=head))
    topology, findings = load(path), Findings("t.yaml")
    for key, source in preflight.sources(topology).items():
        preflight._check_rows(topology, source, key, None, findings)
    for check in (check_answers, check_head):
        assert check in preflight.CHECKS
        check(topology, findings)
    return findings


def test_rows_with_both_answers_pass(tmp_path: Path) -> None:
    found(tmp_path, PAIR)
    made = preflight.check(load(tmp_path / "t.yaml"), "t.yaml")
    assert not made.errors
    assert not made.warnings


def test_a_source_whose_rows_lack_an_answer_is_an_error(tmp_path: Path) -> None:
    (error,) = found(tmp_path, {"prompt": "1+1=", "chosen": "2"}, {"prompt": "1+1=", "answer": "2"}).errors
    assert "data.train.source: 2 of the first 2 rows cannot be trained on; the first is " in error
    assert "rows.jsonl:1: row has no rejected: a preference needs chosen and rejected" in error


def test_single_rows_that_lack_an_answer_are_a_warning(tmp_path: Path) -> None:
    made = found(tmp_path, PAIR, {**PAIR, "rejected": None})
    assert not made.errors
    assert any("1 of the first 2 rows cannot be trained on" in line for line in made.warnings)


@pytest.mark.parametrize("bias", [0.0, 0.25])
def test_a_reward_model_that_begins_with_a_bias_is_an_error(tmp_path: Path, bias: float) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "score.bias": np.full(1, bias, np.float32)}, model / "model.safetensors")
    errors = found(tmp_path, PAIR, loss="bradley_terry", head="value", model=model).errors
    assert [line for line in errors if "score.bias is not zero" in line] == (errors if bias else [])
    assert bool(errors) == bool(bias)
