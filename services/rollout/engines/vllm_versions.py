"""The policy versions of a vLLM engine: whole models, or adapters over weights that never change.

With adapters, vLLM loads the weights under them twice: when it starts, and once more in a way that can be proved. A
sleep discards them. Adapters then take their own way into the slots that vLLM's kernels read (`vllm_adapters`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from proto.messages import WeightsKind
from services.rollout.engine import ADAPTER_ONLY, BASE, FULL_ONLY, WeightsMismatch
from services.rollout.engines.proof.load_trace import Proof
from services.rollout.engines.proof.weights import base_digests, check_proofs, expected_weights, memory_file
from services.rollout.engines.vllm_setup import InFlight, adapter_arguments
from shared.model.adapter import AdapterStart, first_adapters, targets_of
from shared.model.load import empty_model, load_model, named_weights
from shared.rpc.errors import BadInput
from shared.weights.weight_set import WeightSet

HEAD = "lm_head"
Rpc = Callable[..., list[Any]]
"""Calls a worker's method on every rank: vLLM's `collective_rpc`."""


class VllmVersions(Protocol):
    """The versions that an engine loads. Everything but the properties runs on the compute thread."""

    @property
    def loads(self) -> frozenset[WeightsKind]:
        """See `Engine.loads`."""

    @property
    def live(self) -> int:
        """Number of versions with which samples can run at the same time. If it is 1, a version takes the place of the
        last one, also for running samples."""

    @property
    def scores_alone(self) -> bool:
        """See `Engine.scores_alone`."""

    def arguments(self) -> dict[str, Any]:
        """Return the EngineArgs that the versions need."""

    def expected(self) -> WeightSet:
        """Return the tensors of a version, without allocating them."""

    def first(self) -> dict[str, Tensor]:
        """Return the tensors of the version with which the engine starts."""

    def prove_base(self, rpc: Rpc, announced: Sequence[int]) -> None:
        """See `Engine.prove_base`."""

    def set(self, rpc: Rpc, tensors: Mapping[str, Tensor], swap: int, in_use: Collection[int]) -> None:
        """Set a version as number `swap`. Versions that neither it replaces nor samples use, by number, are
        released."""

    def proofs(self, rpc: Rpc, swap: int) -> list[Proof]:
        """Return each rank's proof of version `swap`, which is the last one that was set."""

    def request(self, swap: int) -> Any:
        """Return what a request for version `swap` carries."""

    def forget(self) -> None:
        """Forget the versions and the weights under them, because their memory was released."""


class FullVersions:
    """Versions that are whole models."""

    loads = FULL_ONLY
    live = 1
    scores_alone = False

    def __init__(self, model: Path, dtype: str, ranks: int) -> None:
        self._model = model
        self._dtype = dtype
        self._ranks = ranks

    def arguments(self) -> dict[str, Any]:
        return {}

    def expected(self) -> WeightSet:
        return expected_weights(self._model, self._dtype)

    def first(self) -> dict[str, Tensor]:
        return named_weights(load_model(self._model, self._dtype))

    def prove_base(self, rpc: Rpc, announced: Sequence[int]) -> None:
        raise WeightsMismatch("engine vllm has no adapters")

    def set(self, rpc: Rpc, tensors: Mapping[str, Tensor], swap: int, in_use: Collection[int]) -> None:
        _hand_over(rpc, self._ranks, "policy_weights", tensors)

    def proofs(self, rpc: Rpc, swap: int) -> list[Proof]:
        return _proofs(rpc, "policy_proof")

    def request(self, swap: int) -> Any:
        return None

    def forget(self) -> None:
        pass


class AdapterVersions:
    """Versions that are adapters."""

    loads = ADAPTER_ONLY

    def __init__(
        self, model: Path, dtype: str, ranks: int, start: AdapterStart, in_flight: InFlight, live: int
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._ranks = ranks
        self._start = start
        self._in_flight = in_flight
        self._full = FullVersions(model, dtype, ranks)
        self._holds_base = False
        """Whether the weights under the adapters have been loaded in a way that can be proved."""
        self.live = live
        self.scores_alone = False

    def arguments(self) -> dict[str, Any]:
        """Return EngineArgs. Raises BadInput for an adapter of the head if versions are scored beside samples."""
        modules = {name.rpartition(".")[2] for name in self._layers()}
        if HEAD in modules:  # vLLM applies the head's adapter to one token of a sample only, so scoring needs no other
            if self._in_flight != "wait":
                raise BadInput(
                    f"services.rollout.in_flight: {self._in_flight}: vLLM cannot score an adapter of {HEAD} while "
                    "samples are running; use wait, or take it out of policy.lora.target_modules"
                )
            self.scores_alone = True
        return adapter_arguments(self._start.lora.rank, modules, self.live)

    def expected(self) -> WeightSet:
        return WeightSet.of(self.first())

    def first(self) -> dict[str, Tensor]:
        return first_adapters(self._layers(), self._start, scaled=True)

    def prove_base(self, rpc: Rpc, announced: Sequence[int]) -> None:
        base = self._full.expected()
        digests = base_digests(base, announced)
        self._load_base(rpc)
        check_proofs(self._full.proofs(rpc, 0), base, digests)

    def set(self, rpc: Rpc, tensors: Mapping[str, Tensor], swap: int, in_use: Collection[int]) -> None:
        self._load_base(rpc)
        numbers = sorted({self._number(used) for used in in_use if used != BASE})
        _hand_over(rpc, self._ranks, "policy_adapter", tensors, self._number(swap), numbers)

    def proofs(self, rpc: Rpc, swap: int) -> list[Proof]:
        return _proofs(rpc, "adapter_proof", self._number(swap))

    def request(self, swap: int) -> Any:
        """Return a LoRARequest. Its name and path occur once, because vLLM's cache of prompts goes by them."""
        if swap == BASE:
            return None
        from vllm.lora.request import LoRARequest

        name = f"version-{swap}"
        return LoRARequest(name, self._number(swap), f"/proc/{name}")  # cannot exist, so it is never read

    def forget(self) -> None:
        self._holds_base = False

    def _number(self, swap: int) -> int:
        """Return vLLM's number of the adapter. A version that replaces the last one takes over its number."""
        return 1 if self.live == 1 else swap

    def _layers(self) -> Mapping[str, nn.Linear]:
        return targets_of(empty_model(self._model, self._dtype), self._start.lora).chosen

    def _load_base(self, rpc: Rpc) -> None:
        """Load the weights under the adapters, unless that has been done. vLLM forgets all adapters."""
        if not self._holds_base:
            self._full.set(rpc, self._full.first(), 0, ())
            self._holds_base = True


def _hand_over(rpc: Rpc, ranks: int, what: str, tensors: Mapping[str, Tensor], *more: Any) -> None:
    """Call the method of every rank that is named `set_` or, if there are several ranks, `read_` followed by `what`."""
    if ranks == 1:
        rpc(f"set_{what}", args=(tensors, *more))
    else:  # each rank is a process, and vLLM's own messages are pickled
        with memory_file(tensors) as path:
            rpc(f"read_{what}", args=(path, *more))


def _proofs(rpc: Rpc, method: str, *args: Any) -> list[Proof]:
    return [Proof.of(proof) for proof in rpc(method, args=args)]
