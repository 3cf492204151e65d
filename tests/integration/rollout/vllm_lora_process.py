"""Runs, in a separate process, one vLLM engine whose versions are adapters, and gives it one defect after another. This
process asserts nothing: vLLM patches torch, so the process that reads the answers computes the expected values.

`python -m tests.integration.rollout.vllm_lora_process MODEL CASE.json ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from proto.messages import Canary, WeightsKind, WeightsRef
from proto.tensors import Array
from services.rollout.engine import BASE, Prompt, SamplingParams, WeightsMismatch
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.vllm_setup import InFlight
from services.rollout.engines.vllm_versions import AdapterVersions
from services.rollout.weights.source import LoadEntry
from services.rollout.weights.sync import WeightsSync
from shared.colocation.devices import KV_CACHE, WEIGHTS
from shared.model.adapter import AdapterStart
from shared.tensors_torch import to_torch
from shared.topology.lora import Lora, live_adapters
from shared.weights.digests import digests_of
from shared.weights.drill import perturb
from shared.weights.weight_set import Base
from tests.integration.rollout.vllm_process import AskedLater
from tests.weights_refs import weights_ref

SEED = 7
LORA = Lora(rank=6, alpha=12.0)  # vLLM's slots have rank 8, and the scale is 2
SOME = Lora(rank=6, alpha=12.0, target_modules=("q_proj", "up_proj", "lm_head"))
"""An adapter of parts of the fused layers and of the head, which is tied to the embedding."""
STRENGTH = 10.0
"""Factor of the noise in a version."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
LEFT_OUT = "model.layers.1.mlp.down_proj"
CROSSED = "model.layers.0.mlp"


def version(first: Mapping[str, Array], step: int) -> dict[str, Array]:
    """Return the adapter of version `step`."""
    return {name: perturb(name, values, 1000 + step, STRENGTH) for name, values in first.items()}


async def failure(work: Awaitable[object]) -> str:
    """Return `Type: message` of the exception that `work` raised, or an empty string."""
    try:
        await work
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Scenario:
    def __init__(self, model: Path, case: dict[str, Any]) -> None:
        self._case = case
        self._ranks: int = case["ranks"]
        self._engine = VllmEngine(
            model=model,
            dtype=case["dtype"],
            threads=1,
            deterministic=False,
            engine_args={"max_model_len": 256, "max_num_seqs": 8},
            tensor_parallel=self._ranks,
            in_flight=case["in_flight"],
            adapter=AdapterStart(SOME if case["some"] else LORA, SEED),
            live=live_adapters(case["in_flight"], None),
        )
        self._base: dict[str, int] = {name: int(digest) for name, digest in case["base"].items()}
        self._first: dict[str, Array] = {}
        self._answer: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []

    async def run(self) -> dict[str, Any]:
        engine, answer = self._engine, self._answer
        answer["refused"] = await self._refused(LORA, {"max_loras": 8}, "wait")
        answer["head_refused"] = await self._refused(SOME, {}, "keep")
        await engine.start()
        answer["loads"] = sorted(engine.loads)
        self._first = await engine.base_weights()
        answer["first"] = {name: str(digest) for name, digest in self._digests(self._first).items()}
        answer["unset"] = await failure(engine.score(np.array(self._case["canary_tokens"], np.int32)))
        answer["few_digests"] = await failure(engine.prove_base(Base.of(self._base).digests[1:]))
        answer["wrong_base"] = {
            name: await failure(engine.prove_base(Base.of(self._base | {name: self._base[name] ^ 1}).digests))
            for name in self._case["wrong"]
        }
        sync = self._sync()
        report = await sync.load(*self._version(1))
        answer["bytes"], answer["parameters"] = report.nbytes, report.parameters
        answer["first_error"] = report.canary_error
        answer["drill_errors"] = [event["canary_error"] for event in self._events if "route" in event][:1]
        await self._cached(sync)
        if not self._case["some"]:
            await self._both(sync)
        if self._case["in_flight"] == "wait":
            await self._direct(sync)
        await self._mutants()
        await self._unapplied()
        if self._ranks == 1 and not self._case["some"]:
            await self._left_in_the_worker()
        if self._ranks == 1:
            await self._evicted()
        await self._slept()
        await engine.stop()
        return answer

    async def _refused(self, lora: Lora, engine_args: dict[str, Any], in_flight: InFlight) -> str:
        engine = VllmEngine(
            model=self._engine._path,
            dtype="float32",
            threads=1,
            deterministic=False,
            engine_args=engine_args,
            in_flight=in_flight,
            adapter=AdapterStart(lora, SEED),
        )
        return await failure(engine.start())

    async def _cached(self, sync: WeightsSync) -> None:
        """Sample from a prompt that is longer than a block of the prefix cache, before and after a new version."""
        answer = self._answer
        answer["sampled_1"] = await self._sampled()
        answer["second_error"] = (await sync.load(*self._version(2))).canary_error
        answer["sampled_2"] = await self._sampled()
        # If versions shared a name, the cache would answer with the keys of version 2.
        from vllm.lora.request import LoRARequest

        def same_name(versions: AdapterVersions, swap: int) -> Any:
            return LoRARequest("policy", versions._number(swap), "/proc/policy")

        with patch.object(AdapterVersions, "request", same_name):
            await self._sampled()
            await self._engine.set_weights(version(self._first, 1))
            answer["sampled_stale"] = await self._sampled()
        await self._engine.set_weights(version(self._first, 2))

    async def _both(self, sync: WeightsSync) -> None:
        """Load version 1 while a block of version 2 runs, and sample with both."""
        engine, answer = self._engine, self._answer
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def hold() -> None:
            asyncio.run_coroutine_threadsafe(engine.pause(), loop).result()
            loop.call_soon_threadsafe(reached.set)

        began = answer["both_began"] = engine.swaps
        old = asyncio.create_task(self._sampled(tokens=24, swaps=began, cancel=AskedLater(4, hold)))
        old.add_done_callback(lambda _: reached.set())  # On failure, the error is raised below.
        await reached.wait()
        assert not old.done(), old.result()
        answer["retained"] = [engine.retain({began}), engine.retain({began, began + 1}), engine.retain({began})]
        answer["both_error"] = (await sync.load(*self._version(1))).canary_error
        answer["both_running"] = not old.done()
        await engine.resume()
        answer["both_new"] = await self._sampled(swaps=engine.swaps)
        answer["both_later"] = await self._sampled(swaps=began)  # another call of the lease
        answer["both_old"] = await old
        engine.retain(())
        await sync.load(*self._version(2))
        answer["released"] = await failure(self._sampled(swaps=began))

    async def _direct(self, sync: WeightsSync) -> None:
        """Sample with two versions and the base in one batch, in ways that only direct requests may."""
        engine, answer = self._engine, self._answer
        two = engine.swaps
        answer["scores_alone"] = engine.scores_alone
        answer["room"] = engine.retain({two})
        answer["direct_error"] = (await sync.load(*self._version(1))).canary_error
        numbers = {"base": BASE, "one": engine.swaps, "two": two}
        answer["numbers"] = numbers
        prompt = [Prompt("", self._case["prompt"])]

        async def sampled(swaps: int, **chosen: Any) -> dict[str, Any]:
            sampling = SamplingParams(1, 1.0, 24, 5, swaps=swaps, top_k=9, top_p=0.9, ends=False, seeded=True, **chosen)
            ((made,),) = await engine.generate(prompt, sampling, threading.Event())
            return {"ids": made.token_ids.tolist(), "logprobs": made.logprobs.tolist(), "swaps": made.swaps.tolist()}

        together = await asyncio.gather(*map(sampled, numbers.values()))
        answer["direct"] = dict(zip(numbers, together, strict=True))
        answer["direct_alone"] = {name: await sampled(swaps) for name, swaps in numbers.items()}
        stop = answer["direct"]["one"]["ids"][9]
        answer["direct_stopped"] = await sampled(numbers["one"], stop_ids=(stop,))
        ids = np.array(self._case["canary_tokens"], np.int32)
        targets = np.full((len(ids) - 1, 2), -1, np.int32)
        targets[1::3] = ids[:2]
        scores = {name: await engine.score_prompt(ids, swaps, 3, targets) for name, swaps in numbers.items()}
        answer["targets"] = targets.tolist()
        answer["scores"] = {
            name: [
                each.logprobs.tolist(),
                each.top_ids.tolist(),
                each.top_logprobs.tolist(),
                each.target_logprobs.tolist(),
            ]
            for name, each in scores.items()
        }
        answer["too_many"] = await failure(engine.score_prompt(ids, two, 0, np.zeros((len(ids) - 1, 1024), np.int32)))
        engine.retain(())
        await sync.load(*self._version(2))

    async def _sampled(
        self, tokens: int = 8, swaps: int | None = None, cancel: threading.Event | None = None
    ) -> dict[str, Any]:
        prompts = [Prompt("train/0/0", self._case["prompt"])]
        sampling = SamplingParams(1, 1.0, tokens, 0, swaps=swaps)
        ((made,),) = await self._engine.generate(prompts, sampling, cancel or threading.Event())
        return {"ids": made.token_ids.tolist(), "logprobs": made.logprobs.tolist(), "swaps": made.swaps.tolist()}

    async def _mutants(self) -> None:
        old, new = version(self._first, 1), version(self._first, 2)
        refused = self._answer["mutants"] = {}
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name, values in new.items():
            shapes.setdefault(values.shape, []).append(name)
        self._answer["names"] = list(new)
        announced = self._digests(new)
        for name in list(new)[:: self._case["every"]]:
            alike = shapes[new[name].shape]
            other = alike[alike.index(name) - 1]
            bit = new[name].copy()
            bit.reshape(-1).view(np.uint8)[-2] ^= 1
            if other == name:  # the only one of its shape
                other = ""
            for kind, weights in {
                "missing": {**new, name: np.zeros_like(new[name])},
                "stale": {**new, name: old[name]},
                "bit": {**new, name: bit},
                **({"swapped": {**new, name: new[other], other: new[name]}} if other else {}),
            }.items():
                refused[f"{kind} {name}"] = await self._verdict(weights, announced)
        unscaled = {name: values / 2 if name.endswith("lora_B") else values for name, values in new.items()}
        self._answer["unscaled"] = await self._verdict(unscaled, announced)
        # The trainer may forget the scale, too: the digests agree then, but the log-probs do not.
        self._answer["unscaled_canary"] = await failure(self._sync(drilled=True).load(self._version(2)[0], unscaled))
        self._answer["right"] = await self._verdict(new, announced)

    async def _unapplied(self) -> None:
        with patch.object(AdapterVersions, "request", lambda versions, swap: None):
            self._answer["unapplied"] = await failure(self._sync(drilled=True).load(*self._version(2)))
            self._answer["unapplied_drill"] = await failure(self._sync().load(*self._version(2)))

    async def _left_in_the_worker(self) -> None:
        """Load a correct version in ways that do not reach the place where it is used."""
        new = version(self._first, 2)
        announced = self._digests(new)
        manager = self._manager()
        refused: dict[str, str] = {}
        weights_of = type(manager)._get_lora_layer_weights

        def without(manager: Any, model: Any, name: str) -> Any:
            return None if name == LEFT_OUT else weights_of(manager, model, name)

        with patch.object(type(manager), "_get_lora_layer_weights", without):
            refused[LEFT_OUT] = await self._verdict(new, announced)
        one, two = f"{CROSSED}.gate_proj", f"{CROSSED}.up_proj"

        def crossed(manager: Any, model: Any, name: str) -> Any:
            return weights_of(manager, model, {one: two, two: one}.get(name, name))

        with patch.object(type(manager), "_get_lora_layer_weights", crossed):
            refused[one] = await self._verdict(new, announced)
        for path, name, array in self._places():
            await self._engine.set_weights(new)
            slot = self._slot()
            with torch.inference_mode():
                getattr(manager.modules[path], array)[0][slot].reshape(-1)[-1] = 1
            refused[name] = await self._judged(announced)
        self._answer["worker"] = refused

    def _places(self) -> Iterator[tuple[str, str, str]]:
        """Yield arrays whose last element is padding: the layer, a tensor that is in it, and the array."""
        yield "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj.lora_A", "lora_a_stacked"
        yield "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj.lora_B", "lora_b_stacked"
        yield "model.layers.3.mlp.down_proj", "model.layers.3.mlp.down_proj.lora_B", "lora_b_stacked"

    async def _evicted(self) -> None:
        """Take the version away behind the engine's back."""
        new = version(self._first, 2)
        manager = self._manager()
        await self._engine.set_weights(new)
        manager.remove_adapter(manager.lora_index_to_id[self._slot()])
        self._answer["evicted"] = await self._judged(self._digests(new))
        self._answer["sampled_evicted"] = await failure(self._sampled())
        self._answer["back"] = await self._verdict(new, self._digests(new))
        self._answer["sampled_back"] = await self._sampled()
        # vLLM itself evicts the least recently used adapter, but not one that is pinned.
        self._answer["pinned"] = ""
        try:
            manager._active_adapters.remove_oldest()
        except RuntimeError as error:
            self._answer["pinned"] = str(error)

    async def _slept(self) -> None:
        engine, answer = self._engine, self._answer
        sync = self._sync()
        await sync.load(*self._version(1))
        sync.forget()
        await engine.sleep()
        await engine.wake(frozenset({WEIGHTS}))
        answer["unset_after_sleep"] = await failure(engine.score(np.array(self._case["canary_tokens"], np.int32)))
        await sync.place(*self._version(2))
        await engine.wake(frozenset({KV_CACHE}))
        answer["sleep_error"] = (await sync.prove()).canary_error
        answer["sampled_slept"] = await self._sampled()

    def _slot(self) -> int:
        """Return the slot of the newest version, which is the only one."""
        ((slot, _),) = [pair for pair in enumerate(self._manager().lora_index_to_id) if pair[1] is not None]
        return slot

    def _manager(self) -> Any:
        worker = self._engine._llm.engine_core.engine_core.model_executor.driver_worker.worker
        return worker.model_runner.lora_manager._adapter_manager

    def _sync(self, *, drilled: bool = False) -> WeightsSync:
        sync = WeightsSync(self._engine, "rollout/0", lambda topic, values: self._events.append(dict(values)))
        if drilled:
            sync._drilled.add(LoadEntry.SET)
        return sync

    async def _verdict(self, weights: Mapping[str, Array], announced: Mapping[str, int]) -> str:
        await self._engine.set_weights(weights)
        return await self._judged(announced)

    async def _judged(self, announced: Mapping[str, int]) -> str:
        """Return the error of `verify` for the announced version, or an empty string."""
        try:
            await self._engine.verify({}, announced)
        except WeightsMismatch as mismatch:
            return str(mismatch)
        return ""

    def _version(self, step: int) -> tuple[WeightsRef, dict[str, Array]]:
        weights = version(self._first, step)
        ref = weights_ref(1, step, self._canary(f"version {step}"), self._canary("drill"), drill_seed=SEED)
        base = Base.of(self._base)
        return msgspec.structs.replace(
            ref, kind=WeightsKind.ADAPTER, base=base.name, base_digests=list(base.digests)
        ), weights

    def _canary(self, name: str) -> Canary:
        return Canary(
            token_ids=np.array(self._case["canary_tokens"], np.int32),
            logprobs=np.array(self._case["canaries"][name], np.float32),
            tolerance=TOLERANCE[self._case["dtype"]],
        )

    @staticmethod
    def _digests(weights: Mapping[str, Array]) -> dict[str, int]:
        return digests_of({name: to_torch(values) for name, values in weights.items()})


def main() -> None:
    model, case, answer = (Path(each) for each in sys.argv[1:])
    result = asyncio.run(Scenario(model, json.loads(case.read_text())).run())
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
