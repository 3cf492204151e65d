"""Runs, in a separate process, a vLLM engine that sleeps between two blocks on a GPU. It asserts nothing.

`python -m tests.integration.rollout.vllm_sleep_process MODEL CASE.json ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from services.rollout.engine import SamplingParams
from services.rollout.weights.sync import WeightsSync
from shared.colocation.devices import KV_CACHE, WEIGHTS
from tests.integration.rollout.vllm_process import Scenario

SAMPLING = SamplingParams(4, 1.0, 16, 0)


class Sleeper(Scenario):
    async def run(self) -> dict[str, Any]:
        answer = self._answer
        engine = self._engine = self._made({"enable_sleep_mode": True, "gpu_memory_utilization": 0.3})
        await engine.start()
        self._base = await engine.base_weights()
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        await sync.load(*self._version(1))
        await self._generate("before", SAMPLING)
        answer["free_bytes"] = [_free_bytes()]
        sync.forget()
        await engine.sleep()
        answer["free_bytes"].append(_free_bytes())
        await engine.wake(frozenset({WEIGHTS}))
        await sync.place(*self._version(2))
        answer["free_bytes"].append(_free_bytes())
        await engine.wake(frozenset({KV_CACHE}))
        answer["canary_error"] = (await sync.prove()).canary_error
        answer["free_bytes"].append(_free_bytes())
        await self._generate("after", SAMPLING)
        await engine.stop()
        return answer


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def main() -> None:
    model, case, answer = (Path(each) for each in sys.argv[1:])
    result = asyncio.run(Sleeper(model, json.loads(case.read_text())).run())
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
