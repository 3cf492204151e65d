"""What a server remembers across restarts. Every record is one row of its journal, under its kind and its id."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from proto.messages import BatchMeta, LossSpec, WeightsRef
from services.policy_trainer.sampling.request import SamplingRequest
from services.policy_trainer.tinker.errors import Category


class RequestKind(StrEnum):
    """What a training request asks for."""

    CREATE = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save_weights"
    LOAD = "load_weights"
    SAVE_SAMPLER = "save_weights_for_sampler"
    UNLOAD = "unload_model"


PASSES = frozenset({RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD})
"""Requests that bring data."""


class Session(msgspec.Struct, kw_only=True):
    """A client's session."""

    id: str
    key: str  # name of the client's key
    opened: float  # seconds since the epoch, as all times here
    seen: float  # time of the last sign of life
    info: dict[str, Any] = {}  # what the client tells about itself
    finished: bool = False
    clones: dict[str, int] = {}  # for each sampling session, the number of clients that have joined it


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a model, as its client asked for it."""

    rank: int  # 0 if all weights are trained instead of an adapter
    seed: int
    groups: list[str]  # of attention, mlp and unembed; empty if there is no adapter

    def trains(self, group: str) -> bool:
        return not self.rank or group in self.groups


class Model(msgspec.Struct, kw_only=True):
    """A client's model."""

    id: str  # `<session>:train:<n>`
    number: int  # by which the workers and the stores know it
    key: str
    session: str
    base: str  # name of the base model, as the client calls it
    adapter: Adapter
    opened: float
    used: float
    metadata: dict[str, Any] | None = None
    reached: int = -1  # number of the last request that is done
    steps: int = -1  # changes of its weights; -1: it does not exist yet
    window: list[int] = []  # requests since the last change whose gradients count
    spoiled: str = ""  # why the gradient since the last change is incomplete; empty if it is complete
    parked: bool = False  # its state is on disk instead of in the workers' snapshots
    closed: bool = False
    lost: str = ""  # why it cannot be trained any more
    tasks: int = 0  # number of tasks that its data have taken
    origin: str = (
        ""  # folder of the checkpoint with which it began, relative to the run directory; empty: a new adapter
    )
    origin_optimizer: bool = False  # whether it began with the checkpoint's optimizer, too


class TrainingRequest(msgspec.Struct, kw_only=True):
    """A training request. It is journaled before the client gets its future."""

    model: str
    seq: int
    kind: RequestKind
    at: float
    body: dict[str, Any] = {}  # what the client sent, apart from its data
    first: int = 0  # index of the first task of its data
    tokens: list[int] = []  # tokens of each datum
    nbytes: int = 0  # bytes of its data in the store
    meta: BatchMeta | None = None  # its data
    loss: LossSpec | None = None  # its loss
    shapes: list[list[int]] = []  # the shapes of the targets
    done: float = 0.0  # time at which it was done, or 0
    fetched: float = 0.0  # time at which the client first got the result, or 0
    released: bool = False  # whether its data are gone
    refused: str = ""  # why its contents cannot be used; it fails when its turn comes
    error: str = ""
    category: Category = Category.SERVER
    sums: dict[str, float] = {}  # metrics of the result
    parts: list[BatchMeta] = []  # the log-probs of the result, in the order of the data
    result: dict[str, Any] = {}  # the result in other cases

    @property
    def id(self) -> str:
        return f"{self.model}/{self.seq}"

    @property
    def total(self) -> int:
        """The number of tokens."""
        return sum(self.tokens)


BASE_NUMBER = 1
"""The number of the model that is no client's: an adapter that changes nothing, so that its version is the base."""


class Version(msgspec.Struct, kw_only=True):
    """Published weights of a model."""

    model: int  # number of the model
    step: int
    ref: WeightsRef

    @property
    def id(self) -> str:
        return f"{self.model}/{self.step}"


class SavedWeights(msgspec.Struct, kw_only=True):
    """Named weights: for training (`weights`), or for sampling (`sampler_weights`)."""

    path: str  # tinker://<model>/<kind>/<name>
    key: str
    model: str
    sampler: bool
    at: float
    base: str
    adapter: Adapter
    step: int
    folder: str  # of the adapter in peft's format, relative to the run directory
    nbytes: int = 0
    version: str = ""  # id of the version, for sampling
    expires: float | None = None
    metadata: dict[str, str] | None = None

    @property
    def id(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The id by which a client calls it among those of the model."""
        return self.path.split("/", 3)[3]


class SamplingSession(msgspec.Struct, kw_only=True):
    """A sampling session."""

    id: str  # `<session>:sample:<n>`
    key: str
    session: str
    at: float
    base: str
    path: str = ""  # of the checkpoint; empty for the base and for weights without a name
    version: str = ""  # id of the version; empty for the base
    number: int = 0  # distinguishes the seeds of sampling sessions
    inflight: str = ""  # the model whose newest published weights it follows, if they may change


class OpenSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample whose client may still ask for the result."""

    id: str  # `<sampling session>/<n>`
    key: str
    request: SamplingRequest
    sparse_targets: bool = False  # whether the client sent `request.targets` as a sparse tensor


class Stores(msgspec.Struct, frozen=True, kw_only=True):
    """The stores that have the versions. A run that is resumed has others, which are empty."""

    shm: str  # the folder in shared memory where they are (`RunDir.shm`)
    id: str = "stores"


Belonging = Session | Model | Version | SavedWeights | SamplingSession
Record = Belonging | TrainingRequest | OpenSample | Stores
KINDS: dict[str, type[Record]] = {
    "session": Session,
    "model": Model,
    "request": TrainingRequest,
    "version": Version,
    "checkpoint": SavedWeights,
    "sampler": SamplingSession,
    "sample": OpenSample,
    "stores": Stores,
}


def kind_of(record: Record) -> str:
    """Return the name of a record's kind."""
    return next(name for name, kind in KINDS.items() if type(record) is kind)
