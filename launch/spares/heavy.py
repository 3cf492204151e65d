"""Names the modules that services need to compute with the model, so that they are imported once for all services.

An entry is `module`, or `module:function` for a function that does the imports. If a module is missing from this list,
each service imports it for itself, which only makes the service start more slowly.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from launch.spares.processes import SpareKind
from shared.topology import Topology, model_files
from shared.topology.models import POLICY_WORKER

_VLLM = ("services.rollout.engines.vllm_setup:import_vllm",)
_TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def spare_kinds(topology: Topology, services: Collection[str]) -> list[SpareKind]:
    """Return the kinds of spare process that a host keeps if it runs `services`, or an empty list if
    `run.spares` is false.

    Rollouts with vLLM have a spare of their own, because importing vLLM takes longer than all other imports together.
    """
    if not topology.run.spares:
        return []
    model = (*_TRANSFORMERS, *_modeling(topology.policy.model))
    trainer, reference, engine = (
        topology.services.policy_trainer,
        topology.services.reference,
        topology.services.rollout.engine,
    )
    imports = {
        POLICY_WORKER: (
            "services.policy_trainer.worker.service",
            "services.policy_trainer.worker.start",
            *(("services.policy_trainer.worker.megatron.backend",) if trainer.backend == "megatron" else ()),
        )
    }
    if reference is not None:
        backend = "frozen" if reference.backend == "torch" else "frozen_megatron"
        imports["reference"] = (
            "services.reference.service",
            "services.reference.scoring",
            "services.reference.scorer",
            f"services.reference.{backend}",
        )
    if engine != "openai":  # This engine is a client of a server.
        imports["rollout"] = ("services.rollout.service", f"services.rollout.engines.{engine}_engine")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for service in imports:
        if service in services:
            own = _VLLM if service == "rollout" and engine == "vllm" else ()
            kinds.setdefault(own, []).append(service)
    return [
        SpareKind(tuple(forks), tuple(dict.fromkeys([*chain(*(imports[fork] for fork in forks)), *own, *model])))
        for own, forks in kinds.items()
    ]


def _modeling(model: str) -> tuple[str, ...]:
    """Return the transformers module that defines the model, or () if it does not have the usual name."""
    kind = str(model_files.read_config(model).get("model_type", "")).replace("-", "_")
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not kind.isidentifier():
        return ()
    file = Path(spec.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return (f"transformers.models.{kind}.modeling_{kind}",) if file.exists() else ()
