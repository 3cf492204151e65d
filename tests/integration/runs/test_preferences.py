"""Tests that kills change no bit of a run that learns from preferences, and that a reward model is trained without an
engine and exported as a classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shared.data import open_source
from shared.model.load import load_model
from tests.integration import parity_run as parity
from tests.integration.tiny.harness import ROOT, processes_of
from tests.integration.whole_cluster import cluster
from tests.unit.tiny_models import plain_values, with_ends

pytestmark = pytest.mark.timeout(400)

RECIPES = ROOT / "launch" / "topologies" / "recipes"
PAIRS = (
    "run.deterministic=true",
    "run.steps=4",
    "checkpoint.every=3",
    "data={train: {source: 'builtin:addition_pairs'}}",
    "reward=null",
    "sampling={max_new_tokens: 8}",
    "algorithm={tasks_per_step: 16, loss: {name: dpo}}",
    "services.rollout.block_tasks=4",
    "services.batch-store.memory=128MiB",
)
"""A small deterministic run without an evaluation set, whose rollout therefore has no engine."""


@pytest.mark.long
def test_kills_change_no_bit_of_a_run_that_learns_from_preferences(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    with parity.start(tmp_path / "undisturbed", small=PAIRS) as run:
        assert run.end() == 0, run.output()
        undisturbed, rows = run.path, run.rows()
    assert rows[0]["preference/loss"] == pytest.approx(0.693147, abs=1e-5)  # policy and reference are the same model
    assert abs(rows[-1]["preference/margin"]) > 1e-3  # the policy has moved
    kills = {1: ("reference", "rollout"), 2: ("policy-trainer-worker",), 3: ("policy-trainer",)}
    with parity.start(tmp_path / "killed", small=PAIRS) as run:
        for step, services in kills.items():
            run.wait_for(f"the commit of step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
        assert parity.differences(undisturbed, run.path) == []
        assert not processes_of(run.path)
        assert not run.run.shm.exists()


def test_a_reward_model_is_trained_without_an_engine_and_exported_as_a_classifier(tmp_path: Path) -> None:
    with cluster(RECIPES / "reward_model.yaml", tmp_path, "run.steps=3", limit_s=300) as run:
        assert run.end() == 0, run.output()
        rows, export = run.rows(), run.path / "export"
        assert not [line for line in run.log("rollout") if "canary" in line["event"] or "drill" in line["event"]]
    assert rows[0]["preference/loss"] == pytest.approx(0.693147, abs=1e-5)  # the head begins with zeros
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert not {name for row in rows for name in row if name.startswith("sync/") or "entropy" in name}
    classifier, loading = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values())
    assert classifier.config.num_labels == 1
    assert classifier.score.weight.abs().max() > 0
    tokenizer, row = AutoTokenizer.from_pretrained(export), open_source("builtin:addition_pairs", where="").row(0)
    ids = tokenizer(row["prompt"] + row["chosen"])["input_ids"]
    own = load_model(export, "float32", "value")
    arrays = with_ends(*(torch.tensor(values).numpy() for values in (ids, [len(ids)], [0] * len(ids))))
    value = plain_values(own, *arrays)[-1]
    assert value.item() == pytest.approx(classifier(torch.tensor([ids])).logits.item(), abs=1e-6)
