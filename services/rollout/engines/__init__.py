"""The engines by the name a topology gives them. Imports an engine only when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import ErrorCode
from services.rollout.engine import Engine
from shared.rpc.errors import RpcError

if TYPE_CHECKING:
    from shared.topology.services import Rollout


def make_engine(settings: Rollout, *, model: Path, dtype: str, deterministic: bool) -> Engine:
    """The engine of `services.rollout`, not yet started.

    Raises RpcError(bad_request) for an unknown name, and for arguments that the engine does not take.
    """
    name, threads, engine_args = settings.engine, settings.threads or 1, settings.engine_args
    if name == "vllm":
        from services.rollout.engines.vllm_engine import VllmEngine

        return VllmEngine(
            model=model,
            dtype=dtype,
            threads=threads,
            deterministic=deterministic,
            engine_args=engine_args,
            tensor_parallel=settings.parallel.tp,
            in_flight=settings.in_flight,
        )
    if engine_args:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"services.rollout.engine_args: {', '.join(engine_args)}: the {name} engine takes none; remove them",
        )
    if name == "transformers":
        from services.rollout.engines.transformers_engine import TransformersEngine

        return TransformersEngine(model=model, dtype=dtype, threads=threads, deterministic=deterministic)
    raise RpcError(
        ErrorCode.BAD_REQUEST,
        f"rollout engine {name!r}: this build has transformers and vllm (services.rollout.engine)",
    )
