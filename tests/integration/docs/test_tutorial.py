"""Runs every block of the tutorial, from "Your own project" onwards, in a folder outside the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.test_snippets import blocks

ROOT = Path(__file__).resolve().parents[3]
TUTORIAL = ROOT / "docs" / "tutorial.md"
STEPS = {"run.steps=20": "run.steps=2", "run.steps=30": "run.steps=3"}


def play(folder: Path, *, until: str = "") -> list[str]:
    """Write the files of the tutorial and run its commands, up to the one that contains `until`. Return the outputs."""
    here = folder
    bin_folder = Path(sys.executable).parent
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"RLBUS": str(ROOT), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    outputs = []
    for language, text in blocks(TUTORIAL):
        if language in ("python", "yaml"):
            found = re.match(r"# (\w+\.(?:py|yaml))\n", text)
            assert found is not None, "a block of the tutorial names no file"
            (here / found[1]).write_text(text)
        elif language == "sh":
            for long, short in STEPS.items():
                text = text.replace(long, short)
            ended = subprocess.run(
                ["bash", "-euc", f"{text}\npwd"], cwd=here, env=environment, capture_output=True, text=True, timeout=500
            )
            assert ended.returncode == 0, f"{text}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
            *lines, last = ended.stdout.splitlines()
            here = Path(last)
            outputs.append("\n".join(lines))
            if until and until in text:
                break
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorials_project_passes_every_startup_check(tmp_path: Path) -> None:
    *_, plan = play(tmp_path, until="--dry-run")
    assert "rollout/0" in plan
    assert not (tmp_path / "sums" / "runs").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tutorials_project_trains_a_model_from_its_own_folder(tmp_path: Path) -> None:
    play(tmp_path)
    runs = tmp_path / "sums" / "runs"
    first = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in first] == [0, 1, 2, 3]
    assert 0 < first[1]["reward/part/exact"] < first[1]["reward/part/length"] <= 1
    second = [json.loads(line) for line in (runs / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in second] == [0, 1, 2]
    assert not (ROOT / "sums").exists()
