"""Shows the memory plan of a run, a row for each host and GPU, and says which of them are too small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shared.rundir import service_name
from shared.topology import Topology
from shared.topology.fields import format_size
from shared.topology.memory_plan import ALWAYS, MemoryPlace, Phase, Use, gpus_that_fit, peak, vllm_share
from shared.topology.services import DEVICE_SERVICE

_HERE = "this machine"


def place_name(place: MemoryPlace, home: str | None) -> str:
    """Return the name of a place for human readers: `this machine`, `host b`, `GPU 0`, `GPU 0 of host b`."""
    if place.host == home:
        return f"GPU {place.gpu}" if place.gpu else _HERE
    return f"GPU {place.gpu} of host {place.host}" if place.gpu else f"host {place.host}"


def described(uses: Sequence[Use]) -> str:
    """Return what one process holds in one place, with the phases of what it does not hold all the time."""
    parts = []
    for use in uses:
        when = ", ".join(phase for phase in Phase if phase in use.phases)
        parts.append(f"{use.what} {format_size(use.nbytes)}" + (f" ({when})" if use.phases != ALWAYS else ""))
    return ", ".join(parts)


def memory_lines(
    topology: Topology, places: Mapping[MemoryPlace, Sequence[Use]], room: Mapping[MemoryPlace, int]
) -> list[str]:
    """Return the lines of the table. `places` holds the uses of each place, and `room` the sizes that are known."""
    stores = {spec.host: spec for spec in topology.services_plan() if spec.service == "batch-store"}
    rows: list[tuple[str, str, str, str, str]] = [("memory of", "model", "of", "at most", "held by")]
    for place, uses in places.items():
        most = peak(uses)
        size = format_size(room[place]) if place in room else "-"
        steady = all(peak(uses, frozenset({phase})).nbytes == most.nbytes for phase in Phase)
        when = "always" if steady else str(most.phase)
        first = (place_name(place, topology.home), format_size(most.nbytes), size, when)
        keys = dict.fromkeys(use.key for use in uses)
        texts = [f"{service_name(*key)}: {described([use for use in uses if use.key == key])}" for key in keys]
        if place.gpu and any(key[0] == "rollout" for key in keys) and (share := vllm_share(topology)) is not None:
            texts.append(f"vLLM takes {share:.0%} of the GPU for weights and cache (gpu_memory_utilization)")
        if not place.gpu and place.host in stores:
            limit = format_size(topology.services.batch_store.memory)
            texts.append(f"{stores[place.host].name}: up to {limit} of shards, not included")
        rows += [(*(first if not number else ("",) * 4), text) for number, text in enumerate(texts)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]


def too_large(topology: Topology, elements: int, place: MemoryPlace, uses: Sequence[Use], limit: int) -> Iterator[str]:
    """Yield an error, with what would fit, if the memory of `place` is smaller than what its processes hold.

    Copies that exist only at the start are not counted, because the system can take back pages of files.
    """
    where, size = place_name(place, topology.home), format_size(limit)
    share = vllm_share(topology)
    if place.gpu and share is not None:
        usable = math.floor(share * limit)
        for use in uses:
            if use.key[0] == "rollout" and use.nbytes > usable:
                ranks = math.ceil(use.nbytes * topology.services.rollout.gpus / usable)
                yield (
                    "services.rollout.engine_args.gpu_memory_utilization: the engine's weights take "
                    f"{format_size(use.nbytes)} of {where}, of whose {size} vLLM uses {share:.0%}; "
                    f"services.rollout.gpus and parallel.tp of at least {ranks} would fit"
                )
    steps, saves = (peak(uses, frozenset({phase})).nbytes for phase in (Phase.STEPS, Phase.CHECKPOINTS))
    most = max(steps, saves)
    if most <= limit:
        return
    phase = Phase.STEPS if steps > limit else Phase.CHECKPOINTS
    during = [use for use in uses if phase in use.phases]
    keys = dict.fromkeys(use.key for use in during)
    parts = "; ".join(
        f"{service_name(*key)}: "
        + ", ".join(f"{use.what} {format_size(use.nbytes)}" for use in during if use.key == key)
        for key in keys
    )
    text = f"its training takes {format_size(steps)} of the memory of {where}, which has {size} ({parts})"
    if steps <= limit:
        text = f"its checkpoints take {format_size(saves)} of the memory of {where}, which has {size} ({parts})"
    elif saves > steps:
        text += f", and {format_size(saves)} while it saves a checkpoint"
    yield f"policy.model: {text}; {_that_fits(topology, elements, place, uses, limit, most)}"


def _that_fits(
    topology: Topology, elements: int, place: MemoryPlace, uses: Sequence[Use], limit: int, most: int
) -> str:
    """Return the smallest number of GPUs that would fit, or else the number of bytes that are missing."""
    missing = f"{format_size(most - limit)} more would fit"
    if not place.gpu:
        return f"{missing}; use a smaller model, or a machine with more memory"
    others = [use for use in uses if use.key[0] != DEVICE_SERVICE["policy-trainer"]]
    if len(others) < len(uses) and peak(others).nbytes <= limit:
        apart = sum(use.nbytes for use in others if not use.turns)
        count = gpus_that_fit(topology, elements, limit - apart)
        if count is not None:
            return f"services.policy-trainer.gpus: {count} would fit"
    return f"{missing}; use a smaller model, or divide it (parallel.tp)"
