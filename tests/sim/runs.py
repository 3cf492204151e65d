"""Runs seeds, replays the failing one and makes it smaller."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tests.sim.scenario import Scenario, Size, draw
from tests.sim.virtual import cpu_seconds
from tests.sim.world import Outcome, World

COLLECT_EVERY = 10
SHRINK_ATTEMPTS = 200
_undisturbed: dict[Size, int] = {}


def run(scenario: Scenario, folder: Path, *, tracing: bool = False) -> Outcome:
    """Run a scenario. In deterministic mode also compare its weights with those of an undisturbed run.

    That run has the fewest processes: the simulated model does not depend on how the work is divided.
    """
    outcome = World(scenario, folder, tracing=tracing).run()
    if outcome.violation or not scenario.size.deterministic:
        return outcome
    size = Size(scenario.size.steps, scenario.size.tasks, staleness=scenario.size.staleness, deterministic=True)
    if size not in _undisturbed:
        _undisturbed[size] = World(Scenario(0, size, ()), folder).run().chain
    if outcome.chain != _undisturbed[size]:
        text = f"promise 9: the weights are {outcome.chain}, in an undisturbed run {_undisturbed[size]}"
        return replace(outcome, violation=text)
    return outcome


def warm_up(folder: Path) -> None:
    """Run once what imports modules when it is first used, so that the garbage collector need not look at them."""
    run(Scenario(0, Size(ranks=2, reference=True, deterministic=True, colocated=True), ()), folder)


def shrink(scenario: Scenario, attempt: Callable[[Scenario], Outcome]) -> tuple[Scenario, Outcome]:
    """Return the smallest scenario found that still breaks a promise, and what it came to. `attempt` runs one."""
    outcome = attempt(scenario)
    attempts = 0
    smaller = True
    while smaller and attempts < SHRINK_ATTEMPTS:
        smaller = False
        for other in scenario.smaller():
            attempts += 1
            found = attempt(other)
            if found.violation:
                scenario, outcome, smaller = other, found, True
                break
    return scenario, outcome


def run_one(seed: int, folder: Path, *, tracing: bool) -> int:
    """Run one seed and print what came of it."""
    scenario = draw(seed)
    outcome = run(scenario, folder, tracing=tracing)
    print(scenario)
    for line in outcome.history:
        print(line)
    print(f"{outcome.events} events in {outcome.seconds:.1f} virtual seconds, trace {outcome.trace_hash:016x}")
    print(outcome.violation or "every promise was kept")
    return 1 if outcome.violation else 0


def run_many(seeds: Iterable[int], folder: Path, *, keep_going: bool = False) -> int:
    """Run seeds until one breaks a promise. Print that one, made smaller."""
    began, count, events, virtual_s, broken = cpu_seconds(), 0, 0, 0.0, 0
    for seed in seeds:
        outcome = run(draw(seed), folder)
        count, events, virtual_s = count + 1, events + outcome.events, virtual_s + outcome.seconds
        if outcome.violation and keep_going:
            broken += 1
            print(f"seed {seed}: {outcome.violation.splitlines()[0][:200]}", flush=True)
        elif outcome.violation:
            print(f"seed {seed} breaks a promise: {outcome.violation}")
            scenario, found = shrink(draw(seed), lambda each: run(each, folder, tracing=True))
            print(f"\nthe smallest scenario found:\n{scenario}\n")
            print("\n".join(found.history))
            print(f"\n{found.violation}\nreplay: python -m tests.sim {seed} --trace")
            return 1
        if count % COLLECT_EVERY == 0:
            gc.collect()
    seconds = cpu_seconds() - began
    verdict = f"{broken} broke a promise" if broken else "every promise was kept"
    print(f"{count} seeds, {events} events, {virtual_s:.0f} virtual seconds in {seconds:.1f} s of CPU: {verdict}")
    return 1 if broken else 0
