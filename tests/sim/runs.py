"""Runs seeds, replays a failing seed and shrinks its scenario."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.sim.scenario import Scenario, Size, draw
from tests.sim.virtual import cpu_seconds
from tests.sim.world import Outcome, World

CHUNK = 25
"""Number of seeds that a process runs per job."""
COLLECT_EVERY = 10
SHRINK_ATTEMPTS = 200
_undisturbed: dict[Size, int] = {}


def run(scenario: Scenario, folder: Path, *, tracing: bool = False) -> Outcome:
    """Run a scenario. In deterministic mode, also compare the weights with those of an undisturbed run.

    The undisturbed run has the fewest processes, because the simulated model does not depend on how the work is
    divided.
    """
    outcome = World(scenario, folder, tracing=tracing).run()
    if outcome.violation or not (scenario.size.deterministic and scenario.size.trains):
        return outcome
    given = scenario.size
    size = Size(
        given.steps,
        given.tasks,
        staleness=given.staleness,
        reference=given.reference,
        critic=given.critic,
        deterministic=True,
    )
    if size not in _undisturbed:
        _undisturbed[size] = World(Scenario(0, size, ()), folder).run().chain
    if outcome.chain != _undisturbed[size]:
        text = f"promise 9: the weights are {outcome.chain}, but {_undisturbed[size]} in an undisturbed run"
        return replace(outcome, violation=text)
    return outcome


def warm_up(folder: Path) -> None:
    """Run, once, the code that imports modules on first use, so that the garbage collector can ignore these modules."""
    run(Scenario(0, Size(ranks=2, reference=True, critic=True, deterministic=True, colocated=True), ()), folder)


def shrink(scenario: Scenario, attempt: Callable[[Scenario], Outcome]) -> tuple[Scenario, Outcome]:
    """Return the smallest scenario found that still breaks a promise, with its outcome. `attempt` runs a scenario."""
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
    """Run one seed and print its outcome."""
    scenario = draw(seed)
    outcome = run(scenario, folder, tracing=tracing)
    print(scenario)
    for line in outcome.history:
        print(line)
    print(f"{outcome.events} events in {outcome.seconds:.1f} virtual seconds, trace {outcome.trace_hash:016x}")
    print(outcome.violation or "every promise was kept")
    return 1 if outcome.violation else 0


def run_many(seeds: range, folder: Path, *, jobs: int = 1, keep_going: bool = False) -> int:
    """Run seeds in `jobs` processes until one breaks a promise. Shrink the failing scenario, and print it.

    With `keep_going`, name every failing seed instead.
    """
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    work = functools.partial(_run_chunk, folder=folder, keep_going=keep_going)
    events, virtual_s, cpu_s, broken = 0, 0.0, 0.0, 0
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for done in pool.imap(work, chunks):
            events, virtual_s, cpu_s = events + done.events, virtual_s + done.virtual_s, cpu_s + done.cpu_s
            for seed, violation in done.broken.items():
                broken += 1
                print(f"seed {seed}: {violation.splitlines()[0]}", flush=True)
                if not keep_going:
                    return _print_smallest(seed, folder)
    verdict = f"{broken} of them broke a promise" if broken else "every promise was kept"
    print(f"{len(seeds)} seeds, {events} events, {virtual_s:.0f} virtual seconds, {cpu_s:.1f} s of CPU: {verdict}")
    return 1 if broken else 0


@dataclass(frozen=True)
class _Chunk:
    """The outcomes of some seeds. `broken` holds violations by seed."""

    events: int
    virtual_s: float
    cpu_s: float
    broken: dict[int, str]


def _run_chunk(seeds: range, *, folder: Path, keep_going: bool) -> _Chunk:
    own = folder / str(os.getpid())
    own.mkdir(exist_ok=True)
    began, events, virtual_s = cpu_seconds(), 0, 0.0
    broken: dict[int, str] = {}
    for seed in seeds:
        outcome = run(draw(seed), own)
        events, virtual_s = events + outcome.events, virtual_s + outcome.seconds
        if outcome.violation:
            broken[seed] = outcome.violation
            if not keep_going:
                break
        if seed % COLLECT_EVERY == 0:
            gc.collect()
    return _Chunk(events, virtual_s, cpu_seconds() - began, broken)


def _print_smallest(seed: int, folder: Path) -> int:
    scenario, outcome = shrink(draw(seed), lambda each: run(each, folder, tracing=True))
    print(f"\nthe smallest scenario found:\n{scenario}\n")
    print("\n".join(outcome.history))
    print(f"\n{outcome.violation}\nreplay seed {seed}: python -m tests.sim {seed} --trace")
    return 1
