"""A vLLM engine of two tensor-parallel ranks put through what its test judges, in a process of its own.

`python -m tests.integration.vllm_ranks_process MODEL CASE.json ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil

from services.rollout.engine import SamplingParams
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.weights_sync import WeightsSync
from tests.integration.vllm_process import AskedLater, Scenario, failure


def shared_memory(pid: int) -> list[str]:
    """Paths of the memory that ranks reduce in, as the kernel names them: with ` (deleted)` where the name is gone."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line[line.index("/dev/shm") :] for line in lines if "/dev/shm/vllm_dist" in line]


class Ranks(Scenario):
    def _made(self, engine_args: dict[str, Any]) -> VllmEngine:
        return VllmEngine(
            model=self._model,
            dtype="float32",
            threads=1,
            deterministic=False,
            engine_args=engine_args,
            tensor_parallel=2,
            in_flight="recompute",
        )

    async def run(self) -> dict[str, Any]:
        engine, answer = self._engine, self._answer
        await engine.start()
        ranks = [each for each in psutil.Process().children() if "Worker_TP" in "".join(each.cmdline())]
        answer["ranks"] = len(ranks)
        answer["names"] = [each for rank in ranks for each in shared_memory(rank.pid)]
        self._base = await engine.base_weights()
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        answer["canary_error"] = (await sync.load(*self._version(1))).canary_error
        ref, _ = self._version(1)
        answer["stale"] = await failure(sync.load(ref, self._version(2)[1]))
        await self._generate("warm", SamplingParams(4, 1.0, 16, 0))
        await self._updated_midway()
        await self._slept(ranks)
        answer["listening"] = sorted(
            {
                each.laddr.ip
                for process in (psutil.Process(), *ranks)
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            }
        )
        kill = AskedLater(3, ranks[1].kill)
        lost = engine.generate(self._prompts, SamplingParams(4, 1.0, 16, 0), kill)
        answer["lost"] = await failure(asyncio.wait_for(lost, 60))
        await engine.stop()
        _, left = psutil.wait_procs(ranks, 20)
        answer["left"] = len(left)
        return answer


def main() -> None:
    model, case, answer = (Path(each) for each in sys.argv[1:])
    result = asyncio.run(Ranks(model, json.loads(case.read_text())).run())
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
