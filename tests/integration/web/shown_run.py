"""Run directories for the page: runs that have ended, with metrics, samples and logs, some of them hostile."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.rundir import RunDir
from shared.samples.record import SampleRecord
from shared.view.look import LOOKS, WorkKind
from tests.integration.tiny.harness import ROOT, environment

HOSTILE = (
    "<img src=x onerror=\"document.body.dataset.broken='yes'\"><script>document.body.dataset.broken='yes'</script>"
    "\x1b[31mred\x1b[0m \u202eright to left\u202c &amp; \x00 end"
)


def ended_run(path: Path, *, steps: int = 120, offset: float = 0.0) -> Path:
    """Make the directory of a run that has ended, with one curve for each panel."""
    RunDir.create(path, shm_root=path.parent / "shm").remove_volatile()
    rows = [row(step, offset) for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return path


def row(step: int, offset: float = 0.0) -> dict[str, float]:
    wave = math.sin(step / 9)
    return {
        "step": step,
        "reward/mean": offset + 1 - math.exp(-step / 50) + 0.03 * wave,
        "policy/entropy": 1.2 - step / 300 + 0.05 * wave,
        "loss/kl": 0.01 * step + offset,
        "policy/grad_norm": 1 + 0.2 * wave,
        "rollout/length_mean": 20 + step / 10,
        "time/step": 0.7,
    }


def add_samples(path: Path, step: int, *records: SampleRecord) -> None:
    folder = path / "samples" / "train"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{step}.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def sample(task: str, number: int, *, step: int, reward: float, text: str = "12") -> SampleRecord:
    """Return a sample whose tokens are the characters of `text`."""
    return SampleRecord(
        task=task,
        sample=number,
        step=step,
        prompt="5+7=",
        completion=text,
        pieces=list(text[:200]),
        token_ids=list(range(len(text[:200]))),
        logprobs=[-0.1 * (index % 20) for index in range(len(text[:200]))],
        train_logprobs=[-0.1 * (index % 20) - 0.05 for index in range(len(text[:200]))],
        reward=reward,
        rewards={"exact_match": reward},
        advantage=reward - 0.5,
        length=len(text),
        finish_reason="stop",
        versions=[step - 1],
    )


def rgb(kind: WorkKind) -> str:
    """Return the colour of a kind of work as a browser states it."""
    digits = LOOKS[kind].color.removeprefix("#")
    return f"rgb({', '.join(str(int(digits[at : at + 2], 16)) for at in (0, 2, 4))})"


@contextlib.contextmanager
def page_of(path: Path) -> Iterator[str]:
    """Serve a run by hand and yield the address of its page."""
    command = [sys.executable, "-m", "launch.monitor", "--web", "--run", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "http://" in line, line
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
