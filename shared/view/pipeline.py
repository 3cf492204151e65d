"""The state of a run's work: progress, tasks, leases, staleness and stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """The progress of the run. Unknown values are None."""

    run: str
    reachable: bool
    """Whether the scheduler answered the monitor's last request; True if this is unknown."""
    step: int | None
    steps: int | None
    version: int | None
    lineage: int | None
    step_s: float | None
    """Mean duration of the latest steps, in seconds."""
    eta_s: float | None
    """Seconds until the last step at this pace."""
    values: Mapping[str, float]
    """The newest row of metrics."""


@dataclass(frozen=True)
class StoreView:
    """One batch store."""

    name: str
    bytes: float
    limit_bytes: float
    shards: float
    spilled_bytes: float
    busy: float
    """Number of times that a producer has had to wait for room since this store started."""


@dataclass(frozen=True)
class Pipeline:
    """The current tasks, leases and stores of the run."""

    tasks: Mapping[str, int]
    """Number of tasks in each state, in the order of a task's life."""
    leases: int
    """Number of live leases."""
    leases_by_stage: Mapping[str, int]
    waiting: int
    """Number of workers that are waiting for a lease."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of samples of the newest batch by the staleness of their oldest token, in versions."""
    staleness_step: int | None = None
    """The step of that batch."""
    stores: tuple[StoreView, ...] = ()
    clears_pending: int = 0
    """Number of tasks whose bytes a store has yet to free."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of tasks dropped so far, by reason."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Number of samples lost so far, by reason."""

    @property
    def busy(self) -> float:
        """Number of times that a producer had to wait for room in any store."""
        return sum(store.busy for store in self.stores)
