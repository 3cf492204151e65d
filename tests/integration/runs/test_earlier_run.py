"""Resumes a run directory that was made by an earlier release, of which `tests/data/earlier_run.tar.gz` is a copy.

A deterministic run of a model with 3,600 parameters was killed, with all its processes, after step 3 of 6. Its newest
checkpoint, which holds an earlier version, too, is that of step 2. The shards in memory are gone, so step 3 is trained
again.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from shared.rundir import checkpoint_steps
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

EARLIER = ROOT / "tests" / "data" / "earlier_run.tar.gz"
SAVED, STEPS = 2, 6


@pytest.mark.timeout(300)
def test_a_run_directory_of_an_earlier_release_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    with tarfile.open(EARLIER) as archive:
        archive.extractall(tmp_path, filter="data")
    topology = tmp_path / "run" / "topology.yaml"
    topology.write_text(topology.read_text().replace("/earlier/", f"{tmp_path}/"))
    began = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [SAVED]
    with cluster(tmp_path / "small.yaml", tmp_path, limit_s=280, resume=True) as run:
        assert run.end() == 0, run.output()
        [loaded] = [line for line in run.log("policy-trainer") if line["event"] == "workers loaded"]
        assert (loaded["source"], loaded["step"]) == ("checkpoint", SAVED)
        assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
        assert (run.path / "metrics.jsonl").read_text().splitlines()[:SAVED] == began[:SAVED]
        assert checkpoint_steps(run.path / "checkpoints") == [STEPS]
        assert (run.path / "export" / "model.safetensors").stat().st_size > 0
