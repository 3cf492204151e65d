"""Runs one round, in which a run is disturbed until it is done, is resumed whenever a disturbance has ended it, and is
finally checked."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from services.scheduler.journal_files import rewinds
from tests.chaos import history
from tests.chaos.disturbances import SERVICES, Round
from tests.chaos.points import Point, with_points
from tests.integration import parity_run
from tests.integration.tiny.harness import QUICKSTART, processes_of, wait_for
from tests.integration.whole_cluster import Cluster, cluster

STEPS = 12
LIMIT_S = 420.0
"""Maximum seconds that a disturbed run may take to finish on a busy machine."""
RESUMES = 4
"""Maximum number of times that a run is resumed. The last launch is not disturbed."""
DISTURBED_S = 75.0
"""Seconds for which a round disturbs its run. Afterwards the run must finish undisturbed."""
ENDS_S = 120.0
"""Maximum seconds for the services of a killed launcher to exit. They may have to save a checkpoint first."""
PATIENCE_S = 15.0
"""Maximum seconds to wait for a commit between two disturbances."""
DISK_BYTES = 512 << 20
SHM_BYTES = 192 << 20
POLL_S = 0.05
DAMAGED_JOURNAL = "restore the file from a backup"
"""Part of the message of a scheduler whose journal is damaged."""
CLOCK = Path(__file__).with_name("clock.c")


@dataclass
class Result:
    """The findings of a round. `recoveries` are seconds from a kill to the next commit, by service."""

    seed: int
    wall_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    parity: bool | None = None


def clock_library(folder: Path) -> Path | None:
    """Compile the library that moves the wall clock. Return its path, or None if there is no C compiler."""
    library = folder / "clock.so"
    if shutil.which("cc") is None:
        return None
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK)], check=True, timeout=60)
    return library


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a memory file system of `nbytes` bytes at `folder`. Raises CalledProcessError where that is not allowed."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def overrides(settings: tuple[str, ...], steps: int, shm: Path) -> tuple[str, ...]:
    return (*settings, f"run.steps={steps}", f"services.batch-store.directory={shm}")


def undisturbed(folder: Path, settings: tuple[str, ...] = parity_run.SMALL, steps: int = STEPS) -> Path:
    """Run to the end without disturbances. Return the run directory, with which other runs are compared."""
    with cluster(QUICKSTART, folder, *overrides(settings, steps, folder / "shm"), limit_s=LIMIT_S) as run:
        assert run.end() == 0, run.output()
        return run.path


def disturbed(
    folder: Path,
    seed: int,
    disturbances: Mapping[Callable[[Round], str], int],
    *,
    reference: Path | None,
    points: Callable[[random.Random, Path], list[Point]],
    settings: tuple[str, ...] = parity_run.SMALL,
    services: tuple[str, ...],
    pause_s: tuple[float, float] = (0.1, 4.0),
    steps: int = STEPS,
    before: Mapping[str, int] = MappingProxyType({}),
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Disturb a run until it is done, and check it.

    `points` draws the named points for each launch. `settings` are those of the quickstart's run, and `services` are
    those that may be killed at other moments. `reference` is the directory of an undisturbed run, given if bits are to
    be compared. `pause_s` is the minimum and the maximum number of seconds from a commit to the next disturbance.
    `before` counts the disturbances of earlier rounds by name.
    """
    chance = random.Random(seed)
    result = Result(seed)
    begun = time.monotonic()
    with mounted(folder / "disk", DISK_BYTES) as disk, mounted(folder / "shm", SHM_BYTES) as shm:
        library, clock = clock_library(folder), folder / "clock"
        clock.write_bytes(struct.pack("q", 0))
        records: list[list[history.Record]] = []
        each: Round | None = None
        path = disk / "run"
        undo: Callable[[], None] | None = None
        flipped = False
        calm_at = time.monotonic() + DISTURBED_S
        for launch in range(RESUMES + 1):
            if not (path / "run.json").exists():
                shutil.rmtree(path, ignore_errors=True)  # The launcher ended before it had created a run.
            marks, notes = folder / f"marks-{launch}", folder / f"history-{launch}"
            marks.mkdir()
            calm = launch == RESUMES or time.monotonic() > calm_at
            chosen = [] if calm else points(chance, marks)
            environment = with_points({}, *chosen, history=notes)
            if library is not None:
                environment |= {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
            with cluster(
                QUICKSTART,
                disk,
                *overrides(settings, steps, shm),
                limit_s=LIMIT_S,
                resume=path.exists(),
                environment=environment,
            ) as run:
                each = Round(run, chance, clock, steps, services)
                commits = _disturb(each, disturbances, before, pause_s, 0.0 if calm else calm_at, result, say)
                status = run.process.poll()
            each.kills += _kills_at_points(chosen, marks, result, say)
            for service, killed_at in each.kills:
                result.kills[service] += 1
                after = [at for at in commits if at > killed_at]
                result.recoveries.setdefault(service, []).extend(at - killed_at for at in after[:1])
            records.append(history.read(notes))
            result.launches += 1
            lost_leases = "reference" in {service for service, _ in each.kills}
            resampled = lost_leases or each.rewound or bool(rewinds(path / "journal.sqlite"))
            result.violations += history.violations(records[-1], resampled=resampled, damaged=each.damaged)
            console = (path / "cluster.out").read_text().splitlines()
            result.violations += [f"false alarm: {line}" for line in console if ": no answer for " in line]
            if status is None:
                result.violations.append(f"not done within {LIMIT_S:g} s, {run.output()}")
                break
            if status and undo is not None and not each.may_end:  # The launcher refused the damage.
                if "journal" not in run.output():
                    result.violations.append(f"the damaged journal was not reported: {run.output()}")
                undo()
                undo = None
                continue
            if status == 0 or not each.may_end:
                break
            wait_for("the end of all processes", lambda: not processes_of(path), ENDS_S)
            undo = each.before_resume()
            flipped = flipped or undo is not None
        if status == 0:
            result.violations += _checked(run, records, steps, disk, shm)
            if reference is not None:
                differences = parity_run.differences(reference, path)
                result.violations += differences
                result.parity = not differences
        elif status is not None and not (flipped and DAMAGED_JOURNAL in run.output()):
            # The page with the flipped bit may not be read until a later launch, after which the file cannot be
            # restored.
            result.violations.append(f"exit status {status}: {run.output()}")
        if result.violations and path.exists():
            shutil.copytree(path, folder / "run", symlinks=True)  # The run is copied because the mount is removed.
    result.wall_s = time.monotonic() - begun
    return result


def _disturb(
    each: Round,
    disturbances: Mapping[Callable[[Round], str], int],
    before: Mapping[str, int],
    pause_s: tuple[float, float],
    calm_at: float,
    result: Result,
    say: Callable[[str], None],
) -> list[float]:
    """Disturb the run until `calm_at`, and wait until its launcher has exited or the limit has expired.

    The next disturbance is one of those that have been used least often relative to their weights, so every kind is
    drawn before any is repeated. Returns the monotonic times of the commits.
    """
    run, chance = each.run, each.chance
    next_at = time.monotonic() + chance.uniform(2, 2 * PATIENCE_S)
    commits: list[float] = []
    last = 0
    while run.process.poll() is None and time.monotonic() < run.until:
        now = time.monotonic()
        each.end_due(now)
        step = int(run.rows()[-1]["step"]) if run.rows() else 0
        if step != last:
            commits += [now] if step > last else []  # If the step is lower, the run was rewound.
            last = step
            next_at = min(next_at, now + chance.uniform(*pause_s))
        if next_at <= now < calm_at and not each.ending and (run.path / "run.json").exists():
            done = result.done + Counter(before)
            disturbance = min(disturbances, key=lambda of: (done[of.__name__] / disturbances[of], chance.random()))
            with contextlib.suppress(FileNotFoundError):  # The run may end at this moment.
                say(f"  step {step}: {disturbance.__name__}: {disturbance(each)}")
                result.done[disturbance.__name__] += 1
            next_at = time.monotonic() + PATIENCE_S
        time.sleep(POLL_S)
    each.end_due(float("inf"))
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGCONT)
    return commits


def _kills_at_points(
    points: list[Point], marks: Path, result: Result, say: Callable[[str], None]
) -> list[tuple[str, float]]:
    """Return the service and the monotonic time of each kill at a named point."""
    killed = []
    names = {module: service for service, module in SERVICES.items()}
    for point in points:
        if Path(point.mark).exists():
            killed.append((names[point.process], float(json.loads(Path(point.mark).read_text())["at"])))
            result.done["kill at a named point"] += 1
            say(f"  killed {names[point.process]} {point.when} {point.name} {point.match}".rstrip())
    return killed


def _checked(run: Cluster, records: list[list[history.Record]], steps: int, disk: Path, shm: Path) -> list[str]:
    """Return the promises that a finished run broke, and the files and processes that it left behind."""
    everything = [record for launch in records for record in launch]
    rows = [{"step": 0}, *run.rows()]
    found = history.journal_violations(run.path / "journal.sqlite", rows, everything, steps)
    for kind in ("put", "read", "clear", "accepted", "commit"):
        if not any(record["kind"] == kind for record in everything):
            found.append(f"the history holds no {kind}: nothing was checked")
    wait_for("no process left", lambda: not processes_of(run.path))
    left = [name for name in (*os.listdir(shm), *(each for each in os.listdir(disk) if each != "run"))]
    sockets = run.run.sockets
    return (
        found + [f"left behind: {name}" for name in left] + [f"left behind: {sockets}" for _ in range(sockets.exists())]
    )
