"""Translates a trainer's offer for vLLM's weight-transfer API, and makes the calls that carry out the transfer.

This module does not import vLLM. A model that a transfer has only partly replaced is not used for sampling.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from proto.messages import TransferOffer
from services.rollout.weights.transfer import TransferFailed
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute
from shared.weights.memory import opening
from shared.weights.weight_set import nbytes


class HalfTaken(Exception):
    """A transfer broke off partway through the model, which is now unusable. The message is one line."""


class OfferTaker:
    """Makes all ranks of an engine take part in transfers, and tracks the communicator that they use."""

    def __init__(self, route: WeightsRoute, *, ranks: int) -> None:
        self._route = route
        self._ranks = ranks
        self.communicator = 0

    def take(self, call: Callable[..., list[str]], offer: TransferOffer, meeting: Meeting) -> None:
        """Accept an offer and receive the weights that it carries. `call(method, args=...)` calls a method of
        `TransferredWeights` on all ranks.

        Raises TransferFailed while the model is still intact, and HalfTaken after that.
        """
        whole = self._route == "gloo"  # gloo changes the model only at the end, and enforces its own deadline
        within_s = 0.0 if whole else offer.deadline_s
        if offer.communicator != self.communicator:
            join = joining(self._route, offer, meeting, ranks=self._ranks)
            _check(call("join_transfer", args=(join, within_s)), "join")
            self.communicator = offer.communicator
        try:
            _check(call("receive_transfer", args=(announcing(offer), within_s, not offer.first)), "receive")
            if not offer.left:
                whole = False
                _check(call("finish_transfer"), "finish")
        except TransferFailed as error:
            if whole:
                raise
            raise HalfTaken(f"{self._route}: {error}") from None


def _check(failures: Sequence[str], what: str) -> None:
    if any(failures):
        raise TransferFailed(f"{what}: {next(failure for failure in failures if failure)}")


def joining(route: WeightsRoute, offer: TransferOffer, meeting: Meeting, *, ranks: int) -> dict[str, Any]:
    """Return the `init_info` for the route. The trainer is rank 0, followed by the engine's `ranks` ranks."""
    if route == "ipc":
        return {"packed": True}
    if route == "nccl":
        return {
            "nccl_unique_id_b64": base64.b64encode(offer.unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "packed": False,
        }
    return {
        "interface": meeting.interface,
        "file": str(meeting.file or ""),
        "store": meeting.store,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "deadline_s": offer.deadline_s,
    }


def announcing(offer: TransferOffer) -> dict[str, Any]:
    """Return the `update_info`, which lists what will arrive, in order."""
    parameters = offer.parameters[offer.first : len(offer.parameters) - offer.left]
    announced: dict[str, Any] = {
        "names": [parameter.name for parameter in parameters],
        "dtype_names": [parameter.dtype for parameter in parameters],
        "shapes": [list(parameter.shape) for parameter in parameters],
    }
    if offer.memory is not None:
        announced["ipc_handles"] = {offer.memory.gpu: opening(offer.memory)}
        announced["tensor_sizes"] = [nbytes([parameter]) for parameter in parameters]
    return announced
