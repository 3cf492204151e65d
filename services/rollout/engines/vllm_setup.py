"""Prepares a process for vLLM: sets its environment, and builds EngineArgs from a topology. This module starts no
engine."""

from __future__ import annotations

import difflib
import importlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from services.rollout.engine import Prompt, SamplingParams
from services.rollout.engines import vllm_worker
from shared.rpc.errors import BadInput
from shared.topology.lora import vllm_rank, vllm_slots
from shared.topology.services import WeightsRoute

InFlight = Literal["wait", "keep", "recompute"]
CPU_KV_CACHE_BYTES = 256 * 1024**2
"""Default of `kv_cache_memory_bytes` on a CPU, where vLLM would otherwise take a fraction of the machine's memory."""
WORKER_EXTENSION = f"{vllm_worker.__name__}.{vllm_worker.PolicyWeights.__name__}"
TRANSFER_EXTENSION = "services.rollout.engines.vllm_transfer.TransferredWeights"
"""The worker extension that takes the place of WORKER_EXTENSION if the trainer sends the weights."""
ADAPTER_EXTENSION = "services.rollout.engines.vllm_adapters.PolicyAdapters"
"""The worker extension that takes the place of WORKER_EXTENSION if versions are adapters."""
_SEED_MASK = (1 << 62) - 1  # vLLM adds the sample's index to the seed, and the sum must still fit in an int64
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the core in this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # for tensor-parallel ranks; a fork would lose this process's threads
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` binds everything to one core
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # On CUDA with Triton, vLLM selects its second model runner. Weight proofs and swaps are tested with the first.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # torch.distributed listens even if there is only one worker, so restrict it to this machine's loopback.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
# Fields that this engine sets, each with the topology key that users set instead.
_OURS = {
    "model": "policy.model",
    "tokenizer": "policy.model",
    "dtype": "policy.dtype",
    "tensor_parallel_size": "services.rollout.parallel.tp",
    "pipeline_parallel_size": "services.rollout.parallel.pp",
    "data_parallel_size": "services.rollout.instances",
    "weight_transfer_config": "services.rollout.weights",
    **dict.fromkeys(
        (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "lora_dtype",
            "lora_target_modules",
            "fully_sharded_loras",
            "default_mm_loras",
            "enable_tower_connector_lora",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
            "max_lora_cls_labels",
        ),
        "policy.lora",
    ),
    "logprobs_mode": "",
    "generation_config": "",
    "worker_extension_cls": "",
    "distributed_executor_backend": "",
    "trust_remote_code": "",
    "quantization": "",
    "quantization_config": "",
    "speculative_config": "",
}


def prepare_process(threads: int) -> None:
    """Set the variables that vLLM reads on import. The process belongs to the engine, so nothing else is affected."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for tensor-parallel ranks, which are processes of their own
    # vLLM compiles some helpers even in eager mode. On a CPU this adds 30 s to the first generation, for no gain.
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The engine does not allow this later. OpenMP's thread count applies to the thread that sets it.
    torch.set_num_threads(threads)


def import_vllm() -> None:
    """Prepare the process and import vLLM, so that an engine that is started in this process later has nothing left to
    import."""
    prepare_process(int(os.environ["OMP_NUM_THREADS"]))
    importlib.import_module("vllm.v1.engine.llm_engine")


def arguments_of(given: Mapping[str, Any], known: set[str], *, on_cpu: bool, in_flight: InFlight) -> dict[str, Any]:
    """Return EngineArgs from defaults and `given`. Raises BadInput for fields that users cannot set."""
    for name in given:
        key = f"services.rollout.engine_args.{name}"
        if name in _OURS:
            instead = f"; set {_OURS[name]}" if _OURS[name] else " because it decides what log-probs and weights mean"
            raise BadInput(f"{key}: cannot be set here{instead}")
        if name not in known:
            near = difflib.get_close_matches(name, known - _OURS.keys(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"{key}: vLLM's EngineArgs has no such field{hint}")
    if in_flight != "wait" and given.get("async_scheduling"):
        raise BadInput(
            "services.rollout.engine_args.async_scheduling: cannot be true with services.rollout.in_flight: "
            f"{in_flight}, because tokens from the old weights would be counted as tokens from the new ones; leave it "
            "out",
        )
    defaults: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if in_flight != "wait":
        # Otherwise vLLM computes the next step of the batch before it returns the tokens of the previous one.
        defaults["async_scheduling"] = False
    if on_cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    else:
        defaults["seed"] = secrets.randbits(31)  # with vLLM's default, all engines would draw the same numbers
        # Other kernels swap an expert's halves or store blocks, which no proof can read.
        defaults["moe_backend"] = "triton"
    return defaults | dict(given)


def fixed_arguments(model: Path, dtype: str, route: WeightsRoute, ranks: int) -> dict[str, Any]:
    """Return the EngineArgs that users cannot set."""
    fixed: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # only SamplingParams counts
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if route != "shards":
        from vllm.config import WeightTransferConfig

        config = WeightTransferConfig(backend=route)
        fixed |= {"weight_transfer_config": config, "worker_extension_cls": TRANSFER_EXTENSION}
    if ranks > 1:
        fixed |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    return fixed


def adapter_arguments(rank: int, modules: Collection[str], live: int) -> dict[str, Any]:
    """Return the EngineArgs of an engine that samples with `live` adapters at the same time, of `rank` for layers
    called `modules`.

    Other layers are left alone: vLLM 0.32 cannot score a sequence beside running samples once it has wrapped the head.
    """
    return {
        "enable_lora": True,
        "max_lora_rank": vllm_rank(rank),
        "max_loras": vllm_slots(live),
        "max_cpu_loras": vllm_slots(live),
        "lora_target_modules": sorted(modules),
        "worker_extension_cls": ADAPTER_EXTENSION,
    }


def sample_params(prompt: Prompt, sampling: SamplingParams, samples: int, ends: Sequence[int], *, on_cpu: bool) -> Any:
    """Return vLLM's SamplingParams for `samples` samples of a prompt. `ends` are the model's own end tokens."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        n=samples,
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens - len(prompt.resumed_ids),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed_of(prompt.name, sampling.seed, own=on_cpu or sampling.seeded),
        logprobs=0,  # only the sampled token's log-prob
        flat_logprobs=True,
        # The tokenizer's end token may differ from those in the model's generation config. Only the latter count here.
        ignore_eos=True,
        stop_token_ids=[*(ends if sampling.ends else ()), *sampling.stop_ids],
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def score_params(top: int) -> Any:
    """Return vLLM's SamplingParams of a request for the log-probs of its prompt, with the `top` likeliest tokens.

    One token is sampled and discarded, because vLLM always samples at least one.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=top,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def seed_of(prompt: str, seed: int, *, own: bool) -> int | None:
    """Return the seed of the samples of `prompt`, given the run's or the request's `seed`, or None if they use the
    engine's generator.

    On a GPU, those of a training run do: vLLM draws the numbers of requests with seeds one request after the other, in
    every step.
    """
    return xxhash.xxh3_64_intdigest(f"{seed}:{prompt}".encode()) & _SEED_MASK if own else None
