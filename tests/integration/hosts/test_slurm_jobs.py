"""Tests the job scripts of `launch/jobs` on a real Slurm cluster of two nodes, with and without Ray."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.hosts.slurm_cluster import SlurmCluster, slurm_cluster
from tests.integration.tiny.harness import QUICKSTART, ROOT, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

JOBS = ROOT / "launch" / "jobs"
LIMIT_S = 300.0
SETS = ("services.batch-store.memory=256MiB", "data.eval={}")


class Job:
    """A job that runs one of our scripts. `path` is the directory of its run."""

    def __init__(self, slurm: SlurmCluster, script: str, path: Path, *sets: str) -> None:
        self.output = path.with_name(f"{path.name}-{script}.out")
        words = [word for each in (*SETS, *sets) for word in ("--set", each)]
        given = {"RUN": str(path), "PYTHON": sys.executable, "VENV": sys.prefix}
        self._slurm = slurm
        self.number = slurm.submit(JOBS / script, self.output, str(QUICKSTART), *words, **given)

    def wait_until(self, what: str, pattern: str) -> None:
        """Wait for a line in the job's output."""

        def found() -> bool:
            text = self.output.read_text() if self.output.exists() else ""
            there = re.search(pattern, text) is not None
            assert there or self._slurm.state(self.number) in ("PENDING", "CONFIGURING", "RUNNING"), text
            return there

        wait_for(what, found, LIMIT_S)

    def end(self) -> str:
        """Wait for the job to end, and return its state."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        wait_for("the end of the job", lambda: self._slurm.state(self.number) in states, LIMIT_S)
        return self._slurm.state(self.number)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_job_without_ray_saves_before_its_time_limit_and_another_job_continues_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with slurm_cluster(tmp_path) as slurm:
        first = Job(slurm, "slurm-srun.sbatch", path, "run.steps=100000")
        first.wait_until("the other node", "host host-0 has joined")
        first.wait_until("training", r"step \d+/")
        # Slurm does the same at the end of the job's time, because of --signal=B:TERM.
        assert slurm.command("scancel", "--batch", "--signal=TERM", first.number).returncode == 0
        assert first.end() == "FAILED"
        last = steps(path)[-1]
        assert (path / "checkpoints" / f"step-{last}").exists()
        second = Job(slurm, "slurm-srun.sbatch", path, f"run.steps={last + 2}")
        assert second.end() == "COMPLETED", second.output.read_text()
        assert steps(path) == list(range(1, last + 3))
        assert (path / "hosts" / "host-0" / "logs" / "rollout-0.jsonl").exists()
        assert not (path / "logs" / "rollout-0.jsonl").exists()
        assert not path.with_name("run.access").exists()


def test_a_job_with_ray_trains_with_the_other_node(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = tmp_path / "run"
    with slurm_cluster(tmp_path) as slurm:
        job = Job(slurm, "slurm-ray.sbatch", path, "run.steps=4")
        job.wait_until("the token", "host host-0 has joined")
        assert path.with_name("run.token").stat().st_mode & 0o077 == 0
        assert job.end() == "COMPLETED", job.output.read_text()
        assert "neither a token" not in job.output.read_text()
        assert steps(path) == [1, 2, 3, 4]
        assert (path / "hosts" / "host-0" / "logs" / "rollout-0.jsonl").exists()
        assert not path.with_name("run.token").exists()


@pytest.mark.parametrize("script", ["slurm-srun.sbatch", "slurm-ray.sbatch"])
def test_a_job_of_one_node_is_refused_with_a_one_line_error(script: str, tmp_path: Path) -> None:
    with slurm_cluster(tmp_path) as slurm:
        output = tmp_path / "out"
        number = slurm.submit(JOBS / script, output, str(QUICKSTART), nodes=1)
        wait_for("the end of the job", lambda: slurm.state(number) == "FAILED", LIMIT_S)
        assert output.read_text() == f"{script}: 1 node, 2 or more needed; submit it with --nodes=2\n"
