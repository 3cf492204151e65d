"""The embedded engine: a transformers model that is decoded on its own thread. Lightweight processes do not import this
module.

Everything that touches the model runs on the compute thread, in call order, with two exceptions: calls are decoded side
by side (except in deterministic mode), and weights are replaced and scored in the middle of calls while the engine is
paused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from proto.messages import ErrorCode, WeightsKind
from proto.tensors import Array
from services.rollout.engine import (
    ADAPTER_ONLY,
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
from services.rollout.engines.proof.weights import base_digests, fitting
from services.rollout.engines.slots import SlotTable, Stopped
from services.rollout.engines.version_tables import VersionTables
from shared.colocation.devices import WEIGHTS, Parts
from shared.colocation.shelf import Released, give_back, own_storages, release, restore
from shared.model import cpu
from shared.model.adapter import AdapterStart, adapt, adapters_of, base_weights, first_adapters, is_adapter
from shared.model.load import (
    allow,
    load_model,
    named_weights,
    passes_of,
    require_deterministic_algorithms,
    weight_holders,
)
from shared.model.logprobs import token_logprobs
from shared.model.plain_decoder import PlainDecoder, is_plain
from shared.model.routing import attach, routers_of
from shared.ranks.process_group import own_device
from shared.rpc.errors import BadInput, RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.tokenizer import load_tokenizer
from shared.topology.model_files import end_tokens
from shared.topology.passes import Passes
from shared.weights.digests import as_int, digest_whole
from shared.weights.weight_set import WeightSet, shown

T = TypeVar("T")
STOP_S = 1.0
SCORED_ROWS = 256
"""Number of places whose log-probs over the vocabulary are in memory at once."""


class TransformersEngine:
    """An `Engine` in this process. Log-probs are exact: log_softmax(logits / temperature) in float32."""

    def __init__(
        self,
        *,
        model: Path,
        dtype: str,
        threads: int,
        deterministic: bool,
        device: str = "cpu",
        passes: Passes | None = None,
        adapter: AdapterStart | None = None,
        live: int = 1,
        routes: bool = False,
    ) -> None:
        """If `deterministic` is true, calls are decoded one after another in a steady table, so a repeated call gives
        bit-identical results. `device` is `cpu`, or `cuda` for the first GPU that the process sees. `passes` are the
        model's; None: those that assume nothing about it. With an `adapter`, versions are adapters over the weights in
        the model directory, and the engine samples with `live` of them at the same time. With `routes`, the
        experts of each token are recorded."""
        self._path = model
        self._dtype = dtype
        self._threads = threads
        self._deterministic = deterministic
        self.side_by_side = not deterministic
        self._device = device
        self._passes = passes
        self._adapter = adapter
        self._compute = ComputeThread()
        self._live = 1 if adapter is None else live
        self._routes = routes
        self._calls = SideBySide(self._compute, self)
        self._versions: VersionTables
        self._tokenizer: Any = None
        self._model: Any = None
        self._asleep: list[Released] = []
        self._lost = False
        """Whether the memory of the weights has been released and no weights have been set since."""
        self._holders: dict[str, list[torch.Tensor]] = {}
        self._steps = 0

    @property
    def progress(self) -> int:
        return self._compute.progress

    @property
    def swaps(self) -> int:
        return self._versions.current

    @property
    def loads(self) -> frozenset[WeightsKind]:
        return FULL_ONLY if self._adapter is None else ADAPTER_ONLY

    scores_alone = False

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def context_tokens(self) -> int:
        return int(self._model.config.get_text_config().max_position_embeddings)

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
        return await self._compute.run(self._base_weights)

    async def prove_base(self, announced: Sequence[int]) -> None:
        await self._compute.between_steps(lambda: self._prove_base(announced))

    async def compute(self, work: Callable[[], T]) -> T:
        return await self._compute.counted(work)

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        await self._compute.between_steps(lambda: self._set_weights(weights))

    def retain(self, swaps: Collection[int]) -> bool:
        self._versions.retained = frozenset(swaps)
        return len(swaps) < self._live if swaps else True

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        await self._compute.between_steps(lambda: self._verify(given, announced))

    async def score(self, token_ids: Array) -> Array:
        return (await self.score_prompt(token_ids, self.swaps, 0, no_targets(token_ids))).logprobs

    async def score_prompt(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        return await self._compute.between_steps(lambda: self._score(token_ids, swaps, top, targets))

    async def sleep(self) -> None:
        await self._compute.run(self._sleep)

    async def wake(self, parts: Parts) -> None:
        if WEIGHTS in parts and self._asleep:  # a block allocates and frees its own keys and values
            await self._compute.run(self._wake)

    async def pause(self) -> None:
        self._compute.pause()

    async def resume(self) -> None:
        self._compute.resume()

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._versions.tokens),
            "decode_steps": float(self._steps),
            "generate_s": self._calls.seconds,
        }

    async def stop(self) -> None:
        await self._compute.stop(lambda: None, STOP_S)

    # ---- on the compute thread

    def _base_weights(self) -> dict[str, Array]:
        if self._adapter is not None:
            tensors = first_adapters(adapters_of(self._model), self._adapter, scaled=True)
        else:
            tensors = named_weights(load_model(str(self._path), self._dtype) if self._lost else self._model)
        return {name: to_numpy(value.detach()) for name, value in tensors.items()}

    def _prove_base(self, announced: Sequence[int]) -> None:
        weights = base_weights(self._model)
        wrong: list[str] = []
        for name, digest in base_digests(WeightSet.of(weights), announced).items():
            if as_int(digest_whole(weights[name])) != digest:
                wrong.append(name)
            self._compute.progress += 1
        if wrong:
            raise WeightsMismatch(f"{len(wrong)} of {len(weights)} parameters have wrong bits: {shown(wrong)}")

    def _sleep(self) -> None:
        """Release the parameters' memory. The parameters keep their identity, and tied ones stay tied."""
        if not self._asleep:
            self._versions.forget()
            self._asleep = release(self._model.parameters())
            self._lost = True
        give_back()
        self._compute.progress += 1

    def _wake(self) -> None:
        restore(self._asleep)
        self._asleep = []
        if self._adapter is not None:  # a version does not contain the weights under its adapter
            files = named_weights(load_model(str(self._path), self._dtype))
            for name, tensor in base_weights(self._model).items():
                tensor.copy_(files[name])
        self._compute.progress += 1

    def _must_have_weights(self) -> None:
        if self._lost:
            raise RpcError(
                ErrorCode.INTERNAL, "engine transformers: asked to compute after a sleep, before its weights were set"
            )

    def _load(self) -> None:
        cpu.set_up(self._threads)
        if self._deterministic:
            require_deterministic_algorithms()
        self._model = load_model(str(self._path), self._dtype)
        if self._adapter is not None:
            adapt(self._model, self._adapter, scaled=True)
        self._model.eval().requires_grad_(False)
        allow(self._model, self._passes)
        # The parameters get storages of their own, as they do after a sleep, because memory mapped from a file is
        # aligned differently, which changes the last bits of results.
        own_storages(self._model.parameters())
        self._model.to(own_device(self._device, 0))
        self._holders = self._version_holders()
        if self._routes:
            self._record_routes()
        ends = end_tokens(str(self._path))
        self._versions = VersionTables(
            self._model,
            self._holders,
            lambda number: SlotTable(
                self._model, eos_ids=ends, stopped=self._stop_finder, swaps=number, steady=self._deterministic
            ),
            live=self._live,
            steady=self._deterministic,
        )
        self._compute.progress += 1

    def _record_routes(self) -> None:
        """Make the passes record routes. Raises BadInput if they cannot."""
        why = attach(self._model)
        if not why and passes_of(self._model).sequences == "single":
            why = "with passes.sequences single, every token is computed again"
        if why or routers_of(self._model) is None:
            why = why or "it has no routers"
            raise BadInput(f"model {self._path}: algorithm.router_replay: rollout cannot record its routes: {why}")

    def _version_holders(self) -> dict[str, list[torch.Tensor]]:
        """Return the parameters or buffers that hold each tensor of a version."""
        adapted = self._adapter is not None
        return {name: tied for name, tied in weight_holders(self._model).items() if is_adapter(name) == adapted}

    # `compute.Stepper`

    def add(self, call: EngineCall) -> bool:
        self._must_have_weights()
        return self._versions.add(call)

    def step(self) -> None:
        self._versions.step()
        self._steps += 1
        self._compute.progress += 1

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        return self._versions.so_far(call)

    def drop(self, call: EngineCall) -> None:
        self._versions.drop(call)

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Array]) -> None:
        """Set a version. In host memory, the given arrays themselves become its tensors, without a copy.

        A version in shared memory therefore stays mapped until the engine drops it, and its store counts it until then.
        In deterministic mode, arrays are copied instead, because a mapping is aligned differently, which changes the
        last bits of results.
        """
        holders = self._holders
        sources = fitting(WeightSet.of({name: tied[0] for name, tied in holders.items()}), weights)
        placed: dict[str, torch.Tensor] = {}
        for name, tied in holders.items():
            if self._live > 1:
                placed[name] = sources[name].to(tied[0].device, copy=self._deterministic)
            elif self._deterministic:
                tied[0].copy_(sources[name])
            else:
                for parameter in tied:
                    parameter.data = sources[name].to(parameter.device)
            self._compute.progress += 1
        self._versions.place(placed or None)
        self._lost = False

    @torch.no_grad()
    def _verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        """Check the parameters. Only copies are compared bit by bit; the other parameters are the given arrays
        themselves."""
        self._versions.install(self.swaps)
        holders = self._version_holders()  # the tensors that the modules read on every pass
        wrong = set(holders.keys() ^ (given or announced).keys())
        for name in holders.keys() - wrong:
            tied, digest = holders[name], announced.get(name)
            source = to_torch(given[name]) if name in given else None
            if source is not None and tied[0].device.type != source.device.type and digest is None:
                digest = as_int(digest_whole(source))
            same_place = (
                len(
                    {(parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype) for parameter in tied}
                )
                == 1
            )
            same_bits = source is None or tied[0].device != source.device or _same_bits(tied[0], source)
            if not same_place or not same_bits or (digest is not None and digest != as_int(digest_whole(tied[0]))):
                wrong.add(name)
            self._compute.progress += 1
        if wrong:
            raise WeightsMismatch(f"{len(wrong)} of {len(holders)} parameters have wrong bits: {shown(sorted(wrong))}")

    @torch.inference_mode()
    def _score(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        """Score with the same passes that sampling uses, so that a canary checks those passes."""
        self._must_have_weights()
        self._versions.install(swaps)
        self._compute.progress += 1
        if is_plain(self._model):
            return self._scored(PlainDecoder(self._model).next_logits(_int64(token_ids)[:-1]), token_ids, top, targets)
        if top or targets.size:
            ids_1T = _int64(token_ids).to(self._model.device)[None, :-1]
            return self._scored(self._model(input_ids=ids_1T, use_cache=False).logits[0], token_ids, top, targets)
        mask = np.ones(len(token_ids), np.uint8)
        mask[0] = 0  # nothing predicts the first token
        lengths = np.array([len(token_ids)], np.int32)
        logprobs, _ = token_logprobs(self._model, token_ids, lengths, mask, 1.0, len(token_ids))
        empty = np.zeros((len(token_ids) - 1, 0), np.float32)
        return PromptScores(to_numpy(logprobs)[1:].copy(), empty.astype(np.int32), empty, empty)

    def _scored(self, logits_TV: torch.Tensor, token_ids: Array, top: int, targets: Array) -> PromptScores:
        following_T1, targets_TK = (_int64(ids).to(logits_TV.device) for ids in (token_ids[1:, None], targets))
        parts = []
        for begin in range(0, len(logits_TV), SCORED_ROWS):
            rows = slice(begin, begin + SCORED_ROWS)
            logprobs_TV = logits_TV[rows].float().log_softmax(-1)
            likeliest = logprobs_TV.topk(top, -1)
            wanted_TK = targets_TK[rows]
            of_targets_TK = logprobs_TV.gather(1, wanted_TK.clamp(min=0)).where(wanted_TK >= 0, 0.0)
            of_next_T = logprobs_TV.gather(1, following_T1[rows])[:, 0]
            parts.append((of_next_T, likeliest.indices.to(torch.int32), likeliest.values, of_targets_TK))
        return PromptScores(*(to_numpy(torch.cat(column)) for column in zip(*parts, strict=True)))

    def _stop_finder(self, texts: tuple[str, ...]) -> Stopped | None:
        if not texts:
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        tokenizer = self._tokenizer
        # A token is at least one byte of text, so a stop text that has just ended spans at most as many tokens as it
        # has bytes. Special tokens have no text, so a few more are decoded.
        tail = max(len(text.encode()) for text in texts) + 4

        def stopped(token_ids: list[int]) -> bool:
            ending = tokenizer.decode(token_ids[-tail:], skip_special_tokens=True)
            return any(text in ending for text in texts)

        return stopped


def _int64(token_ids: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(token_ids, np.int64))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors on the same device have the same bits. Tensors at the same address are not read."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride()):
        return True
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))  # bits, since -0.0 == 0.0 and NaN != NaN
