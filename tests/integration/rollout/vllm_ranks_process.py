"""Runs, in a separate process, a vLLM engine with two tensor-parallel ranks through everything that its tests check.

`python -m tests.integration.rollout.vllm_ranks_process MODEL CASE.json ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from proto.messages import Canary, DeviceMemory, TransferOffer, TransferParameter
from proto.tensors import Array
from services.rollout.engine import SamplingParams
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.vllm_offer import announcing, joining
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import TransferFailed
from shared.ranks.meeting import LOOPBACK, Meeting
from shared.tensors_torch import to_torch
from shared.weights.gloo import GlooGroup
from shared.weights.weight_set import described
from tests.integration.rollout.vllm_process import AskedLater, Scenario, failure

LEFT = 3
"""Number of tensors after which a sender leaves the group."""


def shared_memory(pid: int) -> list[str]:
    """Return the kernel's paths to the ranks' reduction buffers, with ` (deleted)` where the name has been unlinked."""
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
            route="gloo",
        )

    async def run(self) -> dict[str, Any]:
        engine, answer = self._engine, self._answer
        await engine.start()
        ranks = [each for each in psutil.Process().children() if "Worker_TP" in "".join(each.cmdline())]
        answer["ranks"] = len(ranks)
        answer["understood"] = understood()
        answer["shared_memory"] = hasattr(torch.ops._C, "init_shm_manager")
        answer["names"] = [each for rank in ranks for each in shared_memory(rank.pid)]
        self._base = await engine.base_weights()
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
        answer["canary_error"] = (await sync.load(*self._version(1))).canary_error
        ref, _ = self._version(1)
        answer["stale"] = await failure(sync.load(ref, self._version(2)[1]))
        await self._generate("warm", SamplingParams(4, 1.0, 16, 0))
        await self._sent()
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

    async def _sent(self) -> None:
        """Send versions through vLLM's weight-transfer API: three over one group, of which one in parts, and one that
        is interrupted."""
        engine, answer = self._engine, self._answer
        answer["sent_errors"] = []
        with tempfile.TemporaryDirectory() as folder:
            sender = Sender(Path(folder) / "meeting")
            for step, parts in ((2, 1), (1, 1), (2, 3)):
                ref, weights = self._version(step)
                await sender.send(engine, weights, parts=parts)
                answer["sent_errors"].append(await self._error(ref.canary))
            try:
                await sender.send(engine, self._version(1)[1], leaves_after=LEFT)
            except TransferFailed as error:
                answer["broken_off"] = str(error)
            engine.leave()
            answer["error_after_it"] = await self._error(self._version(2)[0].canary)

    async def _error(self, canary: Canary) -> float:
        return float(np.abs(await self._engine.score(canary.token_ids) - canary.logprobs).max())


def understood() -> dict[str, Any]:
    """Return the values that vLLM's own engines read from our offers. These engines refuse unknown fields."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    memory = DeviceMemory(
        gpu="GPU-0",
        nbytes=40,
        handle=b"h" * 64,
        storage_bytes=64,
        storage_offset=0,
        counter=b"c",
        counter_offset=0,
        event=b"e",
        event_sync=True,
    )
    parameters = [TransferParameter("a", "float32", [2, 4]), TransferParameter("b", "bfloat16", [4])]
    offer = TransferOffer(
        communicator=1, number=1, deadline_s=20.0, parameters=parameters, unique_id=bytes(range(128)), memory=memory
    )
    nccl = NCCLWeightTransferInitInfo(**joining("nccl", offer, Meeting(LOOPBACK), ranks=2))
    NCCLWeightTransferUpdateInfo(**announcing(msgspec.structs.replace(offer, memory=None)))
    ipc = IPCWeightTransferUpdateInfo(**announcing(offer))
    return {
        "packed": IPCWeightTransferInitInfo(**joining("ipc", offer, Meeting(LOOPBACK), ranks=1)).packed,
        "unique_id": list(nccl.nccl_unique_id_bytes),
        "world_size": nccl.world_size,
        "sizes": ipc.tensor_sizes,
        "handle": [len(ipc.ipc_handles["GPU-0"]), hash(ipc.ipc_handles["GPU-0"]) != 0],
    }


class Sender:
    """The trainer's end of transfers to an engine with two ranks."""

    def __init__(self, meeting: Path) -> None:
        self._meeting = Meeting(LOOPBACK, file=meeting)
        self._thread = ThreadPoolExecutor(1)
        self._group: GlooGroup | None = None

    async def send(
        self, engine: VllmEngine, weights: dict[str, Array], leaves_after: int | None = None, parts: int = 1
    ) -> None:
        """Send `weights` in this many parts. If `leaves_after` is given, leave the group after that many tensors."""
        tensors = {name: to_torch(values) for name, values in weights.items()}
        table, each = described(tensors), -(-len(tensors) // parts)
        for first in range(0, len(table), each):
            left = max(0, len(table) - first - each)
            offer = TransferOffer(communicator=1, number=1, deadline_s=20.0, parameters=table, first=first, left=left)
            carried = list(tensors.values())[first : len(table) - left]
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._broadcast, carried[:leaves_after])
            try:
                await engine.receive(offer, self._meeting)
            finally:
                await work

    def _broadcast(self, tensors: list[Tensor]) -> None:
        group = self._group or GlooGroup(self._meeting, 0, 3, deadline_s=20.0)
        group.broadcast(tensors)
        self._group = group if len(tensors) > LEFT else None


def main() -> None:
    model, case, answer = (Path(each) for each in sys.argv[1:])
    result = asyncio.run(Ranks(model, json.loads(case.read_text())).run())
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
