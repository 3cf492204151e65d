"""Tests when users' code counts as blocking the loop of its process, and what is said about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.user_code import frames, host, user_side
from services.rollout.user_code.blocking import BlockedTime, ThreadTimes, explained, thread_times
from services.rollout.user_code.frames import Failed, Purpose, Returned, Setup
from services.rollout.user_code.host import WATCH_S, Broken, Ended, UserHost
from services.rollout.user_code.trace import Home, hangs_at
from tests.integration.tiny.harness import wait_for

FLOWS = Path(__file__).with_name("flows.py")
LIBRARY = Path(asyncio.__file__).parents[1]
USER_SIDE = user_side.__file__
SPINNERS = 5
SECONDS = 40
"""Seconds without an answer in the tests of the rule."""


def blocked(ran: float, queued: float, state: str) -> BlockedTime:
    """Return the blocked time after `SECONDS` seconds in which a thread ran and was queued for these shares."""
    total = BlockedTime()
    for number in range(round(SECONDS / WATCH_S)):
        before, now = (ThreadTimes(ran * WATCH_S * at, queued * WATCH_S * at, state) for at in (number, number + 1))
        total = total.then(before, now, WATCH_S, WATCH_S)
    return total


@pytest.mark.parametrize(
    ("ran", "queued", "state"),
    [
        (0.02, 0.98, "R"),  # fifty times as many threads as processors
        (0.02, 0.97, "S"),  # the same, and a short sleep
        (0.02, 0.0, "R"),  # the processor belongs to another machine, or its control group has used up its share
        (0.0, 0.0, "T"),  # stopped
        (0.0, 0.0, "D"),  # waits for a disk
    ],
)
def test_a_thread_that_the_machine_does_not_let_run_blocks_nothing(ran: float, queued: float, state: str) -> None:
    assert blocked(ran, queued, state).total_s < 0.04 * SECONDS


@pytest.mark.parametrize(("ran", "state", "computes"), [(1.0, "R", True), (0.0, "S", False), (0.3, "S", False)])
def test_a_thread_that_computes_or_sleeps_in_a_call_blocks_its_loop(ran: float, state: str, computes: bool) -> None:
    time = blocked(ran, 0.0, state)
    assert time.total_s == pytest.approx(SECONDS)
    assert (time.ran_s > time.slept_s) == computes


def test_a_thread_that_gets_a_tenth_of_a_processor_blocks_its_loop_for_a_tenth_of_the_time() -> None:
    assert blocked(0.1, 0.9, "R").total_s == pytest.approx(SECONDS / 10)


def test_time_in_which_the_service_did_not_look_is_not_counted() -> None:
    times = ThreadTimes(0.0, 0.0, "S")
    assert BlockedTime().then(times, times, 60.0, WATCH_S) == BlockedTime(0.0, WATCH_S)


def test_without_the_kernels_counts_silence_counts_as_sleep() -> None:
    assert BlockedTime(1.0, 1.0).then(None, None, WATCH_S, WATCH_S) == BlockedTime(1.0, 1.0 + WATCH_S)


def test_the_times_of_a_thread_are_those_of_the_kernel() -> None:
    with spinning(1) as [spinner]:
        wait_for("a spinning process", lambda: (times := thread_times(spinner.pid)) is not None and times.ran_s > 0.2)
        times = thread_times(spinner.pid)
    assert times is not None
    assert times.state == "R"
    assert thread_times(spinner.pid) is None


def stack(*lines: str) -> str:
    return "Current thread 0x1 (most recent call first):\n" + "".join(f"  File {line}\n" for line in lines)


def test_the_innermost_line_of_the_users_code_is_named_and_the_librarys_function_in_which_it_waits() -> None:
    home = Home("/home/me/my_agent.py", 10)
    text = stack(
        f'"{LIBRARY}/ssl.py", line 717 in create_default_context',
        '"/home/me/helpers.py", line 7 in client',
        '"/home/me/my_agent.py", line 31 in agent',
        '"<frozen runpy>", line 88 in _run_code',
    )
    assert hangs_at(text, home).endswith("helpers.py:7")
    assert explained(BlockedTime(10.1, 0.2), text, home) == (
        "computing in create_default_context (ssl.py:717); await ctx.call(function, ...) runs it on a thread"
    )
    assert explained(BlockedTime(0.2, 10.1), text, home).startswith(
        "asleep in create_default_context (ssl.py:717); use a call that can be awaited ("
    )


def test_the_source_of_the_line_is_shown_if_python_calls_no_library() -> None:
    at = next(n for n, line in enumerate(FLOWS.read_text().splitlines(), 1) if "time.sleep(60)" in line)
    text = stack(f'"{FLOWS}", line {at} in _bad')
    assert explained(BlockedTime(0.0, 10.1), text, Home(str(FLOWS), 1)).startswith("asleep in time.sleep(60); use a ")


@pytest.mark.parametrize(
    "lines",
    [
        [f'"{LIBRARY}/selectors.py", line 468 in select', f'"{LIBRARY}/asyncio/base_events.py", line 1 in _run_once'],
        [f'"{LIBRARY}/threading.py", line 331 in wait', f'"{USER_SIDE}", line 9 in call', f'"{FLOWS}", line 8 in x'],
    ],
)
def test_a_tool_that_keeps_pythons_lock_is_named_as_the_cause(lines: list[str]) -> None:
    assert explained(BlockedTime(0.1, 10.1), stack(*lines), Home(str(FLOWS), 1)) == (
        "waiting for Python's lock, which a thread of a tool keeps; run that tool in a process"
    )


@contextlib.contextmanager
def spinning(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that compute without end, each in a session of its own: Linux may share processors equally among
    sessions."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Call:
    """A call of a workflow that does not call the policy."""

    function = 0

    def begin(self, slot: int) -> frames.BeginSample:
        return frames.BeginSample(slot, "train/0/0", 0, {"prompt": "1"}, "")

    def asked(self, message: frames.Asked, host: UserHost) -> None:
        host.send(frames.Captured(message.slot, []))

    def end(self) -> None:
        """Nothing is open."""


def made(workflow: str, *, timeout_s: float = 60.0, spinners: int = 0) -> Ended | Broken:
    """Return how a workflow ended in a process that shares one processor with `spinners` others."""

    async def scenario() -> Ended | Broken:
        setup = Setup(Purpose.WORKFLOW, [(f"tests.unit.rollout.flows:{workflow}", {})], timeout_s, 1 << 28)
        process = await UserHost.start(setup)
        try:
            with spinning(spinners):
                return await process.make(Call())
        finally:
            await process.end()

    allowed = os.sched_getaffinity(0)
    if spinners:
        os.sched_setaffinity(0, {min(allowed)})
    try:
        return asyncio.run(scenario())
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.slow
def test_a_loop_that_is_starved_by_other_processes_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STALL_S", 1.0)
    ended = made("works_for_half_a_second", spinners=SPINNERS)
    assert isinstance(ended, Returned)
    assert ended.metrics["wall_s"] > 1.5  # otherwise the loop was not starved for longer than the limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "what", "where"),
    [
        ("sleeps", "asleep in ", "time.sleep(60)"),
        ("spins", "computing in ", ("pass", "while True")),
        ("keeps_the_lock", "waiting for Python's lock", ("await ctx.call(re.match", "async def keeps_the_lock")),
    ],
)
def test_a_workflow_that_blocks_its_loop_is_ended_with_its_line_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, workflow: str, what: str, where: str | tuple[str, ...]
) -> None:
    monkeypatch.setattr(host, "STALL_S", 1.0)
    ended = made(workflow)
    assert isinstance(ended, Broken)
    assert isinstance(ended.failed, Failed)
    assert ended.failed.why.startswith(f"blocked the loop of its process for 1 s, {what}")
    line = FLOWS.read_text().splitlines()[int(ended.failed.at.rpartition(":")[2]) - 1]
    assert line.strip().startswith(where)
