"""Tests which run directory a launcher takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launch.commands import place
from shared.rpc.errors import RpcError
from shared.topology import load
from tests.unit.shared.topology.small_topology import BASE, make, problems, write


def run_of(base: Path, name: str, began: int) -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    os.utime(folder / "run.json", (began, began))
    return folder


def test_a_resume_takes_the_newest_run_with_exactly_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "BASE", tmp_path / "runs")
    topology = load(write(make(tmp_path)))
    with pytest.raises(RpcError, match="no run of 'small' to resume"):
        place.resumable(topology)
    run_of(place.BASE, "small-20260101-000000", 1)
    newest = run_of(place.BASE, "small-20260101-000000-2", 2)
    run_of(place.BASE, "small-model-20260101-000000", 3)
    run_of(place.BASE, "evaluate-small-20260101-000000", 4)
    run_of(place.BASE, "small-copy", 5)
    assert place.resumable(topology) == newest


def test_an_evaluation_gets_a_directory_that_says_so(tmp_path: Path) -> None:
    topology = load(write(make(tmp_path)))
    assert re.fullmatch(r"small-[0-9]{8}-[0-9]{6}", place.default_path(topology).name)
    assert re.fullmatch(r"evaluate-small-[0-9]{8}-[0-9]{6}", place.default_path(topology, evaluates=True).name)


def test_a_training_run_cannot_be_named_like_an_evaluation(tmp_path: Path) -> None:
    make(tmp_path)
    [line] = problems(write(tmp_path, BASE.replace("name: small", "name: evaluate-small")))
    assert "run.name: 'evaluate-small' begins with 'evaluate-', as the names of evaluations do; change it" in line
