"""Tests that a run in which every service and every optional section is turned on starts, restarts and goes on.

It has one store, because every further store needs a host of its own (`tests/integration/hosts`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.processes.plan import command_of
from shared.topology import load
from shared.topology.fields import Section
from tests.golden.topology_keys import section_of
from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    TINY,
    Launched,
    assert_nothing_left,
    ctl,
    free_port,
    launched,
    wait_for,
)
from tests.reward_folder import reward_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUNS = [
    pytest.param(TINY, 30.0, id="tiny"),
    pytest.param("", 120.0, id="real", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]
"""The services that a tiny one replaces, and the seconds in which each process must be READY."""


def everything(folder: Path) -> list[str]:
    """Return the settings that turn on every optional service."""
    return [
        "monitor.samples={}",
        f"monitor.web.listen=127.0.0.1:{free_port()}",
        f"monitor.prometheus.listen=127.0.0.1:{free_port()}",
        "monitor.traces.share=1.0",
        "monitor.wandb={project: p, mode: offline}",
        "monitor.tensorboard={}",
        f"monitor.mlflow.uri=sqlite:///{folder}/mlflow.db",
        "monitor.trackio.project=p",
        "services.rollout.instances=2",
        "algorithm.advantage.name=gae",
        "critic.optimizer.lr=1.0e-3",
        "services.critic={}",
        f"teacher.model={QUICKSTART.parent / 'models' / 'tiny-qwen3'}",
        "services.teacher={}",
        "algorithm.distill.coef=0.1",
        "reward.function=builtin:reward_model",
        f"reward.model={reward_folder(folder / 'classifier')}",
        "services.reward-model={}",
        "run.steps=100000",
        "algorithm.tasks_per_step=8",
        "data.eval.heldout.rows=8",
    ]


def sections_off(section: Section, above: str) -> Iterator[str]:
    """Yield the optional sections in `section` that are turned off."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from sections_off(value, f"{above}.{name}")
        elif value is None and section_of(field.annotation) is not None:
            yield f"{above}.{name}"


class Life(NamedTuple):
    """What `ctl status` shows of a service."""

    state: str
    pid: int
    restarts: int


def lives(here: Launched) -> dict[str, Life]:
    rows = here.status().get("services", [])
    return {f"{row['service']}/{row['instance']}": Life(row["state"], row["pid"], row["restarts"]) for row in rows}


def last_start(here: Launched) -> datetime:
    """Return the time at which the supervisor last started a process."""
    log = [json.loads(line) for line in here.run.log_file("supervisor", 0).read_text().splitlines()]
    return max(datetime.fromisoformat(line["timestamp"]) for line in log if line["event"] == "started")


@pytest.mark.parametrize(("tiny", "limit_s"), RUNS)
def test_a_run_with_every_service_is_detached_outlives_the_start_limit_and_is_restarted(
    tiny: str, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = [*everything(tmp_path), f"run.start_limit_s={limit_s:g}"]
    topology = load(QUICKSTART, settings)
    plan = topology.services_plan()
    programs = [".".join(file.relative_to(ROOT).parent.parts) for file in (ROOT / "services").rglob("__main__.py")]
    assert {command_of(spec.service)[0] for spec in plan} == set(programs)
    # A model on a server would take the place of the teacher's process.
    assert [*sections_off(topology.services, "services")] == ["services.teacher.server"]

    arguments = [part for setting in settings for part in ("--set", setting)]
    with launched(tmp_path / "run", "--detach", *arguments, tiny=tiny, spares=not tiny) as here:
        status, output, errors = here.end(4 * limit_s)
        assert status == 0, output + errors
        first = lives(here)
        assert set(first) == {spec.name for spec in plan}
        assert {life.state for life in first.values()} == {"READY"}
        past = last_start(here) + timedelta(seconds=limit_s + 1)
        wait_for("the end of the start limit", lambda: datetime.now(UTC) > past, 2 * limit_s)
        assert lives(here) == first

        assert ctl(here.path, "restart", "all").returncode == 0

        def restarted() -> bool:
            now = lives(here)
            return set(now) == set(first) and all(
                life.state == "READY" and life.restarts > first[name].restarts for name, life in now.items()
            )

        wait_for("a restart of every service", restarted, 4 * limit_s)
        if not tiny:
            rows = len(here.run.metrics.read_text().splitlines())
            wait_for("more steps", lambda: len(here.run.metrics.read_text().splitlines()) > rows + 2, limit_s)
        assert ctl(here.path, "stop").returncode == 0
        assert_nothing_left(here.run)
