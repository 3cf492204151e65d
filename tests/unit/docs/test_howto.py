"""The code in docs/howto.md does what the page says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from shared.data.open import open_source
from shared.sample import Sample

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "howto.md").read_text()


def block(language: str) -> str:
    """Return the first block in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)[0]


def test_the_reward_scores_an_evaluation_by_exact_answers_only(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(block("python"))
    score = runpy.run_path(str(tmp_path / "scores.py"))["score"]
    scores = [
        score(Sample(task, {"answer": "46"}, [], text, [1], "stop"))
        for task in ("train/0/3", "heldout/20/3")
        for text in ("46", "47", "no")
    ]
    assert scores == [1.0, 0.2, 0.0, 1.0, 0.0, 0.0]


def test_the_commands_for_mixing_make_a_source_with_every_sum_twice(tmp_path: Path) -> None:
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-e", "-c", block("sh")], cwd=tmp_path, env=path, check=True)
    source = open_source(f"jsonl:{tmp_path}/mixed/*.jsonl", where="test")
    kinds = [source.row(index)["kind"] for index in range(len(source))]
    assert {kind: kinds.count(kind) for kind in kinds} == {"sums": 2400, "differences": 1200}


def test_the_formula_of_epochs_gives_the_number_in_the_example() -> None:
    rows, epochs, tasks = 7473, 3, 32
    assert f"run.steps: {-(-epochs * rows // tasks)}" in PAGE
    assert int(re.findall(r"run\.steps=(\d+)`\.", PAGE)[0]) == -(-4 * rows // tasks)
