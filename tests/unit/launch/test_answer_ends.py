"""Tests what the checks before a start say about the tokens at which sampling and trained answers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.checks import preflight
from launch.checks.findings import Findings
from shared.topology import load
from tests.unit.rollout.chat_models import END, EOS, chat_model
from tests.unit.shared.topology.small_topology import make, write

SUPERVISED = ["algorithm.loss.name=cross_entropy", "algorithm.group_size=1", "algorithm.kl=null"]
MESSAGES: dict[str, Any] = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}


def checked(folder: Path, named: int, row: dict[str, Any], *overrides: str) -> Findings:
    """Check a model whose tokenizer ends texts with EOS, whose template ends turns with END, and whose
    generation_config.json names `named`."""
    make(folder)
    chat_model(
        folder / "model", eos="<eos>", generation={"eos_token_id": named}, config={"max_position_embeddings": 64}
    )
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    findings = Findings("t.yaml")
    preflight._check_ends(load(write(folder), list(overrides)), findings)
    return findings


def test_the_tokens_at_which_sampling_ends_are_printed(tmp_path: Path) -> None:
    findings = checked(tmp_path, END, MESSAGES)
    assert (findings.errors, findings.notes) == ([], [f"sampling       ends at the tokens {END}, {EOS}"])


@pytest.mark.parametrize(("row", "end"), [(MESSAGES, END), ({"prompt": "1+1=", "answer": "2"}, EOS)])
def test_the_token_that_ends_trained_answers_is_printed(tmp_path: Path, row: dict[str, Any], end: int) -> None:
    findings = checked(tmp_path, END, row, *SUPERVISED)
    assert findings.errors == []
    assert f"and so do the answers that are trained on: token {end} (data.train.source: " in findings.notes[-1]


def test_answers_at_whose_end_sampling_would_not_stop_are_refused(tmp_path: Path) -> None:
    [error] = checked(tmp_path, EOS, MESSAGES, *SUPERVISED).errors
    assert error.startswith("t.yaml: policy.model: ")
    assert error.endswith("rows.jsonl:1)")
    assert f"ends an answer with token {END}, but sampling ends at [{EOS}] only; add it to eos_token_id" in error
