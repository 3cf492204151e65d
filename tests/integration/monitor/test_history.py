"""Tests the curves and spans that a late observer receives, even after a rewind, and a client that shares no code with
this repository.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

from proto.messages import History
from shared.stream import Stream
from tests.integration.monitor.played_run import PlayedRun, metrics_row, monitored
from tests.integration.tiny.harness import ROOT

LIMIT_S = 40.0


def test_a_late_observer_gets_curves_and_spans_and_sees_a_rewind(tmp_path: Path) -> None:
    async def scenario(played: PlayedRun) -> list[History]:
        found = []
        async with asyncio.timeout(LIMIT_S), Stream(played.run, ended=lambda: False) as stream:
            played.write_steps(30)
            played.emit_all()
            await played.settle()
            found.append(await stream.history())
            rows = played.run.metrics.read_text().splitlines(keepends=True)[:10]
            again = [json.dumps(metrics_row(step, offset=0.2)) + "\n" for step in range(11, 41)]
            played.run.metrics.write_text("".join([*rows, *again]))
            found.append(await stream.history())
        await played.close()
        return found

    with monitored(tmp_path) as run:
        first, second = asyncio.run(scenario(PlayedRun(run)))
    assert first.steps["reward/mean"].tolist() == list(range(1, 31))
    assert first.values["eval/held-out/accuracy"].tolist() == [metrics_row(20)["eval/held-out/accuracy"]]
    assert first.newest["step"] == 30
    assert {(row.service, row.values["what"]) for row in first.spans} >= {("rollout", "generate"), ("rollout", "lease")}
    assert second.steps["reward/mean"].tolist() == list(range(1, 41))
    assert second.values["reward/mean"][9] == metrics_row(10)["reward/mean"]
    assert second.values["reward/mean"][10] == metrics_row(11, offset=0.2)["reward/mean"]


def test_the_history_of_a_very_long_run_fits_into_one_message(tmp_path: Path) -> None:
    count, names = 20_000, [f"reward/part/{index}" for index in range(200)]

    async def scenario(played: PlayedRun) -> History:
        with played.run.metrics.open("w") as file:
            for step in range(1, count + 1):
                wide = {name: 0.5 for name in names} if step % 5 == 0 else {}
                file.write(json.dumps({"step": step, "reward/mean": step, **wide}) + "\n")
        async with asyncio.timeout(LIMIT_S), Stream(played.run, ended=lambda: False) as stream:
            return await stream.history()

    with monitored(tmp_path) as run:
        found = asyncio.run(scenario(PlayedRun(run)))
    assert len(found.steps) == len(names) + 1
    steps = found.steps["reward/mean"]
    assert 500 < len(steps) < 4096
    assert steps[-1] == count
    assert (found.values["reward/mean"] == steps).all()


def test_the_subscriber_in_the_documentation_prints_state_and_changes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "monitor.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    assert {"launch", "proto", "services", "shared"}.isdisjoint(re.findall(r"\w+", program.split("\n\n")[0]))
    script = tmp_path / "subscriber.py"
    script.write_text(program)

    async def play(played: PlayedRun, value: float) -> None:
        played.sender("rollout/3").emit("test", {"value": value})
        await played.settle()

    async def scenario(run_path: Path, lines: list[str], played: PlayedRun) -> None:
        await play(played, 1.0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(script), str(run_path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        try:
            for value in (1.0, 2.0, 3.0):
                if value > 1.0:
                    await play(played, value)
                while f"{{'value': {value}}}" not in (lines or [""])[-1]:
                    async with asyncio.timeout(LIMIT_S):
                        lines.append(await loop.run_in_executor(None, process.stdout.readline))
        finally:
            process.kill()
            process.communicate()
            await played.close()

    lines: list[str] = []
    with monitored(tmp_path) as run:
        asyncio.run(scenario(run.path, lines, PlayedRun(run)))
    rows = [line for line in lines if " test " in line]
    assert [re.sub(r"\d{5,}\.\d+", "T", row.strip()) for row in rows] == [
        f"rollout 3 test T {{'value': {value}}} lost=0" for value in (1.0, 2.0, 3.0)
    ]
