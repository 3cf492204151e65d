"""Tests that the launcher prints the lines that the README shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.commands.console import Console
from launch.supervisor.events import RunEnded, RunOutcome
from launch.viewers.progress import Metrics, Screen, starting_text
from shared.actor.service import ProcessState
from shared.rundir import RunDir, service_name
from shared.topology import load

ROOT = Path(__file__).resolve().parents[3]
ROWS: tuple[dict[str, float], ...] = (
    {"step": 0, "eval/heldout/accuracy": 0.418},
    {"step": 7},
    {"step": 8, "reward/mean": 0.305, "throughput/tokens_per_s": 1792, "time/step": 1.07},
    {"step": 180, "eval/heldout/accuracy": 0.934},
    {"step": 196},
    {"step": 197, "reward/mean": 0.801, "throughput/tokens_per_s": 2094, "time/step": 0.9},
)
POLLED_S = (0.0, 1.0, 2.557, 400.0, 402.0, 404.0)
"""Time at which each row is read."""


def sample() -> list[str]:
    """Return the lines of the README that show the output of the quickstart."""
    block = re.search(r"```\n(run …/.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def test_the_launcher_prints_the_lines_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = load(ROOT / "launch" / "topologies" / "quickstart.yaml")
    path = tmp_path / "runs" / "quickstart-20261128-222940"
    (path / "logs").mkdir(parents=True)
    run = RunDir(path=path, sockets=tmp_path / "sockets", shm=tmp_path / "shm")
    topology.dump_resolved(run.topology)
    console = Console(run, topology, Screen(plain=True))
    console.begin()
    plan = [service_name(spec.service, spec.instance) for spec in topology.services_plan()]
    states = [*[ProcessState.STARTING] * 3, *[ProcessState.WAITING] * (len(plan) - 3)]
    print(starting_text(dict(zip(plan, states, strict=True)), None))
    metrics = Metrics(path, steps=200)
    for row, at in zip(ROWS, POLLED_S, strict=True):
        with run.metrics.open("a") as file:
            file.write(json.dumps({"rollout/staleness_mean": 1.0, **row}) + "\n")
        metrics.poll(at)
        print(metrics.text())
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 200, "eval/heldout/accuracy": 0.926}) + "\n")
    console.summarise(RunEnded(RunOutcome.DONE, "", None))
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "…/").splitlines()
    lines = sample()
    assert len(lines) == 10
    for line in lines:
        name = line.split()[0]
        if name == "report":
            assert [each for each in printed if each.startswith("report     ")]
        elif name == "wall":
            assert [each for each in printed if re.fullmatch(r"wall time  (\d+m)?\d+s", each)]
        else:
            start = line.removesuffix(" …")
            assert [each for each in printed if each.startswith(start) and (each == line or start != line)], line
