"""Runs the simulation as users do: in a separate process, with a fixed hash seed. Also tests the simulation's parts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.sim.clock import START_S, Node, VirtualLoop
from tests.sim.runs import shrink
from tests.sim.scenario import Kill, Scenario, Size, Stop, Storm, draw
from tests.sim.virtual import check_topology
from tests.sim.world import Outcome

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER, STORE = ("scheduler", 0), ("batch-store", 0)


def simulate(*arguments: str) -> tuple[int, str]:
    """Return the exit status and the output of `python -m tests.sim`."""
    command = [sys.executable, "-m", "tests.sim", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_promise_is_kept_in_every_simulated_run() -> None:
    status, output = simulate("--seeds", "1000", "--jobs", "2")
    assert status == 0, output[-20_000:]
    assert "1000 seeds" in output


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_promise_is_kept_in_ten_thousand_simulated_runs() -> None:
    status, output = simulate("--seeds", "10000", "--jobs", "2")
    assert status == 0, output[-20_000:]
    assert "10000 seeds" in output


def test_every_drawn_size_has_a_valid_topology() -> None:
    for seed in range(20):
        check_topology(draw(seed).size)


@pytest.mark.slow
def test_a_seed_produces_the_same_history_in_every_process() -> None:
    first, second = (simulate("28", "--trace") for _ in range(2))
    assert first == second
    assert "trace " in first[1]


def test_a_failing_scenario_is_reduced_to_its_relevant_parts() -> None:
    storms = [fault for seed in range(200) for fault in draw(seed).faults if isinstance(fault, Storm)]
    faults = (Kill(0.5, SCHEDULER), Stop(1.0, STORE, 2.0), Kill(1.5, STORE, 3), storms[0])
    large = Scenario(1, Size(steps=3, rollouts=2, ranks=2, reference=True), faults)

    def attempt(scenario: Scenario) -> Outcome:
        broken = Kill(1.5, STORE, 3) in scenario.faults and scenario.size.steps >= 2
        return Outcome("broken" if broken else "", 0, 0, 0.0, 0)

    smallest, outcome = shrink(large, attempt)
    assert outcome.violation
    assert smallest.faults == (Kill(1.5, STORE, 3),)
    assert smallest.size == replace(Size(steps=2), tasks=1, staleness=0)


def test_the_clock_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop(Random(1))
    times: list[float] = []

    async def wait() -> None:
        await asyncio.sleep(3600.0)
        times.append(loop.time())

    loop.run_until_complete(wait())
    loop.close()
    assert times == [START_S + 3600.0]


def test_a_killed_process_does_nothing_more_and_a_stopped_one_continues_later() -> None:
    loop = VirtualLoop(Random(1))
    killed, stopped = Node("killed", 1), Node("stopped", 2)
    done: list[tuple[str, float]] = []

    async def work(node: Node) -> None:
        try:
            await asyncio.sleep(1.0)
            done.append((node.name, loop.time() - START_S))
        finally:
            await asyncio.sleep(0)
            done.append((f"{node.name} ended", loop.time() - START_S))

    for node in (killed, stopped):
        loop.create_task(work(node), context=node.context)

    async def disturb() -> None:
        await asyncio.sleep(0.5)
        killed.kill()
        stopped.stopped = []
        await asyncio.sleep(2.5)
        loop.let_go_on(stopped)
        await asyncio.sleep(1.0)

    loop.run_until_complete(disturb())
    loop.close()
    assert done == [("stopped", 3.0), ("stopped ended", 3.0)]
