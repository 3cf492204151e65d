"""Before a run starts, its model's passes are proved once, and a run that they do not allow is refused in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.checks import model_proof, preflight
from launch.checks.findings import Findings
from shared.topology import Topology, load
from shared.topology.capacity import Parameters
from shared.topology.memory_plan import uses
from shared.topology.model_files import vocabulary
from shared.topology.passes import FASTEST, Passes, Verdict

pytestmark = pytest.mark.slow

TOPOLOGIES = Path(__file__).resolve().parents[3] / "launch" / "topologies"
QUICKSTART = TOPOLOGIES / "quickstart.yaml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlbus" / "proofs"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TOPOLOGIES / "models" / "tiny-qwen3", tmp_path / "model"))


def edit(model: Path, **keys: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | keys))


def topology(model: Path, *overrides: str) -> Topology:
    return load(QUICKSTART, [f"policy.model={model}", *overrides])


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a proof was computed")

    monkeypatch.setattr(subprocess, "run", run)


def test_a_model_is_proved_once_in_a_process_of_its_own(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = Findings("t.yaml")
    proved = preflight.prove(topology(model), findings)
    assert proved.policy.passes == FASTEST
    assert findings.errors == []
    assert "sequences packed" in findings.notes[0]
    assert "proved in" in findings.notes[0]
    assert len(list(cache.iterdir())) == 1
    forbid(monkeypatch)
    edit(model, dtype="bfloat16", transformers_version="5.0.0")
    again = Findings("t.yaml")
    assert preflight.prove(topology(model), again).policy.passes == FASTEST
    assert "known" in again.notes[0]
    edit(model, rms_norm_eps=1e-4)
    with pytest.raises(AssertionError, match="was computed"):
        preflight.prove(topology(model), Findings("t.yaml"))
    edit(model, rms_norm_eps=1e-6)
    with pytest.raises(AssertionError, match="was computed"):
        preflight.prove(topology(model, "data.train.max_prompt_tokens=9"), Findings("t.yaml"))


def test_a_damaged_result_is_computed_again(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(folder: Path, longest: int | None, lora: Any) -> Verdict:
        return Verdict(sequences="padded", reasons=["packed: why"], model="M", cpu_s=1.5)

    monkeypatch.setattr(model_proof, "compute", compute)
    assert model_proof.prove(topology(model), topology(model).policy_model).cpu_s == 1.5
    [file] = cache.iterdir()
    assert model_proof.prove(topology(model), topology(model).policy_model).cpu_s is None
    file.write_text('{"sequences": "packed"')
    found = model_proof.prove(topology(model), topology(model).policy_model)
    assert (found.passes, found.cpu_s) == (Passes(sequences="padded"), 1.5)


def test_without_a_proof_in_time_the_run_is_plain_and_says_so(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_proof, "LIMIT_CPU_S", 1)
    findings = Findings("t.yaml")
    found = preflight.prove(topology(model), findings)
    assert found.policy.passes == Passes()
    assert "no proof: limits are 1 s of processor time" in "\n".join(findings.notes)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("refused", "wanted", "line"),
    [
        ("it looks ahead", (), "t.yaml: policy.model: Some cannot be trained: it looks ahead; use another model"),
        (
            "",
            ("policy.passes.sequences=packed",),
            "t.yaml: policy.passes.sequences: packed is not proved for Some; use padded",
        ),
        ("", ("policy.passes.head=blocks",), "t.yaml: policy.passes.head: blocks is not proved for Some; use whole"),
    ],
)
def test_what_is_not_proved_is_refused_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, refused: str, wanted: tuple[str, ...], line: str
) -> None:
    proof = Verdict(sequences="padded", refused=refused, model="Some")
    monkeypatch.setattr(model_proof, "prove", lambda *_: proof)
    findings = Findings("t.yaml")
    preflight.prove(topology(model, *wanted), findings)
    [found] = findings.errors
    assert found.startswith(line)


def test_slower_passes_may_be_chosen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Verdict(sequences="packed", head="blocks", decoder="written-out", model="Some")
    monkeypatch.setattr(model_proof, "prove", lambda *_: proof)
    chosen = preflight.prove(topology(model, "policy.passes.sequences=padded"), Findings("t.yaml"))
    assert chosen.policy.passes == Passes(sequences="padded")


def test_whole_logits_are_part_of_the_memory_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Verdict(sequences="padded", model="Some")
    monkeypatch.setattr(model_proof, "prove", lambda *_: proof)
    findings = Findings("t.yaml")
    found = preflight.prove(topology(model, "algorithm.kl.coef=0.1"), findings)
    assert findings.errors == []
    size = vocabulary(found.policy.model)
    every = uses(found, {"policy": Parameters(1000)}, {}, size)
    logits = {use.key: use.nbytes for use in every if use.what == "logits"}
    tokens = found.services.policy_trainer.max_tokens_per_micro_batch
    assert logits[("policy-trainer-worker", 0)] == tokens * size * 16
    assert ("reference", 0) in logits
    blocks = found.model_copy(update={"policy": found.policy.model_copy(update={"passes": FASTEST})})
    assert not [use for use in uses(blocks, {"policy": Parameters(1000)}, {}, size) if use.what == "logits"]
    many = ("services.policy-trainer.max_tokens_per_micro_batch=100000000000",)
    preflight.prove(topology(model, *many), findings)
    [line] = findings.errors
    assert "logits" in line
    assert "policy.model: its training takes" in line
