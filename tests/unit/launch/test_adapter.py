"""Tests what the launcher says about an adapter before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.checks import model_proof, preflight
from launch.checks.findings import Findings
from shared.model.adapter import planned
from shared.topology import Topology, load
from shared.topology.lora import AdapterPlan, Lora
from shared.topology.passes import Verdict
from tests.unit.tiny_models import make_model

pytestmark = pytest.mark.slow
QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapted(*overrides: str) -> Topology:
    return load(QUICKSTART, ["policy.lora.rank=32", "services.reference=null", *overrides])


def proved(topology: Topology) -> Findings:
    findings = Findings("t.yaml")
    preflight.prove(topology, findings)
    return findings


def test_a_start_says_what_is_adapted_trained_and_sent_and_what_is_left_out() -> None:
    findings = proved(adapted("policy.lora.exclude_modules=[k_proj, up_proj]"))
    assert findings.errors == []
    assert findings.notes[1:] == [
        "adapter        q_proj 4, v_proj 4, o_proj 4, gate_proj 4, down_proj 4: trains 221,184 of 1,017,216 parameters "
        "(21.7%); 864.0 KiB a sync",
        "               not adapted: k_proj 4, up_proj 4 (named by exclude_modules)",
        "               not adapted: lm_head 1 (outside the decoder's layers; name it to adapt it)",
    ]


def test_layers_that_cannot_have_an_adapter_are_refused_before_anything_starts() -> None:
    assert proved(adapted("policy.lora.target_modules=[q_proj, qkv]")).errors == [
        "t.yaml: policy.lora.target_modules: qkv is no linear layer of this model; it has down_proj, gate_proj, "
        "k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    ]


def test_a_model_of_which_no_layer_gets_an_adapter_is_refused() -> None:
    nothing = Lora(rank=8, target_modules=("q_proj",), exclude_modules=("q_proj",))
    refused = "policy.lora: no linear layer gets an adapter (named by exclude_modules); correct target_modules"
    assert planned(make_model("qwen3", head_dim=12), nothing) == AdapterPlan(refused=refused)
    gpt2 = make_model("gpt2", n_embd=48, n_layer=2, n_head=4)  # its layers are of a class of their own
    assert planned(gpt2, Lora(rank=8)).refused.startswith("policy.lora: no linear layer gets an adapter")


def test_a_result_is_kept_by_the_layers_and_the_rank_of_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compute(folder: Path, longest: int | None, lora: dict[str, Any] | None) -> Verdict:
        asked.append(lora)
        return Verdict(model="M", cpu_s=1.0)

    monkeypatch.setattr(model_proof, "compute", compute)
    for override in ("rank=32", "rank=16", "alpha=64.0", "exclude_modules=[q_proj]", "export_merged=false", "rank=32"):
        topology = adapted(f"policy.lora.{override}")
        model_proof.prove(topology, topology.policy_model)
    assert [each and (each["rank"], each["exclude_modules"]) for each in asked] == [
        (32, ()),
        (16, ()),
        (32, ("q_proj",)),
    ]


@pytest.mark.parametrize(("rate", "hints"), [("1.0e-4", 1), ("2.0e-4", 0)])
def test_one_line_hints_at_a_learning_rate_that_is_low_for_an_adapter(rate: str, hints: int) -> None:
    for topology, count in ((adapted(f"optimizer.lr={rate}"), hints), (load(QUICKSTART, [f"optimizer.lr={rate}"]), 0)):
        findings = preflight.check(topology, "t.yaml")
        assert findings.errors == []
        assert sum("is low for an adapter" in line for line in findings.warnings) == count
