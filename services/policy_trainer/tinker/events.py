"""What happens to the state machine of a server, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from proto.messages import BatchMeta, WeightsRef
from services.policy_trainer.tinker.errors import Category
from services.policy_trainer.tinker.records import Belonging, Record, TrainingRequest


class Step(StrEnum):
    """What the workers do in a call."""

    OPEN = "open"  # bring a model's state back: a new one, a snapshot, or what was parked
    REPLAY = "replay"  # compute a gradient again that died with a worker
    RUN = "run"  # a request, or a piece of it
    PARK = "park"  # write a model's state to disk and forget it


@dataclass(frozen=True)
class WorkerCall:
    """Make one call of the workers. Exactly one `CallDone`, `CallRefused` or `WorkersGone` follows."""

    step: Step
    model: str
    request: TrainingRequest | None = None
    piece: tuple[int, int] = (0, 0)
    """The range of the request's datums."""
    forward_only: bool = False
    last: bool = True
    """Whether it is the last piece."""

    @property
    def asked(self) -> TrainingRequest:
        """The request. Raises ValueError for a step that belongs to none."""
        if self.request is None:
            raise ValueError(f"{self.step} belongs to no request")
        return self.request


@dataclass(frozen=True)
class Commit:
    """Write to the journal before anything that follows is carried out."""

    kept: tuple[Record, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Settle:
    """A request is done: answer those who wait for it."""

    request: str


@dataclass(frozen=True)
class ReleaseData:
    """The data and the results of a request are no longer needed. Tasks are counted per model."""

    model: int
    first: int
    count: int


@dataclass(frozen=True)
class ReleaseVersion:
    """Published weights are no longer needed."""

    ref: WeightsRef


@dataclass(frozen=True)
class RemoveFolder:
    """A checkpoint has expired or was deleted."""

    folder: str


Effect = WorkerCall | Commit | Settle | ReleaseData | ReleaseVersion | RemoveFolder


@dataclass(frozen=True)
class Submitted:
    """A training request has arrived. Its data, if any, are in the store."""

    request: TrainingRequest


@dataclass(frozen=True)
class Kept:
    """A record was made or changed outside a training request."""

    record: Belonging


@dataclass(frozen=True)
class Beat:
    """A sign of life of a session."""

    session: str


@dataclass(frozen=True)
class CallDone:
    """A call has succeeded."""

    call: WorkerCall
    sums: dict[str, float] = field(default_factory=dict)
    part: BatchMeta | None = None
    ref: WeightsRef | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class CallRefused:
    """A call has failed, and the workers go on."""

    call: WorkerCall
    message: str
    category: Category


@dataclass(frozen=True)
class WorkersGone:
    """The workers lost their state, all models included."""


@dataclass(frozen=True)
class WorkersReady:
    """The workers accept calls. No model is open."""


@dataclass(frozen=True)
class Stopping:
    """The run ends: all models must be parked, and no request is begun any more."""


@dataclass(frozen=True)
class Fetched:
    """A client has got a result."""

    request: str


@dataclass(frozen=True)
class Deleted:
    """A client deletes a checkpoint."""

    path: str


@dataclass(frozen=True)
class ClockTick:
    """Time has passed."""


Event = (
    Submitted
    | Kept
    | Beat
    | CallDone
    | CallRefused
    | WorkersGone
    | WorkersReady
    | Stopping
    | Fetched
    | Deleted
    | ClockTick
)
