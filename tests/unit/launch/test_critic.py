"""Tests what the launcher does for a critic: its checks before a start, its command, its spare and its resumption."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.checks import model_proof, preflight, resumed
from launch.checks.critic import head_problem
from launch.checks.findings import Findings
from launch.commands.console import show_plan
from launch.commands.evaluation import without_training
from launch.processes.plan import gpus_described, rolling_order, visible_gpus
from launch.spares.processes import spare_kinds
from launch.supervisor.state import SAVES
from proto.tensors import Array
from shared.rpc.errors import RpcError
from shared.topology import Topology, load, snapshot_bytes
from shared.topology.fields import format_size
from shared.topology.models import CRITIC
from shared.topology.passes import FASTEST, Passes, Verdict
from tests.unit.launch.test_resumed import begin, resume

QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
PPO = ("algorithm.advantage={name: gae}", "critic={optimizer: {lr: 1.0e-3}}", "services.reference=null")
NO_KL = "algorithm.kl=null"


def ppo(*overrides: str) -> Topology:
    return load(QUICKSTART, [*PPO, NO_KL, *overrides])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's model in a folder of its own."""
    return Path(shutil.copytree(QUICKSTART.parent / "models" / "tiny-qwen3", tmp_path / "value"))


def found(*overrides: str) -> Findings:
    findings = preflight.check(ppo(*overrides), "t.yaml")
    assert all("\n" not in line for line in (*findings.errors, *findings.warnings))
    return findings


def add_tensors(model: Path, tensors: dict[str, Array]) -> None:
    save_file(load_file(model / "model.safetensors") | tensors, model / "model.safetensors")


def test_a_usable_critic_is_accepted(model: Path) -> None:
    assert found().errors == []
    add_tensors(model, {"score.weight": np.ones((1, 64), np.float32), "score.bias": np.full(1, -0.0, np.float32)})
    assert found(f"critic.model={model}").errors == []


def test_settings_with_older_policies_are_warned_about() -> None:
    (line,) = found("staleness=2").warnings
    assert line.startswith("t.yaml: staleness: 2 with a critic: ")
    assert line.endswith("; use 1 or 0")
    (line,) = found("consume=completion").warnings
    assert line.startswith("t.yaml: consume: completion with a critic: ")


def test_a_critic_has_an_embedding_of_every_token_of_the_policy(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    (line,) = found(f"critic.model={model}").errors
    assert line.startswith(
        f"t.yaml: critic.model: {model} has a vocabulary of 10, but the policy's tokenizer has token "
    )
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 100}))
    assert found(f"critic.model={model}").errors == []


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_value_head_that_the_run_does_not_have_is_refused(dtype: type, model: Path) -> None:
    add_tensors(model, {"score.bias": np.full(1, 0.5, dtype)})
    (line,) = found(f"critic.model={model}").errors
    assert line == (
        f"t.yaml: critic.model: {model}: score.bias is not zero, but a value head has no bias here; use a model "
        "whose head has none"
    )
    add_tensors(model, {"score.bias": np.zeros(2, dtype), "score.weight": np.zeros((2, 64), dtype)})
    assert head_problem(str(model)).startswith(
        "score.weight has shape [2, 64], but a value head has one value per token"
    )


def test_the_files_of_the_critics_folder_are_checked(model: Path) -> None:
    (model / "pytorch_model.bin").touch()
    assert found(f"critic.model={model}").warnings == [f"t.yaml: critic.model: {model}: ignored: pytorch_model.bin"]


def test_every_trained_model_has_passes_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = {model: Verdict("padded", "whole", "modules", model="Value")}
    asked: list[Path] = []

    def prove(_: Topology, trained: object) -> Verdict:
        folder = Path(trained.folder)  # type: ignore[attr-defined]
        asked.append(folder)
        return proofs.get(folder, Verdict("packed", "blocks", "written-out", model="Own"))

    monkeypatch.setattr(model_proof, "prove", prove)
    findings = Findings("t.yaml")
    proved = preflight.prove(ppo(f"critic.model={model}"), findings)
    assert [own.passes for own in proved.trained] == [FASTEST, Passes(sequences="padded")]
    assert len(findings.notes) == len(asked) == 2
    same = preflight.prove(ppo("critic.passes={sequences: padded}"), Findings("t.yaml"))
    assert [own.passes for own in same.trained] == [FASTEST, Passes(sequences="padded")]
    assert len(asked) == 3
    refused = Findings("t.yaml")
    preflight.prove(ppo(f"critic.model={model}", "critic.passes={sequences: packed}"), refused)
    assert refused.errors == ["t.yaml: critic.passes.sequences: packed is not proved for Value; use padded"]


def test_the_plan_shows_the_critic_and_what_all_models_need(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show_plan(ppo(), tmp_path, {})
    shown = capsys.readouterr().out
    assert "MiB of the state of the trainer and the critic, in the same folder as the store" in shown
    assert "\ncritic/0 " in shown
    assert "services.policy_trainer.worker --model critic\n" in shown
    assert "critic/0: weights" in shown


def test_the_snapshots_of_all_models_count() -> None:
    needed = snapshot_bytes(ppo())
    assert 2.0 < needed / snapshot_bytes(load(QUICKSTART)) < 2.001  # the policy's output layer is tied
    (line,) = found(f"checkpoint.memory={needed - 1}").warnings
    assert line.startswith(
        f"t.yaml: checkpoint.memory: snapshots of the trainer and the critic need {format_size(needed)}, but the limit"
    )


def test_a_critic_has_gpus_of_its_own_unless_it_is_colocated() -> None:
    gpus = ("services.policy-trainer.gpus=2", "services.rollout.gpus=1")
    topology = ppo(*gpus)
    assert gpus_described(topology) == "policy-trainer 2, critic 2, rollout 1"
    assert [visible_gpus(topology)[CRITIC, rank] for rank in range(2)] == ["2", "3"]
    shared = ppo("services.policy-trainer.gpus=2", "placement.colocate=[policy-trainer, critic]")
    assert gpus_described(shared) == "policy-trainer 2, critic 2 (the same)"
    assert [visible_gpus(shared)[CRITIC, rank] for rank in range(2)] == ["0", "1"]


def test_the_ranks_of_a_critic_restart_together_before_the_driver_and_may_save() -> None:
    topology = ppo("services.critic.workers=2")
    keys = [(spec.service, spec.instance) for spec in topology.services_plan()]
    order = rolling_order(keys, topology.ranks)
    assert order.index([(CRITIC, 0), (CRITIC, 1)]) < order.index([("policy-trainer", 0)])
    assert CRITIC in SAVES
    assert keys.index((CRITIC, 0)) < keys.index(("policy-trainer", 0))


def test_a_critic_is_a_fork_of_the_trainers_spare() -> None:
    services = ("policy-trainer-worker", "critic", "rollout", "scheduler")
    (kind,) = spare_kinds(ppo(), services)
    assert kind.services == services[:3]
    (kind,) = spare_kinds(ppo("services.critic.backend=megatron"), ("critic",))
    assert "services.policy_trainer.worker.megatron.backend" in kind.imports


def test_an_evaluation_starts_no_critic(tmp_path: Path) -> None:
    evaluates = without_training(ppo("placement.colocate=[policy-trainer, critic]", "services.policy-trainer.gpus=1"))
    assert CRITIC not in {spec.service for spec in evaluates.services_plan()}
    assert evaluates.placement.colocate == ()
    evaluates.dump_resolved(tmp_path / "t.yaml")
    assert load(tmp_path / "t.yaml") == evaluates


def test_a_critic_that_is_added_removed_or_changed_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    file, path = begin(tmp_path / "without", "algorithm.advantage={name: reinforce}")
    with pytest.raises(RpcError, match="different values of critic; resume it with"):
        resume(file, path, *PPO[:2])
    file, path = begin(tmp_path / "with", *PPO[:2])
    with pytest.raises(RpcError, match="different values of critic; resume it with"):
        resume(file, path, "algorithm.advantage={name: reinforce}")
    for change, name in (("critic.value_clip=0.3", "value_clip"), ("algorithm.mini_batch_tasks=2", "mini_batch_tasks")):
        with pytest.raises(RpcError, match=rf"different values of critic\.{name}; resume it with"):
            resume(file, path, *PPO[:2], change)
    assert resume(file, path, *PPO[:2], "run.steps=4").critic is not None


def test_the_model_of_a_critic_is_compared_when_a_run_is_resumed(model: Path) -> None:
    assert resumed._models(ppo()).keys() == {"policy.model"}
    assert resumed._models(ppo(f"critic.model={model}"))["critic.model"] == model


def test_a_worker_of_an_unknown_model_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.policy_trainer.worker", "--run", str(tmp_path), "--model", "teacher"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "services.policy_trainer.worker: --model teacher: no such model; use policy or critic\n"
