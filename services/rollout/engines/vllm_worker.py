"""The code that rlbus runs in a vLLM worker: it replaces the model's weights, and on a CPU releases memory and removes
the names of shared memory.

This module does not import vLLM. A reload is valid only with its proof.

vLLM finds `PolicyWeights` by its name (`worker_extension_cls`) and mixes it into its worker class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, UntypedStorage, nn

from services.rollout.engines.proof.adapter_slots import slot_arrays
from services.rollout.engines.proof.load_trace import LoadTrace, WeightPart
from services.rollout.engines.vllm_experts import Named, has_experts, pack_experts, stored_names
from shared.colocation.shelf import give_back

_SHARED_MEMORY = "/dev/shm/vllm_dist_"


class PolicyWeights:
    """A worker's methods for weight updates. Their names must differ from those of vLLM's own worker."""

    model_runner: Any
    reload_weights: Any
    _policy_mark = ""
    _policy_trace: LoadTrace | None = None
    """The trace of the last load."""
    _policy_names: Callable[[Named], Named] | None = None
    """Translates the names of weights for vLLM, if that is needed."""
    _policy_parts: Sequence[WeightPart] = ()
    """The parts of the weights that this rank was last proved to hold."""
    _asleep: dict[str, list[tuple[UntypedStorage, int]]]

    def set_policy_weights(self, weights: Mapping[str, Tensor]) -> int:
        """Load `weights` (by Hugging Face name, each tied weight once) over the live model. Return the number of
        rebuilt heads.

        None of the tensors is kept. `policy_proof` shows whether everything arrived.
        """
        with self._policy_traced(self._new_trace()) as model:
            self.reload_weights(weights_iterator=iter(weights.items()))
            return repack(model)

    def read_policy_weights(self, path: str, mark: str = "") -> int:
        """Load the weights from a safetensors file. This rank maps the file and takes its part of each parameter."""
        self._policy_mark = ""
        with safe_open(path, framework="pt") as file, self._policy_traced(self._new_trace()) as model:
            names = file.keys()  # the file is not a mapping and cannot be iterated over
            self.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
            rebuilt = repack(model)
        self._policy_mark = mark
        return rebuilt

    def policy_proof(self) -> dict[str, list[Any]]:
        """Return the proof of the weights that the last load left in this rank's model (`Proof.plain`)."""
        if self._policy_trace is None:
            return {"parts": [], "faults": ["no load was followed"]}
        proof = self._policy_trace.proof(self.model_runner.get_model())
        self._policy_parts = [part for part, _ in proof.parts]
        return proof.plain()

    def _new_trace(self) -> LoadTrace:
        """Return a new trace. The first trace, used in the drill, also shows that packing preserves every weight."""
        if self._policy_names is None and has_experts(self.model_runner.get_model()):
            self._policy_names = stored_names(self.model_runner.model_config.hf_config)
        return LoadTrace(self._policy_names, read_back=self._policy_trace is None)

    @contextmanager
    def _policy_traced(self, trace: LoadTrace) -> Iterator[nn.Module]:
        """Use `trace` to follow a load or the next part of one. Yields the model being loaded."""
        model = self.model_runner.get_model()
        self._policy_trace = trace
        with trace.over(model):
            yield model

    def policy_mark(self) -> str:
        """Return the mark of the loaded weights. The mark is empty if this process has replaced the one that loaded
        them."""
        return self._policy_mark

    def leave_host_memory(self) -> int:
        """Release on a CPU what a level-2 sleep releases on a GPU: weights, keys and values.

        vLLM 0.32 ignores `sleep` on a CPU. Tensors keep their identity. Buffers are kept, because no checkpoint
        restores them. Returns the number of bytes released, not counting those that oneDNN packed for itself.
        """
        model = self.model_runner.get_model()
        for module in model.modules():
            if getattr(module, "cpu_linear", None) is not None:
                module.cpu_linear = None  # holds the packed weight; the next load creates another
        weights = [*model.parameters(), *slot_arrays(model)]
        self._asleep = {"weights": _emptied(weights), "kv_cache": _emptied(self.model_runner.kv_caches)}
        give_back()
        return sum(nbytes for parts in self._asleep.values() for _, nbytes in parts)

    def take_host_memory(self, parts: list[str]) -> None:
        """Allocate zeroed memory for `parts` (`weights`, `kv_cache`). Weights must be loaded before anything runs."""
        for part in parts:
            for storage, nbytes in self._asleep.pop(part, []):
                storage.resize_(nbytes)
                # The memory is zeroed, because arbitrary contents might be NaN, and a masked NaN is still NaN.
                storage.fill_(0)  # type: ignore[attr-defined]  # not in torch's stubs

    def unname_shared_memory(self) -> list[str]:
        """Remove the names of the shared memory for CPU reductions, once all ranks have mapped it. Return the names.

        vLLM 0.32 removes the names when a rank exits on its own. A rank that is killed would leave 8 MiB behind for
        good.
        """
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = sorted({line.partition(_SHARED_MEMORY)[2] for line in lines if _SHARED_MEMORY in line})
        for name in names:
            Path(_SHARED_MEMORY + name).unlink(missing_ok=True)
        return names


def _emptied(tensors: Iterable[Tensor]) -> list[tuple[UntypedStorage, int]]:
    """Reduce the storages of `tensors` to size 0. Return them with their previous sizes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in sizes:
        storage.resize_(0)
    return sizes


def repack(model: nn.Module) -> int:
    """Pack what a reload leaves unpacked. Return the number of rebuilt heads."""
    pack_experts(model)
    return rebuild_tied_heads(model)


def rebuild_tied_heads(model: nn.Module) -> int:
    """Repack the output heads that share their weights with an embedding. Return the number of heads.

    vLLM 0.32 packs linear layers for the CPU when they are loaded. A reload packs a layer again once a parameter has
    been loaded *into that layer*. This never happens to a tied head, which therefore continues with the old packed
    weights, without an error. On GPUs, where nothing is packed, this function changes nothing.
    """
    # The head comes after the embedding in every model, so the first owner of a weight is the one that was loaded.
    owners: dict[tuple[int, tuple[int, ...]], nn.Module] = {}
    rebuilt = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        owner = owners.setdefault((weight.data_ptr(), tuple(weight.shape)), module)
        method: Any = getattr(module, "quant_method", None)
        if owner is not module and method is not None:
            method.process_weights_after_loading(module)
            rebuilt += 1
    return rebuilt
