"""The rollout engine for an inference server with OpenAI's completions interface.

Nothing is sampled from a server whose log-probs or weights have not been verified, or whose weights another client has
since replaced.

Beyond the interface itself, the server must offer the following (`start` and the drill name anything that is missing):
  prompts and completions as token ids (`prompt: [ids]`, `return_token_ids`), `echo` with log-probs of the prompt,
  log-probs of the distribution that was sampled from, and a way to load weights (vLLM's `/collective_rpc` with rlbus's
  worker extension). This command starts a vLLM 0.32 server with all of these features:

  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs \
      --worker-extension-cls services.rollout.engines.vllm_worker.PolicyWeights

`/collective_rpc` lets anyone who can reach the port call any method, so the server belongs on a loopback or private
address. The weights are passed as a safetensors file: in memory if the server runs as the same user on this machine,
otherwise in a folder that both sides can access (`weights_directory`). One server serves one instance of one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from torch import Tensor

from proto.messages import ErrorCode
from proto.tensors import Array
from services.rollout.engine import (
    FULL_ONLY,
    FinishReason,
    Generation,
    GenerationWatch,
    Prompt,
    PromptScores,
    SamplingParams,
    WeightsMismatch,
)
from services.rollout.engines.compute import ComputeThread, given_up
from services.rollout.engines.proof.load_trace import Proof
from services.rollout.engines.proof.weights import (
    check_proofs,
    expected_weights,
    fitting,
    folder_file,
    memory_file,
)
from shared.colocation.devices import Parts
from shared.http_client import HttpClient, HttpRefused
from shared.model.load import load_model, named_weights
from shared.rpc.errors import BadInput, RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.model_files import end_tokens
from shared.weights.digests import digests_of
from shared.weights.weight_set import WeightSet

T = TypeVar("T")
STOP_S = 10.0
_REASONS = (FinishReason.STOP, FinishReason.LENGTH)
SILENCE_S = 120.0
"""Maximum seconds to wait for a server's next bytes, for example while it loads weights or is busy."""
_CONNECTIONS = 64  # maximum number of prompts sampled at the same time
_POLL_S = 0.05
_SEED_MASK = (1 << 62) - 1
_LIKELIEST = 5
_EXTENSION = "services.rollout.engines.vllm_worker.PolicyWeights"


class OpenAIEngine:
    """An `Engine` that uses an inference server. `progress` counts the events that the server sends."""

    def __init__(
        self, *, model: Path, dtype: str, temperature: float, engine_args: Mapping[str, Any], api_key: str = ""
    ) -> None:
        """The server's log-probs are checked at `temperature`, the training temperature. `engine_args` are `base_url`,
        `model` (the model's name on the server; default: the server's only model) and `weights_directory`."""
        self._path = model
        self._dtype = dtype
        self._temperature = temperature
        self._served = str(engine_args.get("model", ""))
        folder = engine_args.get("weights_directory")
        self._folder = Path(folder) if folder else None
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._who = "engine openai"
        self._http = HttpClient(str(engine_args["base_url"]), headers, self._who, SILENCE_S)
        self._compute = ComputeThread()
        self._expected = WeightSet(())
        self._eos_ids: list[int] = []
        self._sizes = (0, 0)
        self._mark = ""
        self.swaps = 0
        self._tokens = 0
        self._generate_s = 0.0

    @property
    def progress(self) -> int:
        return self._compute.progress

    loads = FULL_ONLY
    side_by_side = False
    scores_alone = True

    @property
    def vocab_size(self) -> int:
        return self._sizes[0]

    @property
    def context_tokens(self) -> int:
        return self._sizes[1]

    async def start(self) -> None:
        """Look up the model on the server and try to sample. Raises RpcError(bad_request) naming what is missing."""
        await self._compute.run(lambda: asyncio.run(self._start()))

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None = None,
    ) -> list[list[Generation]]:
        if watch is not None:
            raise ValueError("the openai engine does not show unfinished generations")
        return await self._compute.run(lambda: asyncio.run(self._generate(prompts, sampling, cancel)))

    async def base_weights(self) -> dict[str, Array]:
        """Return the weights from the model directory, since the server's cannot be read."""
        return await self._compute.run(
            lambda: {name: to_numpy(data) for name, data in named_weights(load_model(self._path, self._dtype)).items()}
        )

    async def prove_base(self, announced: Sequence[int]) -> None:
        raise WeightsMismatch("engine openai has no adapters")

    async def compute(self, work: Callable[[], T]) -> T:
        return await self._compute.counted(work)

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        await self._compute.run(lambda: asyncio.run(self._set_weights(weights)))

    def retain(self, swaps: Collection[int]) -> bool:
        return not swaps

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        await self._compute.run(lambda: asyncio.run(self._verify(given, announced)))

    async def score(self, token_ids: Array) -> Array:
        return await self._compute.run(lambda: asyncio.run(self._score(token_ids)))

    async def score_prompt(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        raise BadInput("engine openai: it has no versions side by side; a server needs engine transformers or vllm")

    async def sleep(self) -> None:
        raise BadInput("engine openai: the server keeps its memory, so it cannot be colocated")

    async def wake(self, parts: Parts) -> None:
        """Do nothing: the server manages its own memory, which is always allocated."""

    async def pause(self) -> None:
        self._compute.pause()

    async def resume(self) -> None:
        self._compute.resume()

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._tokens),
            "decode_steps": float(self._compute.progress),
            "generate_s": self._generate_s,
        }

    async def stop(self) -> None:
        await self._compute.stop(lambda: None, STOP_S)

    # ---- on the compute thread, with a new event loop for each piece of work

    async def _start(self) -> None:
        served = {model["id"]: model for model in (await self._http.get("/v1/models"))["data"]}
        if not self._served and len(served) == 1:
            self._served = next(iter(served))
        if self._served not in served:
            raise self._lacks(f"model {self._served or '(none chosen)'}", f"set model to one of {', '.join(served)}")
        self._expected = expected_weights(self._path, self._dtype)
        self._eos_ids = end_tokens(str(self._path))
        config = json.loads((self._path / "config.json").read_text())
        config = config.get("text_config", config)
        positions = int(config["max_position_embeddings"])
        self._sizes = int(config["vocab_size"]), int(served[self._served].get("max_model_len") or positions)
        await self._check_logprobs()
        await self._held_mark()

    async def _check_logprobs(self) -> None:
        """Check that the log-probs of two tokens differ by the difference of their logits divided by the
        temperature."""
        gaps = []
        for temperature in (1.0, self._temperature or 1.0):
            body = self._body([1, 2, 3], temperature, 1) | {"logprobs": _LIKELIEST, "stream": False}
            (choice,) = (await self._http.post("/v1/completions", body))["choices"]
            if not choice.get("token_ids"):
                raise self._lacks("return_token_ids", "use a server that returns token ids, such as vLLM")
            if not choice.get("logprobs") or not choice["logprobs"].get("top_logprobs"):
                raise self._lacks("logprobs", "use a server that returns log-probs, such as vLLM")
            likeliest = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
            gaps.append(likeliest[0] - likeliest[_LIKELIEST - 1])
        at_one, sampled = gaps
        wanted = at_one / (self._temperature or 1.0)
        if abs(sampled - wanted) > abs(sampled - at_one):
            raise self._lacks(
                f"log-probs at the sampling temperature {self._temperature:g} (it returns those at 1)",
                "start it with --logprobs-mode processed_logprobs",
            )

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, cancel: threading.Event
    ) -> list[list[Generation]]:
        self._before_waiting(cancel)
        started = time.perf_counter()
        room = asyncio.Semaphore(_CONNECTIONS)
        tasks = [asyncio.create_task(self._group(prompt, sampling, room)) for prompt in prompts]
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                self._before_waiting(cancel)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()  # closes its connection, so the server abandons the request
            await asyncio.gather(*tasks, return_exceptions=True)
        groups = [task.result() for task in tasks]
        # The mark is checked after sampling, because any replacement of the weights so far has removed it.
        if await self._held_mark() != self._mark:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: the server no longer holds the weights it was given: it was restarted, or another "
                "run is using it; give every instance a server of its own",
            )
        self._generate_s += time.perf_counter() - started
        self._tokens += sum(len(answer.token_ids) for group in groups for answer in group)
        # Greedy samples of a group are identical, and vLLM refuses more than one.
        return [group * sampling.samples for group in groups] if sampling.temperature == 0 else groups

    def _before_waiting(self, cancel: threading.Event) -> None:
        if not self._compute.before_step(lambda: not cancel.is_set()):
            raise given_up()

    async def _group(self, prompt: Prompt, sampling: SamplingParams, room: asyncio.Semaphore) -> list[Generation]:
        count = 1 if sampling.temperature == 0 else sampling.samples
        body = self._body(prompt.token_ids, sampling.temperature, sampling.max_new_tokens) | {
            "n": count,
            "seed": xxhash.xxh3_64_intdigest(f"{sampling.seed}:{prompt.name}".encode()) & _SEED_MASK,
            "stop_token_ids": self._eos_ids,
            "stop": list(sampling.stop),
            "logprobs": 0,  # only the sampled token's log-prob
            "stream": True,
        }
        token_ids: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        reasons = [""] * count
        async with room:
            async for event in self._http.events("/v1/completions", body):
                if "error" in event:
                    raise RpcError(ErrorCode.INTERNAL, f"{self._who}: {str(event['error'])[:300]}")
                self._compute.progress += 1
                for choice in event["choices"]:
                    at = choice["index"]
                    token_ids[at] += choice.get("token_ids") or []
                    logprobs[at] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                    reasons[at] = choice.get("finish_reason") or reasons[at]
        for at in range(count):
            sampled = len(token_ids[at])
            if reasons[at] not in _REASONS or not sampled or len(logprobs[at]) != sampled:
                raise RpcError(
                    ErrorCode.INTERNAL,
                    f"{self._who}: sample {at} of {prompt.name} ended with {reasons[at] or 'no reason'}, "
                    f"{sampled} tokens and {len(logprobs[at])} log-probs; see the server's log",
                )
        return [
            Generation(
                np.array(ids, np.int32),
                np.array(values, np.float32),
                FinishReason(reason),
                np.full(len(ids), self.swaps, np.int32),
            )
            for ids, values, reason in zip(token_ids, logprobs, reasons, strict=True)
        ]

    async def _set_weights(self, weights: Mapping[str, Array]) -> None:
        tensors = fitting(self._expected, weights)
        self._mark = secrets.token_hex(8)
        with self._handed_over(tensors) as path:
            await self._rpc("read_policy_weights", path, self._mark)
        self._compute.progress += 1
        self.swaps += 1
        answer = await self._http.post("/reset_prefix_cache", {})
        if not answer["success"]:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: its prefix cache cannot be emptied while other clients' requests are running",
            )

    async def _verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        proofs = [Proof.of(proof) for proof in await self._rpc("policy_proof")]
        digests = announced or digests_of({name: to_torch(array) for name, array in given.items()})
        check_proofs(proofs, self._expected, digests)
        self._compute.progress += 1

    def _handed_over(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[str]:
        return memory_file(tensors) if self._folder is None else folder_file(tensors, self._folder)

    async def _score(self, token_ids: Array) -> Array:
        # One token is sampled because a server might insist on one. It is discarded.
        body = self._body(token_ids.tolist(), 1.0, 1) | {"echo": True, "logprobs": 0, "stream": False}
        (choice,) = (await self._http.post("/v1/completions", body))["choices"]
        self._compute.progress += 1
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(logprobs) < len(token_ids):
            raise self._lacks("echo with the prompt's log-probs", "use a server that has it, such as vLLM")
        return np.array(logprobs[1 : len(token_ids)], np.float32)

    async def _held_mark(self) -> str:
        """Return the mark of the server's weights, or an empty string if its ranks disagree."""
        marks = set(await self._rpc("policy_mark"))
        return str(marks.pop()) if len(marks) == 1 else ""

    async def _rpc(self, method: str, *args: str) -> list[Any]:
        remedy = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {_EXTENSION}"
        try:
            answer = await self._http.post("/collective_rpc", {"method": method, "args": list(args)})
        except HttpRefused as refused:
            if refused.status == 404:
                raise self._lacks("/collective_rpc to load weights", remedy) from None
            raise RpcError(ErrorCode.BAD_REQUEST, f"{refused}; {remedy}, and see its log") from None
        results: list[Any] = answer["results"]
        return results

    def _body(self, token_ids: Sequence[int], temperature: float, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._served,
            "prompt": list(token_ids),
            "temperature": temperature,
            "max_tokens": max_tokens,
            # A server may have different defaults, from the model's generation config.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _lacks(self, what: str, remedy: str) -> BadInput:
        return BadInput(f"{self._who}: the server lacks {what}; {remedy}")


def api_key(variable: str) -> str:
    """Return the API key from an environment variable. Topologies name the variable, so no file contains the key."""
    if variable and variable not in os.environ:
        key = "services.rollout.engine_args.api_key_env"
        raise BadInput(f"{key}: the variable {variable} is not set; export it")
    return os.environ.get(variable, "") if variable else ""
