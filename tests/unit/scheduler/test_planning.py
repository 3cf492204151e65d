"""The bound on the prompts of a run: what the stores must be able to hold for them, in a dry run and at the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch.checks import preflight
from services.scheduler.plan import SourcePlan
from services.scheduler.planning import make_plan
from shared.data.open import open_source
from shared.data.source import read_rows
from shared.inputs import Inputs
from shared.rpc.errors import BadInput
from shared.topology import Topology, load, task_bytes
from tests.unit.shared.topology.small_topology import BASE, make, write

CONTEXT = 64
NEW = 8
SHORT = {"prompt": "1+1=", "answer": "2"}


def topology(folder: Path, rows: list[dict[str, str]], *overrides: str, memory: str = "1MiB") -> Topology:
    make(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = BASE.replace(", max_prompt_tokens: 32", "").replace("memory: 1MiB", f"memory: {memory}")
    return load(write(folder, text), overrides)


def refusals(run: Topology) -> list[str]:
    return [line for line in preflight.check(run, "t.yaml").errors if "batch-store.memory" in line]


def test_a_row_that_cannot_fit_the_context_does_not_raise_what_the_stores_must_hold(tmp_path: Path) -> None:
    run = topology(tmp_path, [SHORT, {"prompt": "9" * 2_000_000}, SHORT])
    assert refusals(run) == []
    plan, bad = make_plan(run, tmp_path / "t.yaml")
    assert (len(plan.rows), bad) == (3, [])
    assert plan.task_bytes == task_bytes(run, CONTEXT - NEW)


def test_the_rows_of_several_sources_are_numbered_one_after_another_as_the_run_began(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps(SHORT) + "\n{}\n" + json.dumps(SHORT) + "\n")
    sources = (
        "{a: {source: 'jsonl:rows.jsonl', weight: [[1, 3.0], [5, 1.0]]}, "
        "b: {source: 'jsonl:more.jsonl', system: Answer with the sum alone.}}"
    )
    run = topology(tmp_path, [SHORT] * 4, "data.train.source=null", f"data.train.sources={sources}")
    plan, [bad] = make_plan(run, tmp_path / "t.yaml")
    assert list(plan.rows) == [0, 1, 2, 3, 4, 6]
    assert (bad.index, bad.line) == (1, 2)
    tasks = run.algorithm.tasks_per_step
    assert plan.sources == (SourcePlan(range(4), ((0, 3.0), (4 * tasks, 1.0))), SourcePlan([4, 6], ((0, 1.0),)))
    assert plan.task_bytes == task_bytes(run, CONTEXT - NEW)  # The system message needs room, too.
    read = {key: read_rows(open_source(source, where=key)) for key, source in run.data.sources.items()}
    Inputs({key: rows.digests for key, rows in read.items()}).save(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(SHORT) + "\n")
    again, _ = make_plan(run, tmp_path / "t.yaml")
    assert (again, again.fingerprint()) == (plan, plan.fingerprint())


def test_the_dry_run_and_the_start_refuse_the_same_rows_in_the_same_words(tmp_path: Path) -> None:
    run = topology(tmp_path, [SHORT, {"prompt": "9" * 50}], memory="650000")
    (refused,) = refusals(run)
    assert "services.batch-store.memory: 650000 bytes" in refused
    assert f"prompts have up to {CONTEXT - NEW} tokens (the longest is {tmp_path}/rows.jsonl:2;" in refused
    with pytest.raises(BadInput) as caught:
        make_plan(run, tmp_path / "t.yaml")
    assert str(caught.value).partition(": ")[2] == refused.partition(": ")[2]
    needed = refused.partition("set at least ")[2].partition(" ")[0]
    shutil.rmtree(tmp_path / "model")
    enough = topology(tmp_path, [SHORT, {"prompt": "9" * 50}], memory=needed)
    assert refusals(enough) == []
    make_plan(enough, tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("engine", "config", "longest"),
    [
        ("{engine: vllm}", {}, CONTEXT - NEW),
        ("{engine: vllm, engine_args: {max_model_len: 40}}", {}, 40 - NEW),
        ("{engine: vllm}", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 50 + 256),
        ("{engine: transformers}", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, CONTEXT - NEW),
    ],
)
def test_the_context_is_that_of_the_engine(
    tmp_path: Path, engine: str, config: dict[str, object], longest: int
) -> None:
    make(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT, **config}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "9" * 50}) + "\n")
    text = BASE.replace(", max_prompt_tokens: 32", "").replace("memory: 1MiB", "memory: 4MiB")
    run = load(write(tmp_path, text.replace("  rollout:\n    instances: 2\n", f"  rollout: {engine}\n")))
    plan, _ = make_plan(run, tmp_path / "t.yaml")
    assert plan.task_bytes == task_bytes(run, longest)
