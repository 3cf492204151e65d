"""What a key and a model may have open at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.policy_trainer.tinker.errors import BadRequest
from services.policy_trainer.tinker.records import Model, TrainingRequest


@dataclass(frozen=True)
class KeyLimits:
    """Maximum numbers of requests that are not done, and the share of the store that a key's data may take."""

    model_requests: int
    key_requests: int
    key_bytes: int

    def admit(self, model: Model, seq: int, nbytes: int, mine: Sequence[TrainingRequest]) -> None:
        """Check a request before its data are put. `mine` are all requests of the key.

        Raises BadRequest: 429 if the client must wait, and 409 if the model takes no more requests. The request whose
        number is next never waits, because later ones wait for it.
        """
        if model.closed:
            raise BadRequest(f"model {model.id}: was unloaded; create another one, or load a checkpoint", 409)
        if seq > model.reached + self.model_requests:
            message = f"seq_id {seq}: the model is at {model.reached}, and may have {self.model_requests} open requests"
            raise BadRequest(message, 429)
        waiting = sum(1 for request in mine if not request.done)
        if waiting >= self.key_requests and seq > model.reached + 1:
            raise BadRequest(f"the key has {waiting} open requests, and may have {self.key_requests}", 429)
        held = total_bytes(mine)
        if nbytes and held + nbytes > self.key_bytes and held > total_bytes(window(model, mine)):
            raise BadRequest(f"the key's data take {held} bytes, and may take {self.key_bytes}", 429)

    def too_much(self, model: Model, nbytes: int, requests: Iterable[TrainingRequest]) -> str:
        """Return why data that wait for the model's next optim_step are too much, or an empty string.

        To make the client wait would be useless, because it sends all of them before it asks for the step.
        """
        held = total_bytes(window(model, requests))
        if held + nbytes <= self.key_bytes:
            return ""
        more = f"{held + nbytes} bytes of data would wait for one optim_step, but the key's share is {self.key_bytes}"
        return f"{more}; send less before the step, or raise services.batch-store.memory"


def window(model: Model, requests: Iterable[TrainingRequest]) -> list[TrainingRequest]:
    """Return the model's requests whose data a replay may need, and those that are not done."""
    own = (request for request in requests if request.model == model.id)
    return [request for request in own if request.seq > model.reached or request.seq in model.window]


def total_bytes(requests: Iterable[TrainingRequest]) -> int:
    """Return the bytes that the data of requests take up in the store."""
    return sum(request.nbytes for request in requests if not request.released)
