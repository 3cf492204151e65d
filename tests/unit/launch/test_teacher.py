"""Tests what the launcher does for a teacher: its checks before a start, its command, its spare and its resumption."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.checks import model_proof, preflight, resumed
from launch.checks.distill import vocabulary_problem
from launch.checks.findings import Findings
from launch.commands.evaluation import without_training
from launch.processes.plan import LEASING, command_of, drain_group, gpus_described, rolling_order
from launch.spares.processes import spare_kinds
from shared.rpc.errors import RpcError
from shared.topology import Topology, load, memory_plan
from shared.topology.capacity import parameter_counts
from shared.topology.models import TEACHER
from shared.topology.passes import FASTEST, Passes, Verdict
from tests.unit.launch.test_resumed import begin, resume

QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
MODEL = QUICKSTART.parent / "models" / "tiny-qwen3"
Edit = Callable[[dict[str, Any]], None]


def distilled(model: Path, *overrides: str) -> Topology:
    alone = ("algorithm.distill={}", "algorithm.advantage.name=none", "algorithm.kl=null", "services.reference=null")
    return load(QUICKSTART, [f"teacher={{model: {model}}}", *alone, *overrides])


def errors(model: Path) -> list[str]:
    findings = preflight.check(distilled(model), "t.yaml", calls=False)
    assert all("\n" not in line for line in (*findings.errors, *findings.warnings))
    return findings.errors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's model in a folder of its own."""
    return Path(shutil.copytree(MODEL, tmp_path / "teacher"))


def edit(model: Path, change: Edit) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))


def test_a_teacher_with_the_policys_vocabulary_is_accepted_also_with_more_tokens(model: Path) -> None:
    assert errors(model) == []
    edit(model, lambda tokenizer: tokenizer["model"]["vocab"].update({"more": 9999}))
    assert errors(model) == []


def test_the_first_three_tokens_that_differ_are_named_with_both_texts(model: Path) -> None:
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    texts = {number: text for text, number in vocabulary.items() if number > 3}
    first, second, third, fourth = sorted(texts)[:4]

    def change(tokenizer: dict[str, Any]) -> None:
        own = tokenizer["model"]["vocab"]
        own[texts[first]], own[texts[second]] = second, first
        del own[texts[third]], own[texts[fourth]]

    edit(model, change)
    (line,) = errors(model)
    assert line == (
        f"t.yaml: teacher.model: {model}: "
        f"token {first} is {texts[first]!r} in the policy's tokenizer and {texts[second]!r} in the teacher's; "
        f"token {second} is {texts[second]!r} in the policy's tokenizer and {texts[first]!r} in the teacher's; "
        f"token {third} is {texts[third]!r} in the policy's tokenizer and not in the teacher's; 4 tokens differ; "
        "use a teacher with the policy's vocabulary"
    )


def test_added_tokens_and_lists_of_tokens_are_compared_too(model: Path, tmp_path: Path) -> None:
    edit(model, lambda tokenizer: tokenizer["added_tokens"][0].update({"content": "<other>"}))
    assert vocabulary_problem(str(MODEL), str(model)).startswith(
        "token 0 is '<pad>' in the policy's tokenizer and '<other>' in the teacher's; use"
    )
    for name, words in (("one", ["a", "b"]), ("two", ["a", "c"])):
        (tmp_path / name).mkdir()
        content = {"model": {"vocab": [[word, -1.0] for word in words]}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    assert "token 1 is 'b' in the policy's tokenizer and 'c'" in vocabulary_problem(
        str(tmp_path / "one"), str(tmp_path / "two")
    )


def test_vocabularies_that_cannot_be_compared_or_have_no_embedding_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    (line,) = errors(model)
    assert line.startswith(f"t.yaml: teacher.model: {model} has a vocabulary of 10, but the policy's tokenizer has ")
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").unlink()
    (line,) = errors(model)
    assert line.startswith(f"t.yaml: teacher.model: {model}: {model} has no tokenizer.json that lists its tokens")


def test_a_teacher_has_passes_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = {model: Verdict("padded", "whole", "modules", model="Teacher")}

    def prove(_: Topology, model: object) -> Verdict:
        return proofs.get(model.folder, Verdict("packed", "blocks", "written-out", model="Own"))  # type: ignore[attr-defined]

    monkeypatch.setattr(model_proof, "prove", prove)
    proved = preflight.prove(distilled(model), Findings("t.yaml"))
    assert [own.passes for own in proved.own_models] == [FASTEST, Passes(sequences="padded")]
    refused = Findings("t.yaml")
    preflight.prove(distilled(model, "teacher.passes={sequences: packed}"), refused)
    assert refused.errors == ["t.yaml: teacher.passes.sequences: packed is not proved for Teacher; use padded"]


def test_a_teacher_runs_the_code_of_the_reference_and_drains_like_it(model: Path) -> None:
    topology = distilled(model, "services.teacher={backend: megatron, parallel: {tp: 2}}")
    assert command_of(TEACHER) == ["services.reference", "--model", "teacher"]
    assert command_of("reference") == ["services.reference"]
    assert TEACHER in LEASING
    assert drain_group(TEACHER) == drain_group("reference")
    keys = [(spec.service, spec.instance) for spec in topology.services_plan()]
    assert [(TEACHER, 0), (TEACHER, 1)] in rolling_order(keys, topology.ranks)
    (kind,) = spare_kinds(topology, (TEACHER,))
    assert "services.reference.frozen_megatron" in kind.imports


def test_a_teacher_counts_with_its_own_parameters_and_gpus(model: Path) -> None:
    topology = distilled(model, "services.teacher.gpus=2", "services.rollout.gpus=1", "teacher.dtype=bfloat16")
    assert gpus_described(topology) == "teacher 2, rollout 1"
    elements = parameter_counts(topology)
    assert memory_plan.per_process(topology, elements)[TEACHER, 0] == 2 * elements[TEACHER].whole
    shared = distilled(model, "services.teacher.gpus=1", "services.policy-trainer.gpus=1",
                       "placement.colocate=[policy-trainer, teacher]")  # fmt: skip
    assert gpus_described(shared) == "policy-trainer 1, teacher 1 (the same)"


def test_an_evaluation_starts_no_teacher(model: Path, tmp_path: Path) -> None:
    evaluates = without_training(distilled(model))
    assert TEACHER not in {spec.service for spec in evaluates.services_plan()}
    evaluates.dump_resolved(tmp_path / "t.yaml")
    assert load(tmp_path / "t.yaml") == evaluates


def test_a_teacher_that_is_added_removed_or_changed_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    given = ("teacher={model: ./model}", "algorithm.distill={}")
    file, path = begin(tmp_path / "without")
    with pytest.raises(RpcError, match="different values of teacher; resume it with"):
        resume(file, path, *given)
    file, path = begin(tmp_path / "with", *given)
    with pytest.raises(RpcError, match="different values of teacher; resume it with"):
        resume(file, path)
    with pytest.raises(RpcError, match=r"different values of teacher\.temperature; resume it with"):
        resume(file, path, *given, "teacher.temperature=2.0")
    assert resume(file, path, *given, "algorithm.distill.coef=0.5").teacher is not None


def test_the_model_of_a_teacher_is_compared_when_a_run_is_resumed(model: Path) -> None:
    assert resumed._models(distilled(model))["teacher.model"] == model


def test_a_frozen_model_of_an_unknown_name_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.reference", "--run", str(tmp_path), "--model", "critic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == "services.reference: --model critic: no such model; use reference or teacher or reward-model\n"
    )
