"""Tests a whole run on reasoning-gym that is evaluated on a Parquet file and on a saved data set of the same rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from shared.data import open_source
from tests.integration.whole_cluster import Cluster, cluster

TOPOLOGY = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=200"
STEPS = 16
TASKS = 8
HELD_OUT = 16


def write_tables(folder: Path) -> None:
    """Write `rows.parquet`, and `saved` as `Dataset.save_to_disk` does (see tests/unit/shared/saved_dataset)."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    source = open_source(SUMS.replace("size=200", f"size={HELD_OUT}&seed=1"), where="test")
    table = pyarrow.Table.from_pylist([source.row(index) for index in range(HELD_OUT)])
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=5)
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pyarrow.ipc.new_stream(str(folder / "saved" / "data.arrow"), table.schema) as stream:
        stream.write_table(table)


def row_maker(run: Cluster) -> int | None:
    """Return the pid of the process that generates the rollout service's rows."""
    for service in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in service.children() if "services.rollout" in service.cmdline() else ():
                if "shared.data.gym_process" in each.cmdline():
                    return each.pid
    return None


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_trains_on_reasoning_gym_and_evaluates_on_tables_although_its_row_maker_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("reasoning_gym")
    write_tables(tmp_path)
    passes = f"every: {STEPS}, samples: 1, temperature: 0"
    overrides = [
        f"run.steps={STEPS}",
        f"data.train.source={SUMS}",
        f"data.eval={{table: {{source: 'parquet:{tmp_path}/rows.parquet', {passes}}}, "
        f"saved: {{source: 'datasets:{tmp_path}/saved', {passes}}}}}",
        "reward.function=builtin:reasoning_gym",
        f"algorithm.tasks_per_step={TASKS}",
        "algorithm.kl=null",
        "services.reference=null",
    ]
    with cluster(TOPOLOGY, tmp_path, *overrides, limit_s=180) as run:
        run.wait_for("a step", lambda: run.rows() or None)
        first = run.wait_for("the process that makes rows", lambda: row_maker(run))
        os.kill(first, signal.SIGKILL)
        run.wait_for("another process that makes rows", lambda: (row_maker(run) or first) != first)
        assert run.end() == 0, run.output()
        rows = run.rows()
        steps = run.journaled_steps()
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["rollout/tasks_dropped"] for row in rows) == 0
    trained = [task for _, tasks in steps.values() for task in tasks]
    assert len(trained) == len(set(trained)) == STEPS * TASKS
    assert 0 < max(row["reward/mean"] for row in rows) < 1
    for line in (lines[0], lines[-1]):  # These are the same rows, sampled greedily by the same version.
        assert line["eval/table/rows_scored"] == line["eval/saved/rows_scored"] == HELD_OUT
        assert line["eval/table/reward"] == line["eval/saved/reward"]
    assert lines[0]["eval/table/reward"] > 0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_takes_tasks_from_two_sources_by_weights_that_change(tmp_path: Path) -> None:
    for name, first in (("low", 10), ("high", 50)):
        prompts = [(a, b) for a in range(first, first + 40) for b in range(10, 20)]
        rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in prompts)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    low = f"{{source: 'jsonl:{tmp_path}/low.jsonl', weight: 3.0}}"
    high = f"{{source: 'jsonl:{tmp_path}/high.jsonl', weight: [[1, 0.0], [4, 1.0]]}}"
    overrides = [
        "run.steps=6",
        "data.train.source=null",
        f"data.train.sources={{low: {low}, high: {high}}}",
        "data.eval={}",
        f"algorithm.tasks_per_step={TASKS}",
        "algorithm.kl=null",
        "services.reference=null",
        "optimizer.schedule=linear",
    ]
    with cluster(TOPOLOGY, tmp_path, *overrides, limit_s=180) as run:
        assert run.end() == 0, run.output()
        rows_of_run, steps = run.rows(), run.journaled_steps()
    taken = [sum(int(task.rpartition("/")[2]) >= 400 for task in tasks) for _, (_, tasks) in sorted(steps.items())]
    assert taken == [0, 0, 0, TASKS // 4, TASKS // 4, TASKS // 4]
    for row, high_tasks in zip(rows_of_run, taken, strict=True):
        assert "reward/source/low" in row
        assert ("reward/source/high" in row) == (high_tasks > 0)
    rates = [row["policy/lr"] for row in rows_of_run]
    assert rates == pytest.approx([rates[0] * (6 - step) / 6 for step in range(6)])
