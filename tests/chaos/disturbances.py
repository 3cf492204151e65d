"""Disturbances of a run: kills, stops, full disks and memory, clock jumps, damage.

Each function returns a description of what it did. If a disturbance lasts, a later call (`Round.later`) ends it. If a
run may end by design after a disturbance, the disturbance says so (`Round.may_end`), and the run is then resumed.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.processes.plan import command_of
from shared.rundir import checkpoint_steps
from shared.topology.models import CRITIC, POLICY_WORKER, WORKERS
from tests.integration.store_process import fill
from tests.integration.tiny.harness import process_of
from tests.integration.whole_cluster import Cluster

_NAMES = (
    "scheduler",
    "batch-store",
    "monitor",
    "recorder",
    "policy-trainer",
    POLICY_WORKER,
    CRITIC,
    "rollout",
    "reference",
)
SERVICES = {name: " ".join(command_of(name)) for name in _NAMES}
"""The program of each service, with its arguments, as given to `python -m`."""
LIGHT = ("scheduler", "batch-store", "policy-trainer", "monitor", "recorder")
"""Services that restart within seconds, because they do not import torch."""


@dataclass
class Round:
    """One disturbed run."""

    run: Cluster
    chance: random.Random
    clock: Path
    """File that contains the number of seconds by which the wall clock jumps."""
    steps: int
    """Number of steps of the run."""
    services: tuple[str, ...] = tuple(SERVICES)
    """Services that may be killed."""
    kills: list[tuple[str, float]] = field(default_factory=list)
    """Service and monotonic time of each kill so far."""
    done: Counter[str] = field(default_factory=Counter)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Functions that end lasting disturbances, with the monotonic times at which they are due."""
    may_end: str = ""
    """Cause that may end the run by design, or an empty string."""
    ending: bool = False
    """Whether the run is about to end, so that no other disturbance follows."""
    before_resume: Callable[[], Callable[[], None] | None] = lambda: None
    """Function that is called after every process has exited. It may return a function that undoes its damage, in case
    the next launch refuses to start because of it."""
    rewound: bool = False
    damaged: bool = False

    def after(self, seconds: float, end: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, end))

    def end_due(self, now: float) -> None:
        due = [each for each in self.later if each[0] <= now]
        self.later = [each for each in self.later if each[0] > now]
        for _, end in due:
            end()

    def pid(self, service: str) -> int | None:
        """Return the pid of the first process of a service, or None."""
        return process_of(self.run.path, service)

    @property
    def shm(self) -> Path:
        return self.run.run.shm.parent


def kill(each: Round) -> str:
    return _kill(each, each.chance.sample(each.services, 1))


def kill_pair(each: Round) -> str:
    return _kill(each, each.chance.sample(each.services, 2))


def kill_burst(each: Round) -> str:
    """Kill most services within a second."""
    return _kill(each, each.chance.sample(each.services, min(5, len(each.services))), gap_s=0.2)


def _kill(each: Round, names: Sequence[str], gap_s: float = 0.0) -> str:
    for name in names:
        pid = each.pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                each.kills.append((name, time.monotonic()))
        time.sleep(gap_s)
    return ", ".join(names)


def stop_and_go_on(each: Round) -> str:
    """Suspend a process for less time than it is allowed to be silent."""
    name, seconds = each.chance.choice(tuple(SERVICES)), each.chance.uniform(0.5, 6)
    pid = each.pid(name)
    if pid is None:
        return f"{name} is away"

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    each.after(seconds, go_on)
    return f"{name} for {seconds:.1f} s"


def stop_the_launcher(each: Round) -> str:
    seconds = each.chance.uniform(0.5, 6)
    each.run.process.send_signal(signal.SIGSTOP)
    each.after(seconds, lambda: each.run.process.send_signal(signal.SIGCONT))
    return f"for {seconds:.1f} s"


def full_shared_memory(each: Round) -> str:
    return _fill(each, each.shm / "junk", each.chance.uniform(0.5, 3))


def full_disk(each: Round) -> str:
    """Fill the disk that holds the run directory. The scheduler ends a run whose journal cannot be written."""
    each.may_end = "full disk"
    return _fill(each, each.run.path.parent / "junk", each.chance.uniform(0.2, 2))


def _fill(each: Round, junk: Path, seconds: float) -> str:
    fill(junk, 1 << 16)
    each.after(seconds, lambda: junk.unlink(missing_ok=True))
    return f"{junk.parent} for {seconds:.1f} s"


def few_descriptors(each: Round) -> str:
    """Leave a store without a free descriptor. Other services need not survive this, because libzmq aborts them."""
    pid, seconds = each.pid("batch-store"), each.chance.uniform(0.5, 3)
    if pid is None:
        return "batch-store is away"
    with contextlib.suppress(OSError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(n for n in range(len(used) + 1) if n not in used), hard))

        def restore() -> None:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))

        each.after(seconds, restore)
    return f"batch-store for {seconds:.1f} s"


def jump_the_clock(each: Round) -> str:
    seconds = each.chance.choice((-86400, -3600, -5, 5, 3600, 86400 * 400))
    with each.clock.open("r+b") as file:
        file.write(struct.pack("q", seconds))
    return f"to {seconds:+d} s"


def delete_the_logs(each: Round) -> str:
    """Delete the log files but not their folder, as a log rotation would."""
    for file in each.run.run.logs.iterdir():
        file.unlink(missing_ok=True)
    return "all files"


def interrupt(each: Round) -> str:
    each.may_end, each.ending = "interrupt", True
    each.run.process.send_signal(each.chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
    return "one signal"


def interrupt_twice(each: Round) -> str:
    each.may_end, each.ending = "interrupt", True
    for _ in range(2):
        each.run.process.send_signal(signal.SIGINT)
        time.sleep(each.chance.uniform(0.05, 1.5))
    return "two signals"


def kill_the_launcher(each: Round) -> str:
    each.may_end, each.ending = "kill of the launcher", True
    each.run.process.kill()
    return "SIGKILL"


def damage_the_newest_checkpoint(each: Round) -> str:
    """Flip a byte of the newest checkpoint of a model, and kill the worker that would restore it. The previous
    checkpoint of all models, or the initial models, are used instead.
    """
    worker = each.chance.choice([name for name in WORKERS.values() if name in each.services])
    folder = each.run.run.checkpoints / (worker if worker != POLICY_WORKER else "")
    steps = checkpoint_steps(folder)
    if not steps:
        return f"{worker} has none"
    files = [*(folder / f"step-{steps[-1]}").glob("*.safetensors")]
    if files:
        flip(each.chance.choice(files), each.chance)
        each.rewound = True
    _kill(each, (worker,))
    return f"step {steps[-1]} of {worker}"


def delete_the_checkpoints(each: Round) -> str:
    """Delete the checkpoint folder, and kill the worker that would restore a checkpoint. The initial model is used
    instead. The checkpoint of the last step is never deleted, because its bits are compared."""
    if [*each.run.run.checkpoints.rglob(f"step-{each.steps}")]:
        return "none, because the last one has been saved"
    shutil.rmtree(each.run.run.checkpoints, ignore_errors=True)
    each.rewound = True
    _kill(each, ("policy-trainer-worker",))
    return "all"


def damage_a_shard(each: Round) -> str:
    """Flip a byte of a sealed file, and kill the file's store, which then drops the file."""
    files = [*each.run.run.shm.glob("*/*.blk")]
    if not files:
        return "there is none"
    each.damaged = each.rewound = True
    with contextlib.suppress(FileNotFoundError):
        flip(each.chance.choice(files), each.chance)
    _kill(each, ("batch-store",))
    return "one byte"


def delete_the_shared_memory(each: Round) -> str:
    """Delete the folder that holds the store's files, and kill the store, which then starts empty."""
    each.damaged = each.rewound = True
    shutil.rmtree(each.run.run.shm, ignore_errors=True)
    _kill(each, ("batch-store",))
    return "all files"


def cut_the_journal(each: Round) -> str:
    """Discard the end of the journal, as a power cut might. The run returns to a state on which all files agree."""
    kill_the_launcher(each)
    _kill(each, ("scheduler",))

    def cut() -> None:
        log = each.run.path / "journal.sqlite-wal"
        if log.exists():
            os.truncate(log, max(0, log.stat().st_size - each.chance.randrange(1 << 16)))

    each.before_resume = cut
    return "its end"


def flip_the_journal(each: Round) -> str:
    """Flip a bit of the journal while no process is using it.

    The next launch reports the damage, unless the bit was not part of any data.
    """
    kill_the_launcher(each)

    def damage() -> Callable[[], None]:
        journal = each.run.path / "journal.sqlite"
        before = journal.read_bytes()
        flip(journal, each.chance)
        return lambda: _restore(journal, before)

    each.before_resume = damage
    return "one bit"


def _restore(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def flip(path: Path, chance: random.Random) -> None:
    """Flip one bit in the second half of a file, where the values are."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        at = chance.randrange(size // 2, size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


GENTLE: dict[Callable[[Round], str], int] = {
    kill: 12,
    kill_pair: 3,
    stop_and_go_on: 4,
    jump_the_clock: 3,
    full_shared_memory: 2,
    few_descriptors: 2,
}
"""Disturbances after which a run continues without an operator, with their weights."""

ROUGH: dict[Callable[[Round], str], int] = {
    **GENTLE,
    kill_burst: 1,
    stop_the_launcher: 1,
    delete_the_logs: 1,
    damage_the_newest_checkpoint: 1,
    delete_the_checkpoints: 1,
    full_disk: 1,
    interrupt: 1,
    interrupt_twice: 1,
    kill_the_launcher: 1,
    damage_a_shard: 2,
    delete_the_shared_memory: 1,
    cut_the_journal: 1,
    flip_the_journal: 1,
}
