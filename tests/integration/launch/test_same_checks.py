"""Tests that a dry run and a start refuse the same inputs with the same lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.shared.topology.small_topology import BASE, make, write

ROOT = Path(__file__).parents[3]


def existing_run(folder: Path) -> list[str]:
    (folder / "taken").mkdir()
    (folder / "taken" / "run.json").write_text("{}")
    return ["--run-dir", "taken"]


def nothing_to_resume(folder: Path) -> list[str]:
    return ["--resume"]


def long_temporary_folder(folder: Path) -> list[str]:
    (folder / ("t" * 90)).mkdir()
    return []


def adapter_beside_weights(folder: Path) -> list[str]:
    (folder / "model" / "adapter_config.json").write_text("{}")
    return []


def wrong_end_token(folder: Path) -> list[str]:
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": "2"}))
    return []


def wrong_signature(folder: Path) -> list[str]:
    (folder / "rw.py").write_text("def rate():\n    return 1.0\n")
    return ["--set", "reward.function=rw:rate"]


def unfit_reward(folder: Path) -> list[str]:
    (folder / "rw.py").write_text("def rate(sample):\n    return float(sample.row['solution'])\n")
    return ["--set", "reward.function=rw:rate"]


def row_without_answer(folder: Path) -> list[str]:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    return []


FAULTS: dict[Callable[[Path], list[str]], str] = {
    existing_run: "holds a run already; choose another or use --resume",
    nothing_to_resume: "no run of 'small' to resume",
    long_temporary_folder: "set TMPDIR to a shorter path",
    adapter_beside_weights: "holds an adapter beside its weights (adapter_config.json)",
    wrong_end_token: "eos_token_id is '2', not a token id or a list of them",
    wrong_signature: "cannot be called as",
    unfit_reward: "rw:rate: raised KeyError: 'solution' (at rw.py:2), called with data.train.source row 0",
    row_without_answer: "rows.jsonl:1) has no field 'answer' (its fields: prompt)",
}


def launched(folder: Path, *options: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cluster", "t.yaml", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_dry_run_and_a_start_refuse_with_the_same_line(tmp_path: Path, fault: Callable[[Path], list[str]]) -> None:
    write(make(tmp_path), BASE)
    options = fault(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if fault is long_temporary_folder:
        environment |= {"TMPDIR": str(tmp_path / ("t" * 90))}
    refused = []
    for more in (["--dry-run"], []):
        done = launched(tmp_path, *options, *more, environment=environment)
        assert done.returncode == 2, done.stderr
        refused.append([line for line in done.stderr.splitlines() if FAULTS[fault] in line])
    assert len(refused[0]) == 1
    assert refused[0] == refused[1]
    assert not (tmp_path / "runs").exists()


def test_no_reward_is_called_if_the_user_says_so(tmp_path: Path) -> None:
    write(make(tmp_path), BASE)
    options = [*unfit_reward(tmp_path), *wrong_end_token(tmp_path), "--dry-run", "--no-call"]
    done = launched(tmp_path, *options, environment=os.environ | {"PYTHONPATH": str(ROOT)})
    [line] = done.stderr.splitlines()
    assert FAULTS[wrong_end_token] in line
