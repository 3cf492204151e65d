"""Determines what a host has, and whether a part of a run can run there. It starts nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from launch.processes.plan import own_gpus
from launch.processes.programs import ROOT
from proto.messages import HostFacts
from shared.topology import Topology, distribution
from shared.topology.fields import format_size

PACKAGES = ("proto", "shared", "services", "launch")
CLOCK_LIMIT_S = 2.0
"""Maximum difference between the clocks of two hosts, in seconds. It is limited because the logs of a run are ordered
by time."""


def facts(problems: Sequence[str] = ()) -> HostFacts:
    """Return the facts about this host, with `problems` as the requirements of the topology that it does not meet."""
    return HostFacts(
        name=socket.gethostname(),
        code=code_digest(),
        python=platform.python_version(),
        torch=_torch(),
        gpus=len(own_gpus()),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        free_bytes=shutil.disk_usage(".").free,
        problems=list(problems),
    )


def refusals(topology: Topology, home: HostFacts, name: str, there: HostFacts) -> list[str]:
    """Return the reasons why the host `name` cannot take part in a run that was started at `home`, one line each."""
    gpus = topology.placement.hosts[name].gpus
    reasons = []
    if there.code != home.code:
        reasons.append(f"a different rlbus (code {there.code}, here {home.code}); install the same release on both")
    if there.python.rpartition(".")[0] != home.python.rpartition(".")[0]:  # patch releases may differ
        reasons.append(f"Python {there.python}, here {home.python}; use the same on both")
    if there.torch != home.torch:
        reasons.append(f"torch {there.torch or 'missing'}, here {home.torch}; install the same on both")
    if there.gpus < gpus:
        reasons.append(
            f"its agent may use {there.gpus} GPUs, but placement.hosts gives it {gpus}; lower that, or check its "
            "CUDA_VISIBLE_DEVICES"
        )
    if abs(there.clock_s) > CLOCK_LIMIT_S:
        way = "ahead of" if there.clock_s > 0 else "behind"
        reasons.append(
            f"its clock is {abs(there.clock_s):.1f} s {way} home's (limit {CLOCK_LIMIT_S:g} s); synchronise them "
            "(chrony, ntp)"
        )
    reasons += there.problems
    if topology.policy.distribute:
        needed = sum(file.nbytes for file, _ in distribution.files(topology.document()))
        if needed > there.free_bytes:
            reasons.append(
                f"policy.distribute: {format_size(needed)} of model and data do not fit: the disk of its working "
                f"directory has {format_size(there.free_bytes)} left; make room there"
            )
    return reasons


def clock_ahead(sent_at: float, there_at: float, received_at: float) -> float:
    """Return by how many seconds another clock, which was read between `sent_at` and `received_at`, is ahead of this
    one (negative: behind).

    Only the part of the difference that the round trip cannot explain counts.
    """
    return max(there_at - received_at, 0.0) + min(there_at - sent_at, 0.0)


@cache
def code_digest() -> str:
    """Return a digest of the rlbus code on this host."""
    digest = hashlib.blake2b(digest_size=6)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
