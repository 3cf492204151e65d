"""The worker of a vLLM engine that computes with adapters. vLLM finds `PolicyAdapters` by its name.

A version is handed to vLLM's adapter manager as tensors, under a number of its own. It is pinned: vLLM never evicts it,
so nothing enters a slot without a proof. Requests name a path that cannot exist, so one that names a released version
fails instead of computing something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from services.rollout.engines.proof.adapter_slots import AdaptedLayer, slot_proof
from services.rollout.engines.vllm_worker import PolicyWeights
from shared.model.adapter import A, B, is_adapter


class PolicyAdapters(PolicyWeights):
    """The `PolicyWeights` of a worker whose base never changes."""

    _adapted: Mapping[str, AdaptedLayer] = {}
    """The layers with an adapter, by vLLM's names."""

    def set_policy_adapter(self, tensors: Mapping[str, Tensor], number: int, in_use: Sequence[int]) -> None:
        """Put an adapter (by name, B multiplied by the scale) into a slot as `number`, which is replaced if it exists.

        All others are released, except those `in_use`. The tensors are kept until the adapter is released.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        for other in manager.list_adapters():
            if other == number or other not in in_use:
                manager.remove_adapter(other)
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        renames = mapper.get_rename_mapper() if mapper is not None else None
        self._adapted, loaded = {}, {}
        for name in sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)}):
            theirs = name if renames is None else renames._map_name(name)
            a, b = tensors[f"{name}.{A}"], tensors[f"{name}.{B}"]
            self._adapted[theirs] = AdaptedLayer(name, len(a), a.shape[1], len(b))
            loaded[theirs] = LoRALayerWeights(theirs, len(a), len(a), a, b)  # alpha = rank: the scale is in B
        manager.add_adapter(LoRAModel(number, max(layer.rank for layer in self._adapted.values()), loaded))
        manager.activate_adapter(number)
        manager.pin_adapter(number)

    def read_policy_adapter(self, path: str, number: int, in_use: Sequence[int]) -> None:
        """Put an adapter from a safetensors file into a slot, as `set_policy_adapter` does."""
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # the file is not a mapping and cannot be iterated over
            self.set_policy_adapter({name: file.get_tensor(name) for name in names}, number, in_use)

    def adapter_proof(self, number: int) -> dict[str, list[Any]]:
        """Return the proof of adapter `number` in this rank's slots (`Proof.plain`)."""
        manager = self.model_runner.lora_manager._adapter_manager
        if number not in manager.lora_index_to_id:
            return {"parts": [], "faults": [f"adapter {number} is in no slot"]}
        slot = manager.lora_index_to_id.index(number)
        proof = slot_proof(manager.modules, manager.packed_modules, slot, self._adapted, self._policy_parts)
        return proof.plain()
