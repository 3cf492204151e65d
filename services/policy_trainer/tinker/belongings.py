"""What clients have on a server: sessions, models, checkpoints and sampling sessions, each of one key.

Another key's things do not exist for a client. Both get the same answer.
"""

from __future__ import annotations

from typing import TypeVar, assert_never

from services.policy_trainer.tinker.errors import NotThere
from services.policy_trainer.tinker.records import (
    BASE_NUMBER,
    Belonging,
    Model,
    SamplingSession,
    SavedWeights,
    Session,
    Version,
)
from shared.topology.capacity import ADAPTERS_KEPT, ALL_WEIGHTS_KEPT

T = TypeVar("T", Session, Model, SavedWeights, SamplingSession)


class Belongings:
    """The records of all keys, apart from training requests."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.checkpoints: dict[str, SavedWeights] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.versions: dict[str, Version] = {}
        self.published = False
        """Whether the stores have the base, and what was saved for sampling in earlier lives of the server."""

    def put(self, record: Belonging) -> None:
        """Add or replace a record."""
        match record:
            case Session():
                self.sessions[record.id] = record
            case Model():
                self.models[record.id] = record
            case SavedWeights():
                self.checkpoints[record.id] = record
            case SamplingSession():
                self.samplers[record.id] = record
            case Version():
                self.versions[record.id] = record
            case _ as unreachable:
                assert_never(unreachable)

    def session(self, key: str, name: str) -> Session:
        """Return a session of a key. Raises NotThere, as the next three."""
        return _of(self.sessions, key, name, "session")

    def model(self, key: str, name: str) -> Model:
        return _of(self.models, key, name, "model")

    def checkpoint(self, key: str, path: str) -> SavedWeights:
        return _of(self.checkpoints, key, path, "checkpoint")

    def sampler(self, key: str, name: str) -> SamplingSession:
        return _of(self.samplers, key, name, "sampler")

    def models_of(self, session: str) -> list[Model]:
        return [model for model in self.models.values() if model.session == session]

    def checkpoints_of(self, model: str) -> list[SavedWeights]:
        return [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.model == model]

    def next_number(self) -> int:
        """Return the number of the next model."""
        return 1 + max((model.number for model in self.models.values()), default=BASE_NUMBER)

    def newest_version(self, number: int) -> Version | None:
        """Return the newest published weights of a model."""
        own = [version for version in self.versions.values() if version.model == number]
        return max(own, key=lambda version: version.step, default=None)

    def next_step(self) -> int:
        """Return the step of the next version of no client's model."""
        return 1 + max((one.step for one in self.versions.values() if one.model == BASE_NUMBER), default=0)

    def unpublished(self) -> list[SavedWeights]:
        """Return the weights for sampling whose version does not exist."""
        return [one for one in self.checkpoints.values() if one.sampler and one.version not in self.versions]

    def unneeded_versions(self) -> list[Version]:
        """Return published weights that no checkpoint names and that are not among a model's newest without a name. A
        finished session needs none without a name. The base is always needed."""
        named = {checkpoint.version for checkpoint in self.checkpoints.values()}
        finished = {model.number for model in self.models.values() if self._is_finished(model)}
        whole = {model.number for model in self.models.values() if not model.adapter.rank}
        unneeded: list[Version] = []
        for number in {version.model for version in self.versions.values()}:
            own = sorted(
                (one for one in self.versions.values() if one.model == number and one.id not in named),
                key=lambda version: version.step,
            )
            if number == BASE_NUMBER:
                unneeded += own[1:]
            else:
                kept = ALL_WEIGHTS_KEPT if number in whole else ADAPTERS_KEPT
                unneeded += own if number in finished else own[:-kept]
        return unneeded

    def _is_finished(self, model: Model) -> bool:
        session = self.sessions.get(model.session)
        return session is not None and session.finished


def _of(things: dict[str, T], key: str, name: str, kind: str) -> T:
    thing = things.get(name)
    if thing is None or thing.key != key:
        raise NotThere(f"{kind} {name[:200]!r}: not there")
    return thing
