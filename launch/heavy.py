"""Names the modules that are needed to compute with the model, so that spare processes can import them beforehand.

An entry is `module`, or `module:function` for a function that imports. If a module is missing here, processes import it
when they start, which only makes the start slower.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from shared.topology import Topology, model_files

_TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def heavy_imports(topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return the imports of every service for which a spare process is kept. The result is empty with `run.spares:
    false`."""
    if not topology.run.spares:
        return {}
    model = (*_TRANSFORMERS, *_modeling(topology.policy.model))
    trainer, reference, engine = (
        topology.services.policy_trainer,
        topology.services.reference,
        topology.services.rollout.engine,
    )
    found = {
        "policy-trainer-worker": (
            "services.policy_trainer.worker.service",
            "services.policy_trainer.worker.start",
            "services.policy_trainer.worker.checkpoint",
            "services.policy_trainer.worker.batch_loss",
            "services.policy_trainer.worker.weights.earlier",
            "services.policy_trainer.worker.weights.publish",
            "services.policy_trainer.worker.losses.own",
            *(("services.policy_trainer.worker.megatron.backend",) if trainer.backend == "megatron" else ()),
            *model,
        )
    }
    if reference is not None:
        backend = "frozen" if reference.backend == "torch" else "frozen_megatron"
        found["reference"] = (
            "services.reference.service",
            "services.reference.scoring",
            "services.reference.scorer",
            f"services.reference.{backend}",
            *model,
        )
    if engine != "openai":  # This engine is a client of a server.
        found["rollout"] = (
            "services.rollout.service",
            f"services.rollout.engines.{engine}_engine",
            *(("services.rollout.engines.vllm_setup:import_vllm",) if engine == "vllm" else ()),
            *model,
        )
    return found


def _modeling(model: str) -> tuple[str, ...]:
    """Return the transformers module that defines the model, or () if it does not have the usual name."""
    kind = str(model_files.read_config(model).get("model_type", "")).replace("-", "_")
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not kind.isidentifier():
        return ()
    file = Path(spec.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return (f"transformers.models.{kind}.modeling_{kind}",) if file.exists() else ()
