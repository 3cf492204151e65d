"""Builds a `Plan` from the topology and its data sources. It reads files once, at startup, and needs no tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.events import Configure, Recording
from services.scheduler.leases import Holder
from services.scheduler.plan import EvalPlan, Plan, SourcePlan
from services.scheduler.state import HEARTBEAT_S
from services.scheduler.turns import Weights
from shared.data import DataError, RowError, Source, open_source
from shared.data.source import LongestPrompt, RowsRead, prompt_bytes, read_rows
from shared.inputs import Inputs
from shared.rpc.errors import BadInput
from shared.samples.text import Choice
from shared.stages import train_graph
from shared.topology import Topology, task_bytes
from shared.topology.capacity import (
    hold_tasks,
    longest_prompt,
    overhead_bytes,
    record_bytes,
    replay_bytes,
    rows_problem,
    unleased_token_bytes,
    version_bytes,
    weight_versions,
)
from shared.topology.data import TrainSource

HEARTBEAT_MOST_S = 5.0
"""Maximum seconds between the heartbeats of a process."""
HEARTBEATS_A_SECOND = 2000
"""Number of heartbeats per second that the scheduler accepts from all processes of a large run together."""
HEARTBEATS_A_LEASE = 6
"""Minimum number of heartbeats within `lease_s`, the time after which a lease without progress is lost."""


def make_plan(topology: Topology, where: Path) -> tuple[Plan, list[RowError]]:
    """Return the plan, and the unusable training rows, which are not in the plan.

    Rows that were added after the run began are not in the plan, either. `where` is the path of the topology, in the
    run directory. Raises BadInput if a source or the model cannot be used.
    """
    kept = {key: rows_of_set.rows for key, rows_of_set in Inputs.load(where.parent).rows.items()}
    try:
        parts = [_read_part(topology, key, where, kept.get(key)) for key in topology.data.train_sources]
        evals = tuple(
            EvalPlan(
                name=name,
                rows=_usable(
                    open_source(evaluation.source, where=f"{where}: data.eval.{name}"),
                    kept.get(f"data.eval.{name}.source", evaluation.rows),
                ),
                samples=evaluation.samples,
                every=evaluation.every,
            )
            for name, evaluation in topology.data.eval.items()
        )
        prompt = _prompt_tokens(topology, where, parts)
    except DataError as error:
        raise BadInput(str(error)) from error
    starts = [0, *itertools.accumulate(part.count for part in parts)]
    several = tuple(
        SourcePlan(part.rows(start), _by_position(topology, chosen))
        for part, start, chosen in zip(parts, starts, topology.data.train_sources.values(), strict=False)
    )
    plan = Plan(
        run=topology.run.name,
        seed=topology.run.seed,
        tasks_per_step=topology.algorithm.tasks_per_step,
        group_size=topology.algorithm.group_size,
        staleness=topology.staleness,
        shuffle=topology.data.train.shuffle,
        deterministic=topology.run.deterministic,
        rows=several[0].rows if len(several) == 1 else [row for part in several for row in part.rows],
        sources=several if topology.data.train.sources else (),
        block_tasks=topology.services.rollout.block_tasks,
        filter_limit=_filter_limit(topology),
        by_completion=topology.consume == "completion",
        evals=evals,
        stages=train_graph(topology),
        task_bytes=task_bytes(topology, prompt),
        overhead_bytes=overhead_bytes(topology),
        unleased_token_bytes=unleased_token_bytes(topology),
        replay_bytes=replay_bytes(topology, prompt),
        record_bytes=record_bytes(topology, prompt),
        weight_versions=weight_versions(topology),
        weight_bytes=_version_bytes(topology),
        reference_every=_refresh(topology),
    )
    return plan, [problem for part in parts for problem in part.bad]


@dataclass(frozen=True)
class _TrainPart:
    """A source of the training set, of which the first `count` rows are used, and the result of reading these."""

    key: str
    source: Source
    count: int
    read: RowsRead

    @property
    def bad(self) -> list[RowError]:
        """The unusable rows, with their indices in this source."""
        return [problem for problem in self.read.bad if problem.index < self.count]

    def rows(self, start: int) -> Sequence[int]:
        """Return the usable rows as they are numbered in the training set, in which this source's begin at `start`."""
        excluded = {problem.index for problem in self.bad}
        every = range(start, start + self.count)
        return [row for row in every if row - start not in excluded] if excluded else every


def _read_part(topology: Topology, key: str, where: Path, kept: int | None) -> _TrainPart:
    """Read a source of the training set, of which the run began with `kept` rows. Raises DataError, and BadInput if no
    row is usable."""
    named = key.removesuffix(".source")
    source = open_source(topology.data.sources[key], where=f"{where}: {named}")
    count = len(source) if kept is None else min(len(source), kept)
    part = _TrainPart(key, source, count, read_rows(source, count))
    if not len(part.rows(0)):
        raise BadInput(f"{where}: {named}: no usable row; the first is bad: {part.bad[0].message}")
    return part


def _by_position(topology: Topology, chosen: TrainSource) -> Weights:
    """Return the weights of a source by the first position that has each: steps take `tasks_per_step` positions."""
    tasks = topology.algorithm.tasks_per_step
    return tuple((max(step - 1, 0) * tasks, weight) for step, weight in chosen.weights)


def _refresh(topology: Topology) -> int:
    kl = topology.algorithm.kl
    return kl.refresh_every or 0 if kl is not None and topology.needs_reference else 0


def _filter_limit(topology: Topology) -> int:
    filtering = topology.algorithm.filter_zero_variance
    return filtering.max_refill * topology.algorithm.tasks_per_step if filtering is not None else 0


def configuration(topology: Topology) -> Configure:
    """Return the settings that a resumed run may change."""
    choice = Choice.of(topology)
    return Configure(
        steps=topology.last_step,
        attempts=topology.lease.attempts,
        keep_last=topology.checkpoint.keep_last,
        collect_at_commit=topology.gc.after == "commit",
        recording=None if choice is None else Recording(choice, hold_tasks(topology)),
    )


def heartbeat_s(topology: Topology) -> float:
    """Return the heartbeat interval of a process that holds leases, in seconds.

    The interval is longer in large runs, but short enough for several heartbeats before a lease can expire.
    """
    longest = min(topology.lease.lease_s / HEARTBEATS_A_LEASE, HEARTBEAT_MOST_S)
    return max(min(len(topology.services_plan()) / HEARTBEATS_A_SECOND, longest), HEARTBEAT_S)


def device_limits(topology: Topology) -> dict[Holder, float]:
    """Return, for each process that shares devices, the seconds it may go without progress while others wait.

    A rank may wait up to `collective_s` for the other ranks of its model. Other processes do not wait for any peer.
    """
    lease_s, services = topology.lease.lease_s, topology.colocated_services
    longest = {model.service: max(lease_s, model.settings.collective_s) for model in topology.trained}
    for model in topology.frozen:
        if model.settings.parallel.model_ranks > 1:
            longest[model.service] = max(lease_s, model.settings.collective_s)
    return {
        (planned.service, planned.instance): longest.get(planned.service, lease_s)
        for planned in topology.services_plan()
        if planned.service in services
    }


def _usable(source: Source, first: int | None) -> list[int]:
    bad = {error.index for error in source.validate()}
    most = len(source) if first is None else min(first, len(source))
    return [index for index in range(most) if index not in bad]


def _prompt_tokens(topology: Topology, where: Path, parts: Sequence[_TrainPart]) -> int:
    """Return an upper bound on the number of tokens in a prompt that is sampled.

    Raises BadInput if the stores then cannot hold all tasks that may be live.
    """
    if topology.data.train.max_prompt_tokens is not None:
        return topology.data.train.max_prompt_tokens
    _version_bytes(topology)  # refuses a model that cannot be measured
    sizes = []
    for part in parts:
        longest = part.read.longest or _longest(part.source, part.count, part.bad)
        sizes.append((longest.nbytes + topology.data.train_sources[part.key].system_bytes, part, longest.row))
    nbytes, part, row = max(sizes, key=lambda size: size[0])
    if problem := rows_problem(topology, nbytes, part.source.place(row)):
        raise BadInput(f"{where}: {problem}")
    return longest_prompt(topology, nbytes)


def _version_bytes(topology: Topology) -> int:
    try:
        return version_bytes(topology.policy_model)
    except ValueError as error:
        raise BadInput(f"policy.model: {error}; save the model again") from error


def _longest(source: Source, count: int, bad: list[RowError]) -> LongestPrompt:
    """Make every row to find the longest prompt, for a source that does not make its rows to check them."""
    excluded = {problem.index for problem in bad}
    sizes = ((prompt_bytes(source.row(index)), index) for index in range(count) if index not in excluded)
    return LongestPrompt(*max(sizes, default=(0, 0)))
