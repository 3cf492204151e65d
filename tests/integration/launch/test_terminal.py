"""Tests the terminal interface with real monitors and real launchers: its views, its keys, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from textual.widgets import DataTable, Input, RichLog

from launch.viewers.terminal.app import MAX_SAMPLES, TABS, MonitorApp
from launch.viewers.terminal.feed import Feed
from launch.viewers.terminal.widgets import Confirm
from shared.rundir import RunDir
from shared.samples.record import FOLDER, SampleRecord, file_of
from shared.view.services import Health, ServiceView
from tests.integration.monitor.played_run import PlayedRun, metrics_row, monitored
from tests.integration.tiny.harness import ROOT, TINY, environment, launched, wait_for

LIMIT_S = 60.0


def screen(app: MonitorApp) -> str:
    """Return the text of the screen."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line) for line in lines)


async def shows(app: MonitorApp, *texts: str) -> str:
    """Wait until the screen shows all of `texts`, and return the text of the screen."""
    until = time.monotonic() + LIMIT_S
    while missing := [text for text in texts if text not in screen(app)]:
        assert time.monotonic() < until, f"{missing} not in\n{screen(app)}"
        await asyncio.sleep(0.05)
    return screen(app)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


async def send_always(played: PlayedRun) -> None:
    """Send telemetry every second, because the timeline shows only the last seconds."""
    while True:
        played.emit_all()
        await asyncio.sleep(1.0)


def record(number: int, **fields: object) -> SampleRecord:
    values = {
        "task": f"train/0/{number}", "step": 3, "prompt": "1+1=", "completion": "two", "pieces": ["t", "wo"],
        "logprobs": [-0.1, -5.0], "reward": number / 4, "length": number, "finish_reason": "stop", "versions": [2],
    }  # fmt: skip
    return SampleRecord(**{**values, **fields})


def write_samples(run: RunDir, *records: SampleRecord) -> None:
    first = records[0]
    path = run.path / FOLDER / file_of(first.split, first.step or 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))


@pytest.mark.parametrize("size", [(80, 24), pytest.param((200, 60), marks=pytest.mark.long)], ids=["80x24", "200x60"])
def test_every_view_shows_the_run(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scenario(run: RunDir) -> None:
        played = PlayedRun(run)
        played.write_steps(40)
        played.emit_all()
        await played.settle()
        warning = {"at": time.time(), "step": 7, "kind": "entropy", "text": "entropy falls", "remedy": "lower the rate"}
        (run.path / "warnings.jsonl").write_bytes(msgspec.json.encode(warning) + b"\n")
        write_samples(run, record(1))
        app = MonitorApp(Feed(run))
        async with app.run_test(size=size) as pilot:
            await shows(app, "step 40", "reward 0.4", "rollout 2×READY", "LEASED 8", "batch-store/0", "▲ entropy", "┤")
            wanted = {
                "services": ["rollout/1", "READY", "40%", "286.1 MiB"],
                "pipeline": ["tasks by state", "COLLECTED", "staleness of the samples of step 40"],
                "curves": ["reward", "KL", "entropy", "step 40", "⠉"],
                "timeline": [
                    "rollout/0",
                    "█",
                    "░",
                    "reference/0 waited ",
                ],
                "log": ["monitor/0", "state=READY"],
                "samples": ["train/0/1", "colours", "two"],
                "warnings": ["warnings: 1", "entropy falls", "lower the rate"],
            }
            sending = asyncio.create_task(send_always(played))
            for number, tab in enumerate(TABS[1:], 2):
                await pilot.press(str(number))
                await shows(app, *wanted[tab])
            sending.cancel()
            for light in ("textual-light", "textual-dark"):
                await pilot.press("t")
                assert app.theme == light
            await pilot.press("question_mark")
            await shows(app, "restart the process", "docs/monitor.md")
        await played.close()

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_curves_follow_the_run_and_lose_the_rows_that_it_rolls_back(tmp_path: Path) -> None:
    async def scenario(run: RunDir) -> None:
        played = PlayedRun(run)
        played.write_steps(20)
        played.emit_all()
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("4")
            await shows(app, "step 20")
            played.write_steps(5)
            await shows(app, "step 25")
            rows = run.metrics.read_text().splitlines(keepends=True)
            run.metrics.write_text("".join(rows[:12]))
            await shows(app, "step 12")
            await pilot.press("z")
            await shows(app, f"reward  {metrics_row(12)['reward/mean']:.4g}")
            assert "KL" not in screen(app)
            await pilot.press("down")
            await shows(app, f"KL  {metrics_row(12)['loss/kl']:.4g}")
            await pilot.press("up")
            await shows(app, f"reward  {metrics_row(12)['reward/mean']:.4g}")
        await played.close()

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_keys_change_the_window_of_the_timeline(tmp_path: Path) -> None:
    async def scenario(run: RunDir) -> None:
        played = PlayedRun(run)
        played.write_steps(1)
        played.emit_all()
        await played.settle()
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("5")
            await shows(app, "-30 s")
            for key, window in (("minus", "-60 s"), ("minus", "-120 s"), ("plus", "-60 s"), ("equals_sign", "-30 s")):
                await pilot.press(key)
                await shows(app, f" {window} ", "ends of steps", "│1")
        await played.close()

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_the_log_is_filtered_by_text_and_level(tmp_path: Path) -> None:
    async def scenario(run: RunDir) -> None:
        for service, level, event in (("rollout", "warning", "samples failed"), ("scheduler", "info", "lease granted")):
            line = {
                "timestamp": "2026-01-01T00:00:01.5Z",
                "level": level,
                "service": service,
                "instance": 0,
                "event": event,
            }
            run.log_file(service, 0).write_bytes(msgspec.json.encode(line) + b"\n")
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("6")
            await shows(app, "samples failed", "lease granted")
            await pilot.press("slash", *"rollout", "enter")
            assert app.query_one("#filter", Input).value == "rollout"
            await until(lambda: "lease granted" not in screen(app))
            assert "samples failed" in screen(app)
            await pilot.press("slash", *["backspace"] * 7, "escape", "l")
            await until(lambda: "lease granted" not in screen(app))
            assert "samples failed" in screen(app)
            assert app.query_one("#filter", Input).value == ""

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_a_long_log_line_is_shown_whole_and_new_lines_do_not_move_the_lines_that_are_read(tmp_path: Path) -> None:
    at = "2026-01-01T00:00:0"

    async def scenario(run: RunDir) -> None:
        def line(second: int, text: str) -> bytes:
            entry = {"timestamp": f"{at}{second}", "level": "info", "service": "rollout", "instance": 0, "event": text}
            return msgspec.json.encode(entry) + b"\n"

        log = run.log_file("rollout", 0)
        log.write_bytes(line(0, "began " + "long " * 60 + "end of the line") + line(1, "short") * 40)
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("6", "slash", *"rollout/0", "enter", "home")
            await shows(app, "began long")
            assert "end of the line" not in screen(app)
            await pilot.press("w")
            await pilot.press("home")
            await shows(app, "began long", "end of the line")
            pane = app.query_one("#log-lines", RichLog)
            assert max(strip.cell_length for strip in pane.lines) <= pane.scrollable_content_region.width
            await pilot.resize_terminal(60, 24)
            await until(lambda: max(strip.cell_length for strip in pane.lines) <= 60)
            await pilot.press("home")
            await shows(app, "end of the line")
            with log.open("ab") as file:
                file.write(line(2, "newest"))
            await until(lambda: "newest" in pane.lines[-1].text)
            assert "end of the line" in screen(app)
            await pilot.press("end")
            await shows(app, "newest")
            await pilot.press("w")
            await shows(app, "newest")
            with log.open("ab") as file:
                file.write(line(3, "another"))
            await shows(app, "another")
            await pilot.press("home")
            await shows(app, "began long")
            assert "end of the line" not in screen(app)

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_samples_are_ordered_and_their_text_cannot_control_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[red]not red[/red]\u202e"

    async def scenario(run: RunDir) -> None:
        write_samples(run, record(1), record(3, pieces=[], completion=hostile), record(2))
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.press("7")
            await shows(app, "train/0/1", "train/0/3")
            table = app.query_one("#sample-list", DataTable)

            def tasks() -> list[str]:
                return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]

            assert tasks() == ["train/0/1", "train/0/3", "train/0/2"]
            await pilot.press("o")
            await until(lambda: tasks() == ["train/0/1", "train/0/2", "train/0/3"])
            await pilot.press("o")
            await until(lambda: tasks() == ["train/0/3", "train/0/2", "train/0/1"])
            text = await shows(app, r"\x1b]0;owned\x07\x1b[2J[red]not red[/red]\u202e")
            assert not any(code in text for code in "\x1b\x07\u202e")

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_the_worst_sample_of_a_step_is_listed_first_and_the_samples_beyond_the_limit_are_counted(
    tmp_path: Path,
) -> None:
    async def scenario(run: RunDir) -> None:
        write_samples(run, *(record(number, reward=-float(number)) for number in range(MAX_SAMPLES + 50)))
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.press("7")
            await shows(app, "as written", "the first 200 of 250 samples")
            await pilot.press("o")
            await shows(app, "worst first")
            assert str(app.query_one("#sample-list", DataTable).get_row_at(0)[0]) == "train/0/249"

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_keys_choose_step_data_set_task_and_colours_of_the_samples(tmp_path: Path) -> None:
    async def scenario(run: RunDir) -> None:
        write_samples(run, record(1))
        write_samples(run, record(5, step=4, completion="four"))
        write_samples(run, record(9, task="held/2/9", split="eval/held", step=2))
        app = MonitorApp(Feed(run))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.press("7")
            await shows(app, "train  step 4", "train/0/5", "colours: log-prob")
            for title in ("difference between engine and trainer", "nothing", "log-prob of the engine"):
                await pilot.press("c")
                await shows(app, f"colours: {title}")
            await pilot.press("comma")
            await shows(app, "train  step 3", "train/0/1")
            await pilot.press("full_stop")
            await shows(app, "train  step 4", "train/0/5")
            await pilot.press("slash", *"train/0/1", "enter")
            await shows(app, "task train/0/1", "1 sample")
            await pilot.press("e")
            await shows(app, "eval/held  step 2", "held/2/9")
            assert app.query_one("#task", Input).value == ""
            await pilot.press("slash", *"c", "escape", "c")
            await shows(app, "eval/held  step 2", "colours: difference")

    with monitored(tmp_path) as run:
        asyncio.run(scenario(run))


def test_a_restart_and_a_drain_need_confirmation_and_a_killed_process_is_red_until_it_is_back(tmp_path: Path) -> None:
    async def scenario(run: RunDir) -> None:
        app = MonitorApp(Feed(run))

        def services() -> list[ServiceView]:
            return app.feed.view.services(time.time())

        def rollout() -> tuple[Health | None, int]:
            found = [each for each in services() if each.name == "rollout/0"]
            return (found[0].health, found[0].restarts or 0) if found else (None, 0)

        def pid() -> int:
            [found] = [each.pid for each in services() if each.name == "rollout/0"]
            return found or 0

        async with app.run_test(size=(120, 30), notifications=True) as pilot:
            await until(lambda: rollout() == (Health.WELL, 0))
            await pilot.press("2")
            await shows(app, "rollout/0")
            table = app.query_one("#service-list", DataTable)
            table.move_cursor(row=table.get_row_index("rollout/0"))
            await pilot.press("r")
            await until(lambda: isinstance(app.screen, Confirm))
            await pilot.press("n")
            await pilot.press("r")
            await shows(app, "restart rollout/0?")
            assert rollout() == (Health.WELL, 0)
            await pilot.press("y")
            await until(lambda: rollout() == (Health.WELL, 1))
            seen = set()
            os.kill(pid(), signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                while rollout() != (Health.WELL, 2):
                    seen.add(rollout()[0])
                    await asyncio.sleep(0.05)
            assert seen - {Health.WELL}
            table.move_cursor(row=table.get_row_index("scheduler/0"))
            await pilot.press("d")
            await shows(app, "scheduler/0 leases no tasks")
            table.move_cursor(row=table.get_row_index("rollout/1"))
            await pilot.press("d")
            await shows(app, "drain rollout/1?")
            await pilot.press("y")
            await until(lambda: [each.state for each in services() if each.name == "rollout/1"] == ["DRAINED"])

    with launched(tmp_path / "run", "--set", "services.rollout.instances=2", tiny=TINY) as here:
        here.wait_ready()
        asyncio.run(scenario(here.run))


def test_output_without_a_terminal_consists_of_lines_with_the_state_and_every_change(tmp_path: Path) -> None:
    with monitored(tmp_path) as run, subprocess.Popen(
        [sys.executable, "-m", "launch.monitor", "--run", str(run.path)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None

        async def scenario() -> list[str]:
            played = PlayedRun(run)
            played.write_steps(3)
            played.emit_all()
            await played.settle()
            lines = [await read(process)]
            while "step 3" not in lines[-1]:
                lines.append(await read(process))
            played.write_steps(1)
            played.sender("rollout/1").emit("service", {"state": "FAILED", "cause": "no \x1b[31mmodel"})
            while not {"step 4", "FAILED"} <= {word for word in ("step 4", "FAILED") for line in lines if word in line}:
                lines.append(await read(process))
            await played.close()
            return lines

        lines = asyncio.run(scenario())
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert any("rollout/1 FAILED no ␛[31mmodel" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


async def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)


# ---- in a real terminal


@contextmanager
def tmux(command: str, columns: int, lines: int) -> Iterator[Callable[..., str]]:
    """Run a command in a tmux terminal. Yield a function that runs a tmux command and returns its output."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (apt package tmux)")
    server = ["tmux", "-L", f"rlbus-{uuid.uuid4().hex[:8]}", "-f", "/dev/null"]

    def call(*words: str) -> str:
        return subprocess.run([*server, *words], check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout

    call("new-session", "-d", "-x", str(columns), "-y", str(lines), "bash --norc --noprofile")
    try:
        call("send-keys", f"cd {ROOT} && {command}", "Enter")
        yield call
    finally:
        call("kill-server")


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), pytest.param(200, 60, marks=pytest.mark.long)])
def test_a_real_terminal_shows_the_run_and_is_restored_afterwards(tmp_path: Path, columns: int, lines: int) -> None:
    async def prepare(run: RunDir) -> None:
        played = PlayedRun(run)
        played.write_steps(30)
        played.emit_all()
        await played.settle()
        await played.close()

    with monitored(tmp_path) as run:
        asyncio.run(prepare(run))
        command = f"{sys.executable} -m launch.monitor --run {run.path}; echo left with $?"
        with tmux(command, columns, lines) as call:

            def shown() -> str:
                return call("capture-pane", "-p")

            def has(*texts: str) -> None:
                wait_for(f"{texts} in {shown()}", lambda: all(text in shown() for text in texts), LIMIT_S)

            has("step 30", "rollout 2×READY", "reward", "┤")
            assert max(len(line) for line in shown().splitlines()) <= columns
            call("send-keys", "5", "-", "-", "-", "-")
            has("which process waited for which", "reference/0 waited")
            call("resize-window", "-x", "120", "-y", "40")
            has("which process waited for which")
            call("send-keys", "?")
            has("go to a view")
            call("send-keys", "Escape")
            wait_for("the help is closed", lambda: "go to a view" not in shown())
            call("send-keys", "q")
            has("left with 0")
            flags = call("display-message", "-p", "#{alternate_on} #{mouse_any_flag} #{cursor_flag}")
            assert flags.split() == ["0", "0", "1"]
