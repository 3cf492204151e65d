"""Creates engines from the names that topologies use. An engine is imported only when it is requested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.rollout.engine import Engine
from shared.rpc.errors import BadInput

if TYPE_CHECKING:
    from shared.topology.schema import Policy
    from shared.topology.services import Rollout


def make_engine(
    settings: Rollout, *, policy: Policy, temperature: float, deterministic: bool, seed: int, live: int, routes: bool
) -> Engine:
    """Return the engine that `services.rollout` selects, not yet started. `temperature` is the training temperature;
    `seed` is the run's. An engine with adapters samples with `live` of them at the same time. With `routes`, the engine
    records the experts of each token.

    Raises BadInput for arguments that the engine does not accept.
    """
    threads, model, dtype = settings.threads or 1, Path(policy.model), policy.dtype
    if settings.engine == "vllm":
        from services.rollout.engines.vllm_engine import VllmEngine
        from shared.model.adapter import AdapterStart

        return VllmEngine(
            model=model,
            dtype=dtype,
            threads=threads,
            deterministic=deterministic,
            engine_args=settings.engine_args,
            tensor_parallel=settings.parallel.tp,
            in_flight=settings.in_flight,
            route=settings.weights,
            adapter=None if policy.lora is None else AdapterStart(policy.lora, seed),
            live=live,
        )
    if settings.engine == "openai":
        from services.rollout.engines.openai_engine import OpenAIEngine, api_key

        return OpenAIEngine(
            model=model,
            dtype=dtype,
            temperature=temperature,
            engine_args=settings.engine_args,
            api_key=api_key(str(settings.engine_args.get("api_key_env", ""))),
        )
    if settings.engine_args:
        raise BadInput(
            f"services.rollout.engine_args: {', '.join(settings.engine_args)}: engine transformers takes no arguments; "
            "remove them",
        )
    from services.rollout.engines.transformers_engine import TransformersEngine
    from shared.model.adapter import AdapterStart

    return TransformersEngine(
        model=model,
        dtype=dtype,
        threads=threads,
        deterministic=deterministic,
        device=settings.device,
        passes=policy.passes,
        adapter=None if policy.lora is None else AdapterStart(policy.lora, seed),
        live=live,
        routes=routes,
    )
