"""Layers of experts in a vLLM worker: the names under which vLLM knows their weights, and their layout on a CPU.

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from services.rollout.engines.proof.load_trace import experts_of
from shared.model.stored import StoredNames

Named = Iterable[tuple[str, Tensor]]


def has_experts(model: nn.Module) -> bool:
    return any(experts_of(module) is not None for module in model.modules())


def pack_experts(model: nn.Module) -> None:
    """Pack all experts after a reload.

    vLLM 0.32 packs them for its CPU kernel at the first load only. A reload copies unpacked weights into the packed
    memory, without an error. On GPUs, where nothing is packed, this function changes nothing.
    """
    for module in model.modules():
        kernel = experts_of(module)
        if kernel is not None:
            kernel.process_weights_after_loading(module)


def stored_names(config: Any) -> Callable[[Named], Named]:
    """Return a function that converts weights of a transformers model, each as it comes, to those of its checkpoint,
    which vLLM knows. Raises ValueError if they cannot be converted one by one."""
    stored = StoredNames(config)
    stored.check_each()

    def converted(weights: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield from stored.of({name: tensor}).items()

    return converted
