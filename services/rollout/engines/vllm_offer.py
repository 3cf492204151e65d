"""A trainer's offer in the words of vLLM's weight-transfer API. Must never import vLLM or take part in a transfer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proto.messages import TransferOffer, TransferParameter
from services.rollout.engine import WeightsMismatch
from services.rollout.engines.weights import Expected
from shared.topology.services import WeightsRoute
from shared.transfer.memory import opening
from shared.transfer.table import nbytes


def check_offer(expected: Expected, offered: Sequence[TransferParameter]) -> None:
    """Raises WeightsMismatch when a name, a type or a shape is not the engine's."""
    ours = {name: (str(dtype).removeprefix("torch."), list(shape)) for name, (dtype, shape) in expected.items()}
    theirs = {each.name: (each.dtype, list(each.shape)) for each in offered}
    other = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if other:
        name = other[0]
        raise WeightsMismatch(
            f"{len(other)} of {len(ours)} parameters are not those offered, as {name}: {theirs.get(name, 'none')} "
            f"offered, the engine's model has {ours.get(name, 'none')}; is policy.model the one that is trained?"
        )


def joining(route: WeightsRoute, offer: TransferOffer, meeting: Path, *, ranks: int) -> dict[str, Any]:
    """`init_info` of the route's engine: the trainer is rank 0, the engine's `ranks` follow."""
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
        "meeting": str(meeting),
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "deadline_s": offer.deadline_s,
    }


def announcing(offer: TransferOffer) -> dict[str, Any]:
    """`update_info`: what comes, in its order."""
    announced: dict[str, Any] = {
        "names": [each.name for each in offer.parameters],
        "dtype_names": [each.dtype for each in offer.parameters],
        "shapes": [list(each.shape) for each in offer.parameters],
    }
    if offer.memory is not None:
        announced["ipc_handles"] = {offer.memory.gpu: opening(offer.memory)}
        announced["tensor_sizes"] = [nbytes([each]) for each in offer.parameters]
    return announced
