"""Runs, in a separate process, one vLLM engine through everything that its tests check. This process asserts nothing:
vLLM patches torch, so the process that reads the answers computes the expected values.

`python -m tests.integration.rollout.vllm_process MODEL CASE.json ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from proto.messages import Canary, WeightsRef
from proto.tensors import Array
from services.rollout.engine import (
    Generation,
    GenerationCancelled,
    GenerationWatch,
    Prompt,
    SamplingParams,
    WeightsMismatch,
)
from services.rollout.engines import vllm_worker
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.weights.sync import WeightsSync
from shared.colocation.devices import KV_CACHE, WEIGHTS
from shared.rpc.errors import RpcError
from shared.weights.drill import perturb
from tests.weights_refs import weights_ref

SEED = 7
TOLERANCE = 1e-4
HOT = 2.0
"""Highest temperature that vLLM accepts; it makes samples long."""


class AskedLater(threading.Event):
    """An event that calls `reached` on the engine's thread at a given check of `is_set`, and is set only by `give_up`.

    An engine checks before each step, so `reached` is always called between the same two steps.
    """

    def __init__(self, asked: int, reached: Callable[[], object]) -> None:
        super().__init__()
        self._left = asked
        self._reached = reached
        self._given_up = False

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self._reached()
        return self._given_up

    def give_up(self) -> None:
        self._given_up = True


class Shown:
    """Records the notes of an engine."""

    def __init__(self) -> None:
        self.taken: list[list[list[dict[str, Any]]]] = []

    def watch(self, every_s: float) -> GenerationWatch:
        return GenerationWatch(every_s, lambda groups: self.taken.append(plain(groups)))


class CancelLater(threading.Event):
    """An event that is set after a number of checks, and so always cancels a block between the same two steps."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self._left = asked

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def plain(groups: list[list[Generation]]) -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "ids": each.token_ids.tolist(),
                "logprobs": each.logprobs.tolist(),
                "finish": each.finish_reason,
                "swaps": each.swaps.tolist(),
            }
            for each in group
        ]
        for group in groups
    ]


async def failure(work: Awaitable[object]) -> str:
    """Return `Type: message` of the exception that `work` raised, or an empty string."""
    try:
        await work
    except (RpcError, WeightsMismatch, GenerationCancelled) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Scenario:
    def __init__(self, model: Path, case: dict[str, Any]) -> None:
        self._model = model
        self._case = case
        self._prompts = [Prompt(f"train/0/{i}", ids) for i, ids in enumerate(case["prompts"])]
        self._engine = self._made({})
        self._answer: dict[str, Any] = {}
        self._base: dict[str, Array] = {}

    def _made(self, engine_args: dict[str, Any]) -> VllmEngine:
        return VllmEngine(
            model=self._model,
            dtype="float32",
            threads=1,
            deterministic=False,
            engine_args=engine_args,
            in_flight="keep",
        )

    async def run(self) -> dict[str, Any]:
        answer = self._answer
        answer["refused"] = {
            name: await failure(self._made(arguments).start())
            for name, arguments in self._case["refused_arguments"].items()
        }
        started = time.perf_counter()
        await self._engine.start()
        answer["start_s"] = time.perf_counter() - started
        answer["sizes"] = [self._engine.vocab_size, self._engine.context_tokens]
        scheduling = self._engine._llm.vllm_config.scheduler_config
        answer["batches"] = [scheduling.max_num_seqs, scheduling.max_num_batched_tokens, scheduling.async_scheduling]
        self._base = await self._engine.base_weights()
        await self._weights()
        await self._sampling()
        await self._cut_off()
        await self._interrupted()
        await self._updated_midway()
        await self._slept([psutil.Process()])
        answer["listening"] = [
            each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN
        ]
        answer["children"] = len(psutil.Process().children())
        answer["stats"] = self._engine.stats()
        answer["max_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        await self._engine.stop()
        return answer

    async def _weights(self) -> None:
        engine, answer = self._engine, self._answer
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        # The first sync runs without the repair, so that the drill itself must find the defect.
        repair = vllm_worker.rebuild_tied_heads
        vllm_worker.rebuild_tied_heads = lambda model: 0
        answer["unrepaired"] = await failure(sync.load(*self._version(1)))
        answer["held_unrepaired"] = sync.holds.step
        vllm_worker.rebuild_tied_heads = repair
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        report = await sync.load(*self._version(1))
        answer["canary_error"] = report.canary_error
        answer["sync_s"] = report.seconds
        ref, _ = self._version(1)
        answer["stale"] = await failure(sync.load(ref, self._version(2)[1]))
        weights = self._version(2)[1]
        name = next(iter(weights))
        renamed = {("model.other" if key == name else key): value for key, value in weights.items()}
        answer["renamed"] = await failure(engine.set_weights(renamed))
        answer["reshaped"] = await failure(engine.set_weights(weights | {name: weights[name][1:]}))
        answer["retyped"] = await failure(engine.set_weights(weights | {name: weights[name].astype(np.float16)}))
        answer["names"] = list(self._base)
        await sync.load(*self._version(1))
        await self._generate("first_version", SamplingParams(4, 1.0, 16, 0))
        # The prefix cache now holds the long prompt's first block, computed by version 1.
        answer["second_error"] = (await sync.load(*self._version(2))).canary_error

    async def _sampling(self) -> None:
        await self._generate("warm", SamplingParams(4, 1.0, 16, 0))
        await self._generate("warm_again", SamplingParams(4, 1.0, 16, 0))
        await self._generate("other_seed", SamplingParams(4, 1.0, 16, 1))
        await self._generate("cold", SamplingParams(4, 0.7, 16, 0))
        await self._generate("greedy", SamplingParams(2, 0.0, 16, 0))
        await self._generate("stopped", SamplingParams(16, 1.0, 32, 0, stop=tuple(self._case["stop"])))
        prompts = [Prompt(f"speed/0/{i}", [1, 10 + i % 20, 11, 12, 13]) for i in range(32)]
        started = time.perf_counter()
        groups = await self._engine.generate(prompts, SamplingParams(8, 1.0, 64, 0), threading.Event())
        tokens = sum(len(each.token_ids) for group in groups for each in group)
        self._answer["tokens_per_s"] = tokens / (time.perf_counter() - started)

    async def _cut_off(self) -> None:
        """Abandon a block and continue its samples."""
        sampling = SamplingParams(4, 1.0, 16, 0)
        notes = Shown()
        cut = self._engine.generate(self._prompts, sampling, CancelLater(3), notes.watch(every_s=1e9))
        self._answer["cut_off"] = await failure(cut)
        (noted,) = notes.taken
        self._answer["noted"] = noted
        went_on = json.loads(json.dumps(noted))
        open_ends = [
            (prompt, each)
            for prompt, group in zip(self._prompts, went_on, strict=True)
            for each in group
            if not each["finish"]
        ]
        prompts = [
            Prompt(f"{prompt.name}/{i}+{len(each['ids'])}", prompt.token_ids, each["ids"])
            for i, (prompt, each) in enumerate(open_ends)
        ]
        ends = await self._engine.generate(prompts, replace(sampling, samples=1), threading.Event())
        for (_, each), (end,) in zip(open_ends, plain(ends), strict=True):
            each |= {name: each[name] + end[name] for name in ("ids", "logprobs")} | {"finish": end["finish"]}
        self._answer["went_on"] = went_on

    async def _interrupted(self) -> None:
        engine, answer = self._engine, self._answer
        sampling = SamplingParams(4, 1.0, 16, 0)
        answer["cancelled"] = await failure(engine.generate(self._prompts, sampling, CancelLater(3)))
        await self._generate("after_cancel", sampling)
        await engine.pause()
        cancel = threading.Event()
        cancel.set()
        answer["cancelled_in_pause"] = await failure(engine.generate(self._prompts, sampling, cancel))
        steps = engine.stats()["decode_steps"]
        task = asyncio.create_task(engine.generate(self._prompts, sampling, threading.Event()))
        done, _ = await asyncio.wait([task], timeout=1.0)
        answer["paused"] = [len(done), engine.stats()["decode_steps"] - steps]
        progress = engine.progress
        await engine.resume()
        answer["after_pause"] = plain(await task)
        answer["progress_and_steps"] = [engine.progress - progress, engine.stats()["decode_steps"] - steps]
        await engine.set_weights(self._version(1)[1])
        canary = self._version(1)[0].canary
        answer["last_error"] = float(np.abs(await engine.score(canary.token_ids) - canary.logprobs).max())

    async def _updated_midway(self) -> None:
        """Run a block that begins under version 1 and continues under version 2, then a block that does not depend on
        version 1."""
        engine, answer = self._engine, self._answer
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        await sync.load(*self._version(1))
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def hold() -> None:
            asyncio.run_coroutine_threadsafe(engine.pause(), loop).result()
            loop.call_soon_threadsafe(reached.set)

        async def held(cancel: AskedLater, notes: Shown, every_s: float) -> asyncio.Task[list[list[Generation]]]:
            reached.clear()
            block = engine.generate(self._prompts, SamplingParams(16, HOT, 48, 0), cancel, notes.watch(every_s))
            task = asyncio.create_task(block)
            task.add_done_callback(lambda _: reached.set())  # On failure, the error is raised below.
            await reached.wait()
            assert not task.done(), task.result()
            return task

        notes = Shown()
        task = await held(AskedLater(3, hold), notes, 0.0)
        answer["midway_began"] = engine.swaps
        answer["midway_error"] = (await sync.load(*self._version(2))).canary_error
        answer["done_in_pause"] = task.done()
        await engine.resume()
        answer["midway"] = plain(await task)
        answer["midway_noted"] = notes.taken
        await self._generate("after_midway", SamplingParams(4, 1.0, 16, 0))
        # The block is abandoned after steps with weights that were scored but not yet verified.
        notes, cancel = Shown(), AskedLater(3, hold)
        task = await held(cancel, notes, 1e9)
        answer["pause_began"] = engine.swaps
        await engine.set_weights(self._version(1)[1])
        await engine.score(self._version(1)[0].canary.token_ids)
        cancel.give_up()
        answer["given_up_in_pause"] = await failure(task)
        (answer["noted_in_pause"],) = notes.taken
        await engine.resume()

    async def _slept(self, computing: list[psutil.Process]) -> None:
        """Put the engine to sleep twice, and load another version after each sleep. `computing` lists the processes
        that hold the weights.
        """
        engine, answer = self._engine, self._answer
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        await sync.load(*self._version(1))
        answer["sleep_rss"] = []
        for step in (2, 1):
            answer["sleep_rss"].append([each.memory_info().rss for each in computing])
            sync.forget()
            await engine.sleep()
            answer["sleep_rss"].append([each.memory_info().rss for each in computing])
            await engine.wake(frozenset({WEIGHTS}))
            answer["unset"] = await failure(engine.score(self._version(step)[0].canary.token_ids))
            await sync.place(*self._version(step))
            await engine.wake(frozenset({KV_CACHE}))
            answer["sleep_error"] = (await sync.prove()).canary_error
            await self._generate(f"slept_{step}", SamplingParams(4, 1.0, 16, 0))

    async def _generate(self, name: str, sampling: SamplingParams) -> None:
        self._answer[name] = plain(await self._engine.generate(self._prompts, sampling, threading.Event()))

    def _version(self, step: int) -> tuple[WeightsRef, dict[str, Array]]:
        weights = {name: perturb(name, values, 1000 + step) for name, values in self._base.items()}
        ref = weights_ref(
            1,
            step,
            self._canary(f"version {step}"),
            self._canary("drill"),
            drill_seed=SEED,
            nbytes=sum(values.nbytes for values in weights.values()),
        )
        return ref, weights

    def _canary(self, name: str) -> Canary:
        return Canary(
            token_ids=np.array(self._case["canary_tokens"], np.int32),
            logprobs=np.array(self._case["canaries"][name], np.float32),
            tolerance=TOLERANCE,
        )


def main() -> None:
    model, case, answer = (Path(each) for each in sys.argv[1:])
    result = asyncio.run(Scenario(model, json.loads(case.read_text())).run())
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
