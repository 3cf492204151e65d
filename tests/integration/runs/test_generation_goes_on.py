"""Tests that generation and training continue during evaluations and checkpoints. The tests examine the spans that the
processes of one real run reported.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench.time_line import Span, common_s, merged, watch
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.long

STEPS = 11
EVERY = 4
ROWS, SAMPLES = 256, 2
BLOCK, GROUP = 4, 8
LEASES = ROWS * SAMPLES // (BLOCK * GROUP)
"""Number of leases in one evaluation."""
LIMIT_S = 240.0
QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
OVERRIDES = [
    f"run.steps={STEPS}",
    f"data.eval.heldout={{source: 'builtin:addition?split=test', every: {EVERY}, rows: {ROWS}, samples: {SAMPLES}, "
    "temperature: 1}",
    "algorithm.kl=null",
    "services.reference=null",
    "services.rollout.instances=1",
    f"services.rollout.block_tasks={BLOCK}",
    "checkpoint.every=1",
]


@dataclass(frozen=True)
class Seen:
    spans: list[Span]
    rows: list[dict[str, Any]]

    def of(self, process: str, *whats: str) -> list[Span]:
        return [span for span in self.spans if span.process.startswith(process) and span.what in whats]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    with cluster(QUICKSTART, tmp_path_factory.mktemp("goes_on"), *OVERRIDES, limit_s=LIMIT_S) as run:
        opened = run.wait_for("the run's folder", lambda: run.run if (run.path / "run.json").exists() else None)
        spans = asyncio.run(watch(opened, LIMIT_S))
        assert run.end() == 0, run.output()
        rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return Seen(spans, rows)


def test_an_engine_samples_for_training_throughout_an_evaluation(seen: Seen) -> None:
    """During each evaluation, more than half as many leases are sampled for training as for the evaluation. The leases
    that an engine holds when an evaluation begins or ends cannot account for so many."""
    evaluated = sorted(seen.of("rollout/", "evaluate"), key=lambda span: span.began)
    assert len(evaluated) == LEASES * 4
    for first in range(0, LEASES * 3, LEASES):  # After the last evaluation there is nothing left to sample.
        one = evaluated[first : first + LEASES]
        begun, ended = one[0].began, max(span.ended for span in one)
        generated = [span for span in seen.of("rollout/", "generate") if begun < span.began and span.ended < ended]
        assert len(generated) > LEASES / 2


def test_training_continues_while_an_engine_evaluates(seen: Seen) -> None:
    evaluated = merged(seen.of("rollout/", "evaluate"))
    trained = merged(seen.of("policy-trainer-worker/", "ForwardBackward", "OptimStep"))
    assert evaluated
    assert common_s(evaluated, trained) > 0


def test_engines_generate_while_a_checkpoint_is_written(seen: Seen) -> None:
    written = merged(seen.of("policy-trainer-worker/", "SaveCheckpoint"))
    assert len(seen.of("policy-trainer-worker/", "SaveCheckpoint")) >= STEPS
    assert common_s(written, merged(seen.of("rollout/", "generate"))) > 0


def test_evaluations_run_at_step_0_at_the_set_interval_and_at_the_end(seen: Seen) -> None:
    scored = [row["step"] for row in seen.rows if "eval/heldout/accuracy" in row]
    assert scored == [0, EVERY, 2 * EVERY, STEPS]
    for row in seen.rows:
        if row["step"] in scored:
            assert row["eval/heldout/accuracy"] == row["eval/heldout/avg@2"] <= row["eval/heldout/pass@2"]
