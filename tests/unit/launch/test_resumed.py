"""Tests which keys may have other values when a run is resumed, and that the documents say the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from launch.checks import resumed
from launch.checks.findings import Findings
from shared.inputs import Inputs
from shared.rpc.errors import RpcError
from shared.topology import Topology, load
from shared.topology.load import written
from tests.unit.shared.topology.small_topology import BASE, make, write
from tests.unit.shared.topology.test_lora import adapter

DOCS = Path(__file__).resolve().parents[3] / "docs"
ALWAYS, DETERMINISTIC = "*Fixed.*", "*Fixed if deterministic.*"
CHANGES = {
    "run.steps": "4",
    "run.seed": "5",
    "policy.dtype": "float32",
    "policy.passes.head": "blocks",
    "data.train.max_prompt_tokens": "31",
    "data.eval.held.every": "7",
    "data.eval.held.rows": "2",
    "data.eval.held.max_new_tokens": "5",
    "reward.timeout_s": "3.0",
    "sampling.temperature": "0.7",
    "staleness": "0",
    "consume": "completion",
    "algorithm.tasks_per_step": "12",
    "algorithm.group_size": "5",
    "algorithm.entropy_coef": "0.1",
    "algorithm.filter_zero_variance.max_refill": "2",
    "algorithm.kl.coef": "0.2",
    "optimizer.lr": "2e-3",
    "services.policy-trainer.threads": "2",
    "services.reference.threads": "2",
    "services.rollout.instances": "1",
    "services.rollout.block_tasks": "2",
    "services.rollout.threads": "2",
    "services.batch-store.memory": "9MiB",
    "monitor.samples.every": "3",
    "checkpoint.every": "7",
    "gc.after": "commit",
    "lease.lease_s": "20.0",
}
"""A key of every section, and of each row of the table of fixed keys, with another value than in the run's topology."""
ONLY_DETERMINISTIC = (
    "policy.passes.head",
    "data.eval.held.max_new_tokens",
    "reward.timeout_s",
    "sampling.temperature",
    "algorithm.entropy_coef",
    "optimizer.lr",
    "services.policy-trainer.threads",
    "services.rollout.instances",
    "services.rollout.threads",
)
"""Keys that are also tried in deterministic mode, where more keys are fixed."""
PASSES = "policy.passes={sequences: packed, head: whole, decoder: modules}"


def begin(folder: Path, *overrides: str) -> tuple[Path, Path]:
    """Return the topology file of a run, and the run's directory."""
    file = write(make(folder), BASE.replace("memory: 1MiB", "memory: 8MiB"))
    path = folder / "run"
    path.mkdir()
    names = {"run": "run", "sockets": str(folder / "sockets"), "shm": str(folder / "shm")}
    (path / "run.json").write_text(json.dumps(names))
    load(file, [PASSES, *overrides]).dump_resolved(path / "topology.yaml")
    Inputs().save(path)
    return file, path


def resume(file: Path, path: Path, *overrides: str) -> Topology:
    """Return the topology with which the launcher would continue the run. Raises RpcError."""
    topology = load(file, overrides)
    if more := resumed.kept(path, topology, written(file, overrides)):
        topology = load(file, [*overrides, *more])
    return resumed.begun(path, topology)[1]


def marked(key: str) -> str:
    """Return the mark of a key in docs/keys.md."""
    named = key.replace(".held.", ".<name>.")
    [row] = re.findall(rf"^\| `{re.escape(named)}` \|.*$", (DOCS / "keys.md").read_text(), re.MULTILINE)
    return next((mark for mark in (ALWAYS, DETERMINISTIC) if mark in row), "")


@pytest.mark.parametrize(
    ("key", "deterministic"), [*((key, False) for key in CHANGES), *((key, True) for key in ONLY_DETERMINISTIC)]
)
def test_keys_are_refused_exactly_where_the_list_of_keys_says_that_they_are_fixed(
    key: str, deterministic: bool, tmp_path: Path
) -> None:
    mode = ["run.deterministic=true"] if deterministic else []
    file, path = begin(tmp_path, *mode)
    changed = [*mode, *([PASSES] if key.startswith("policy.passes") else []), f"{key}={CHANGES[key]}"]
    if marked(key) not in ((ALWAYS, DETERMINISTIC) if deterministic else (ALWAYS,)):
        resume(file, path, *changed)
        return
    with pytest.raises(RpcError) as refused:
        resume(file, path, *changed)
    [named] = str(refused.value).partition("different values of ")[2].partition(";")[0].split(", ")
    assert f"{key}.".startswith(f"{named.replace('*', 'held')}.")


def test_the_page_on_resuming_lists_the_keys_that_are_fixed() -> None:
    text = (DOCS / "stopping.md").read_text()
    always, deterministic = re.findall(r"^\| (?:in every run|also with [^|]*) \| (.*) \|$", text, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", always)) - resumed.PASSES == set(resumed.FIXED)
    assert set(re.findall(r"`([^`]+)`", deterministic)) == {*resumed.FIXED_BITS, *resumed.PASSES}


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_the_length_of_a_deterministic_run_is_fixed_if_a_learning_rate_follows_it(
    deterministic: str, tmp_path: Path
) -> None:
    falling = (f"run.deterministic={deterministic}", "optimizer.schedule=linear")
    file, path = begin(tmp_path, *falling)
    assert resume(file, path, *falling).run.steps == 3
    if deterministic == "false":
        assert resume(file, path, *falling, "run.steps=4").run.steps == 4
        return
    with pytest.raises(RpcError, match=r"different values of run\.steps; resume it with"):
        resume(file, path, *falling, "run.steps=4")
    for option in ("schedule=cosine", "min_lr=0.0001", "decay_steps=9"):
        with pytest.raises(RpcError, match=rf"different values of optimizer\.{option.partition('=')[0]}"):
            resume(file, path, *falling, f"optimizer.{option}")


def test_the_length_of_a_deterministic_run_may_change_if_decay_steps_is_given(tmp_path: Path) -> None:
    given = ("run.deterministic=true", "optimizer={lr: 1.0e-3, schedule: linear, decay_steps: 9}")
    file, path = begin(tmp_path, *given)
    assert resume(file, path, *given, "run.steps=4").run.steps == 4


def test_another_number_of_rollouts_keeps_the_tasks_per_lease(tmp_path: Path) -> None:
    file, path = begin(tmp_path)
    assert load(file).services.rollout.block_tasks == 3
    assert load(file, ["services.rollout.instances=1"]).services.rollout.block_tasks == 6
    topology = resume(file, path, "services.rollout.instances=1")
    assert (topology.services.rollout.instances, topology.services.rollout.block_tasks) == (1, 3)


def test_tasks_per_lease_that_the_user_writes_are_refused_by_name(tmp_path: Path) -> None:
    file, path = begin(tmp_path)
    with pytest.raises(RpcError, match=r"different values of services\.rollout\.block_tasks; resume it with"):
        resume(file, path, "services.rollout.instances=1", "services.rollout.block_tasks=6")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("policy.lora.rank=16", "policy.lora.rank"),
        ("policy.lora.alpha=16.0", "policy.lora.alpha"),
        ("policy.lora.target_modules=[q_proj]", "policy.lora.target_modules"),
        ("policy.lora.exclude_modules=[q_proj]", "policy.lora.exclude_modules"),
        ("policy.lora=null", "policy.lora"),
        ("policy.model=./other", "policy.model"),
        ("services.reference={}", "services.reference"),
    ],
)
def test_another_adapter_or_base_is_refused_by_name(change: str, named: str, tmp_path: Path) -> None:
    file, path = begin(tmp_path, "policy.lora={rank: 8}")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    assert resume(file, path, "policy.lora={rank: 8}").policy.lora is not None
    with pytest.raises(RpcError, match=f"different values of {re.escape(named)}; resume it with"):
        resume(file, path, "policy.lora={rank: 8}", change)


def test_the_files_of_a_base_and_of_the_first_adapter_are_compared(tmp_path: Path) -> None:
    file = write(make(tmp_path), BASE.replace("memory: 1MiB", "memory: 8MiB"))
    topology = load(file, [f"policy.lora={{rank: 32, adapter_path: {adapter(tmp_path)}}}"])
    then = resumed.inputs_now(topology, {}, Inputs())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= then.models["policy.lora.adapter_path"].keys()
    for key, changed in (
        ("policy.lora.adapter_path", "adapter/adapter_config.json"),
        ("policy.model", "model/config.json"),
    ):
        with (tmp_path / changed).open("a") as stream:
            stream.write(" ")
        findings = Findings()
        resumed.compare(tmp_path, topology, then, resumed.inputs_now(topology, {}, then), findings)
        assert any(line.startswith(f"{key}: ") and "restore it" in line for line in findings.errors)
