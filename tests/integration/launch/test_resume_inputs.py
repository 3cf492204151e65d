"""What `--resume` does if the data or the model is no longer that with which the run began."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.tiny.harness import QUICKSTART, ROOT, Launched, environment, launched, wait_for

ROWS = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(80)]
MODEL = QUICKSTART.parent / "models" / "tiny-qwen3"


@dataclass
class Stopped:
    """A run that was stopped, and the options with which it began."""

    path: Path
    data: Path
    model: Path

    @property
    def options(self) -> list[str]:
        named = {"data.train.source": f"jsonl:{self.data}", "policy.model": str(self.model), "run.spares": "false"}
        settings = [f"{key}={value}" for key, value in named.items()] + ["services.batch-store.memory=64MiB"]
        return [word for each in settings for word in ("--set", each)]

    def resume(self, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(self.path), "--resume"]
        return subprocess.run(
            [*command, *self.options, *more],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
            env=environment(),
        )


def stop(here: Launched) -> str:
    here.process.send_signal(signal.SIGINT)
    status, output, errors = here.end()
    assert status == 1, errors
    return output + errors


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("resumed")
    run = Stopped(folder / "run", folder / "train.jsonl", folder / "model")
    run.data.write_text("\n".join(ROWS) + "\n")
    shutil.copytree(MODEL, run.model)
    with launched(run.path, *run.options) as here:
        here.wait_ready()
        stop(here)
    return run


def reverse(run: Stopped) -> None:
    run.data.write_text("\n".join(reversed(ROWS)) + "\n")


def insert(run: Stopped) -> None:
    run.data.write_text("\n".join([*ROWS[:3], ROWS[0], *ROWS[3:]]) + "\n")


def shorten(run: Stopped) -> None:
    run.data.write_text("\n".join(ROWS[:70]) + "\n")


def change_weights(run: Stopped) -> None:
    file = run.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def change_template(run: Stopped) -> None:
    (run.model / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        (
            reverse,
            "data.train.source",
            "row 0 changed; restore them (rows may be added at the end), or begin a new run",
        ),
        (insert, "data.train.source", "row 3 changed; restore them (rows may be added at the end), or begin a new run"),
        (shorten, "data.train.source", "only 70 of 80 are left; restore them"),
        (change_weights, "policy.model", "model.safetensors has changed; restore it, or begin a new run"),
        (change_template, "policy.model", "chat_template.jinja has changed; restore it, or begin a new run"),
    ],
)
def test_changed_inputs_are_refused_in_one_line_before_anything_starts(
    stopped: Stopped, change: Callable[[Stopped], None], key: str, why: str
) -> None:
    before = {path: path.read_bytes() for path in (stopped.data, *stopped.model.iterdir())}
    logs = sorted(path.stat().st_mtime_ns for path in stopped.path.rglob("*"))
    change(stopped)
    try:
        done = stopped.resume("--dry-run") if key == "policy.model" else stopped.resume()
    finally:
        for path in stopped.model.iterdir():
            if path not in before:
                path.unlink()
        for path, content in before.items():
            path.write_bytes(content)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{QUICKSTART}: {key}: ")
    assert f" with which the run in {stopped.path} began: {why}" in line
    assert sorted(path.stat().st_mtime_ns for path in stopped.path.rglob("*")) == logs


def test_other_values_of_fixed_keys_are_refused_in_a_dry_run_too(stopped: Stopped) -> None:
    done = stopped.resume("--dry-run", "--set", "run.seed=7", "--set", "data.eval.heldout.every=10")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "was begun with different values of run.seed, data.eval.*.every; resume it with" in line


def test_a_run_can_continue_with_another_number_of_rollouts(stopped: Stopped) -> None:
    done = stopped.resume("--dry-run", "--set", "services.rollout.instances=2")
    assert done.returncode == 0, done.stderr
    assert "rollout/1 " in done.stdout


def test_the_same_inputs_are_accepted_and_rows_may_be_added_at_the_end(stopped: Stopped) -> None:
    os.utime(stopped.data)
    os.utime(stopped.model / "config.json")
    assert stopped.resume("--dry-run").stderr == ""
    stopped.data.write_text("\n".join([*ROWS, ROWS[0]]) + "\n")
    done = stopped.resume("--dry-run")
    stopped.data.write_text("\n".join(ROWS) + "\n")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.endswith(
        f"1 rows were added since the run in {stopped.path} began, which goes on with its first 80 rows"
    )


def test_a_run_without_a_record_is_resumed_and_recorded(stopped: Stopped) -> None:
    record = stopped.path / "inputs.json"
    before = json.loads(record.read_bytes())
    record.unlink()
    with launched(stopped.path, "--resume", *stopped.options) as here:
        wait_for("a record", record.exists)
        here.wait_ready()
        output = stop(here)
    keys = "data.eval.heldout.source, data.train.source, policy.model"
    assert f"has no record of {keys} from its start, so nothing can be compared there; it is recorded now" in output
    after = json.loads(record.read_bytes())
    assert after["rows"] == before["rows"]
    files = {name: file["digest"] for name, file in before["models"]["policy.model"].items()}
    assert all(files.values())
    assert {name: file["digest"] for name, file in after["models"]["policy.model"].items()} == files
