"""What a request to save leaves behind: a checkpoint, published weights, and a sampling session."""

from __future__ import annotations

from services.policy_trainer.tinker.events import CallDone
from services.policy_trainer.tinker.records import (
    Belonging,
    Model,
    RequestKind,
    SamplingSession,
    SavedWeights,
    TrainingRequest,
    Version,
)


def saved_by(model: Model, request: TrainingRequest, event: CallDone, now: float) -> list[Belonging]:
    """Return the records of what a request has saved, and set its result."""
    sampler = request.kind == RequestKind.SAVE_SAMPLER
    made: list[Belonging] = []
    version = ""
    if event.ref is not None:
        made.append(published := Version(model=model.number, step=model.steps, ref=event.ref))
        version = published.id
    if (path := request.body.get("tinker_path")) is not None:
        ttl = request.body.get("ttl_seconds")
        made.append(
            SavedWeights(
                path=path,
                key=model.key,
                model=model.id,
                sampler=sampler,
                at=now,
                base=model.base,
                adapter=model.adapter,
                step=model.steps,
                folder=request.body["folder"],
                nbytes=event.nbytes,
                version=version,
                expires=None if ttl is None else now + ttl,
                metadata=request.body.get("user_metadata"),
            )
        )
        request.result = {"path": path}
    elif sampler:
        name = request.body["sampling_session_id"]
        made.append(
            SamplingSession(
                id=name,
                key=model.key,
                session=model.session,
                at=now,
                base=model.base,
                version=version,
                number=request.body["number"],
                inflight=model.id if request.body.get("kind") == "inflight" else "",
            )
        )
        request.result = {"sampling_session_id": name}
    return made
