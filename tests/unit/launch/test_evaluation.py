"""Tests `--evaluate`: the parts of a topology that it omits, the checkpoints that it accepts, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.commands.evaluation import (
    check_checkpoint,
    table,
    with_checkpoint,
    with_model,
    with_weights,
    without_training,
)
from proto.tensors import Array
from shared.checkpoint_files import LAYOUT, MODEL, OPTIMIZER, STATE, digest
from shared.model.adapter_files import read
from shared.model_folder import from_checkpoint
from shared.rpc.errors import RpcError
from shared.topology import TopologyError, load
from tests.unit.shared.topology.small_topology import make, write

TOPOLOGIES = Path(__file__).resolve().parents[3] / "launch" / "topologies"
WEIGHTS = {"embed": np.ones((4, 3), np.float32), "layer.0": np.ones((3, 3), np.float32), "norm": np.ones(3, np.float32)}


def model(folder: Path, **changed: Array | None) -> Path:
    """Write a model folder with WEIGHTS. `changed` replaces tensors, or removes those whose value is None."""
    folder.mkdir(parents=True)
    weights = {name: each for name, each in {**WEIGHTS, **changed}.items() if each is not None}
    save_file(weights, folder / MODEL)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "hidden_size": 3}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def checkpoint(folder: Path, **changed: Array | None) -> Path:
    """Write a checkpoint with the weights that `model` would write."""
    model(folder, **changed)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).unlink()
    save_file({"step/norm": np.ones(1, np.float32)}, folder / OPTIMIZER)
    files = {name: digest(folder / name) for name in (MODEL, OPTIMIZER)}
    rows = {name: {"bytes": size, "xxh3_64": f"{found:016x}"} for name, (size, found) in files.items()}
    (folder / STATE).write_text(json.dumps({"layout": LAYOUT, "step": 20, "files": rows}))
    return folder


@pytest.mark.parametrize("name", ["quickstart.yaml", "colocate.yaml", "sft.yaml"])
def test_services_that_only_training_needs_are_not_started(name: str, tmp_path: Path) -> None:
    topology = load(TOPOLOGIES / name)
    evaluates = without_training(topology)
    assert evaluates.run.last_step == 0
    assert "reference" not in {spec.service for spec in evaluates.services_plan()}
    assert {spec.name for spec in evaluates.services_plan()} >= {"policy-trainer-worker/0", "rollout/0"}
    assert evaluates.data == topology.data
    evaluates.dump_resolved(tmp_path / "t.yaml")
    assert load(tmp_path / "t.yaml") == evaluates  # services accept the topology that they are given


def test_a_run_that_evaluates_needs_an_evaluation_set(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"run\.evaluate: true, but data\.eval has no evaluation set; add one"):
        load(write(make(tmp_path)), ["run.evaluate=true", "data.eval={}"])


def test_a_metric_that_no_evaluation_produces_is_refused_and_the_nearest_name_suggested(tmp_path: Path) -> None:
    path = write(make(tmp_path))
    several = "data.eval.held={source: builtin:addition, every: 5, temperature: 0.5, samples: 4}"
    for metric in ("accuracy", "reward", "avg@4", "pass@1", "pass@2", "pass@4", "part/form"):
        assert load(path, [several, f"checkpoint.keep_best=eval/held/{metric}"]).checkpoint.keep_best
    refused = {
        "eval/held/acuracy": "use eval/held/accuracy",
        "eval/held/pass@8": "use eval/held/pass@.",
        "eval/other/part/form": "use eval/held/.*",
        "reward/mean": "use eval/held/.*",
    }
    for metric, remedy in refused.items():
        with pytest.raises(TopologyError, match=f"checkpoint.keep_best: no evaluation produces '{metric}'; {remedy}$"):
            load(path, [several, f"checkpoint.keep_best={metric}"])
    with pytest.raises(TopologyError, match=r"there is no evaluation set in data\.eval; add one$"):
        load(path, ["checkpoint.keep_best=eval/held/accuracy", "data.eval={}"])


def test_checkpoints_and_exported_models_of_the_policy_are_accepted(tmp_path: Path) -> None:
    policy = str(model(tmp_path / "policy", **{"lm_head.weight": WEIGHTS["embed"]}))  # An export omits a tied head.
    check_checkpoint(model(tmp_path / "export"), policy)
    check_checkpoint(checkpoint(tmp_path / "checkpoints" / "step-20"), policy)


def test_folders_that_are_not_usable_models_are_refused_with_a_one_line_error(tmp_path: Path) -> None:
    policy = str(model(tmp_path / "policy"))
    steps = tmp_path / "checkpoints"
    checkpoint(steps / "step-20")
    damaged = checkpoint(steps / "step-40")
    data = bytearray((damaged / MODEL).read_bytes())
    data[-1] ^= 1
    (damaged / MODEL).write_bytes(data)
    wide, deep = np.ones((4, 5), np.float32), np.ones((3, 3), np.float32)
    refused = {
        steps / "step-30": "no such folder; available: step-20, step-40",
        tmp_path / "nowhere": "no such folder; name RUN/checkpoints/step-N or RUN/export",
        steps: r"holds neither state\.json \(a checkpoint\) nor config\.json \(an exported model\)",
        damaged: r"model\.safetensors is not what was written \(checksum\)",
        checkpoint(steps / "wide", embed=wide): r"different model than .*embed is \[4, 5\], not \[4, 3\]$",
        model(tmp_path / "deep", **{"layer.1": deep}): r"different model .*: layer\.1 is unknown$",
        model(tmp_path / "flat", **{"layer.0": None}): r"different model .*: layer\.0 is missing$",
    }
    for path, text in refused.items():
        with pytest.raises(RpcError, match=text) as caught:
            check_checkpoint(path, policy)
        assert "\n" not in str(caught.value)


def test_a_model_made_from_a_checkpoint_outlives_it_and_states_its_data_type(tmp_path: Path) -> None:
    topology = with_model(load(write(make(tmp_path))), model(tmp_path / "policy"))
    step = checkpoint(tmp_path / "step-20", embed=np.full((4, 3), 7, np.float32))
    bits = (step / MODEL).read_bytes()
    made = tmp_path / "made"
    for _ in range(2):  # The second result replaces the first.
        from_checkpoint(step, Path(topology.policy.model), made, topology.policy.dtype)
    for each in step.iterdir():
        each.unlink()
    assert (made / MODEL).read_bytes() == bits
    assert json.loads((made / "config.json").read_text()) == {"hidden_size": 3, "dtype": topology.policy.dtype}
    assert sorted(each.name for each in made.iterdir()) == ["config.json", MODEL, "tokenizer.json"]
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_the_checkpoint_of_an_adapter_is_evaluated_as_an_adapter_over_the_policy(tmp_path: Path) -> None:
    topology = load(write(make(tmp_path)), ["policy.lora={rank: 2}"])
    topology = topology.model_copy(
        update={"policy": topology.policy.model_copy(update={"model": str(model(tmp_path / "policy"))})}
    )
    policy, lora = topology.policy.model, topology.policy.lora
    step = checkpoint(tmp_path / "step-20")
    adapter = {"layer.0.lora_A": np.ones((2, 3), np.float32), "layer.0.lora_B": np.ones((3, 2), np.float32)}
    save_file(adapter, step / MODEL)
    size, found = digest(step / MODEL)
    state = json.loads((step / STATE).read_text())
    state["files"][MODEL] = {"bytes": size, "xxh3_64": f"{found:016x}"}
    (step / STATE).write_text(json.dumps({**state, "adapter": {"base": "0" * 16, "rank": 2, "alpha": 32.0}}))
    check_checkpoint(step, policy, lora)
    assert with_weights(topology, step) == topology
    evaluated = with_checkpoint(topology, step, tmp_path / ".run", tmp_path / "run").policy
    assert evaluated.lora is not None
    assert lora is not None
    assert (evaluated.model, evaluated.lora.adapter_path) == (policy, str(tmp_path / "run" / "model" / "adapter"))
    written = tmp_path / ".run" / "model" / "adapter"
    assert [path.name for path in written.parent.iterdir()] == ["adapter"]
    assert read(written, lora, {"layer.0": (3, 3)}).keys() == adapter.keys()
    check_checkpoint(written, policy, lora)
    assert with_weights(topology, written).policy.lora == lora.model_copy(update={"adapter_path": str(written)})
    assert with_weights(topology, model(tmp_path / "export")).policy.lora is None
    for path, other, text in (
        (step, None, r"holds an adapter of rank 2 .*, but the run trains all weights of a model;"),
        (step, lora.model_copy(update={"rank": 4}), r"holds an adapter of rank 2 .* trains an adapter of rank 4 "),
        (checkpoint(tmp_path / "step-40"), lora, r"holds all weights of a model, .* trains an adapter of rank 2 "),
    ):
        with pytest.raises(RpcError, match=text):
            check_checkpoint(path, policy, other)
    with pytest.raises(RpcError, match=r"is an adapter, but the topology has no policy\.lora; add it"):
        with_weights(with_model(topology, tmp_path / "export"), written)


def test_the_table_has_a_line_for_each_set(tmp_path: Path) -> None:
    more = ["data.eval.math={source: builtin:addition, every: 5, temperature: 0.5, samples: 4}"]
    topology = load(write(make(tmp_path)), more)
    row = {"eval/held/rows_scored": 90.0, "eval/held/rows_dropped": 2.0, "eval/held/accuracy": 0.5}
    row |= {"eval/math/rows_scored": 8.0, "eval/math/rows_dropped": 0.0, "eval/math/accuracy": 0.25}
    row |= {"eval/math/avg@4": 0.25, "eval/math/pass@4": 0.625}
    assert [line.split() for line in table(topology, row)] == [
        ["set", "rows", "samples", "accuracy", "avg@k", "pass@k", "dropped"],
        ["held", "90", "1", "0.500", "-", "-", "2"],
        ["math", "8", "4", "0.250", "0.250", "0.625", "0"],
    ]
    more = {"eval/math/pass@1": 0.25, "eval/math/pass@2": 0.4, "eval/math/part/form": 0.75}
    assert table(topology, row | more)[3:] == ["math: pass@1 0.250, pass@2 0.400, form 0.750"]
    graded = row | {"eval/held/reward": 0.5, "eval/math/reward": 0.25}
    assert "accuracy" in table(topology, graded)[0]
    del graded["eval/math/accuracy"]
    assert [line.split()[3] for line in table(topology, graded)] == ["reward", "0.500", "0.250"]
    assert table(topology, {})[1].split() == ["held", "0", "1", "-", "-", "-", "0"]
