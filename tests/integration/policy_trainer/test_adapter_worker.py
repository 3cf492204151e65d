"""Runs a real worker that trains an adapter: it is killed, continues from a checkpoint, publishes an earlier version
again, refuses the checkpoint of another adapter, and exports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from proto.messages import ErrorCode, WeightsKind
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.policy_trainer.test_trainer_worker import (
    STORE,
    WorkerProcess,
    bench_of,
    made_run,
    processes,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = made_run(tmp_path)
    text = made.topology.read_text().replace("dtype: float32", "dtype: bfloat16, lora: {rank: 4}")
    made.topology.write_text(text.replace("steps: 9}", "steps: 9, deterministic: true}\nstaleness: 1"))
    return made


def test_a_worker_continues_from_a_checkpoint_of_its_adapter_and_refuses_that_of_another(
    run: RunDir, tmp_path: Path
) -> None:
    async def scenario(worker: WorkerProcess) -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            first = await workers.publish_weights(0, 0, store=STORE)
            await bench.train(workers, 1)
            earlier = await workers.publish_weights(0, 1, store=STORE)
            await bench.train(workers, 2)
            await workers.save_checkpoint(2)
            await bench.train(workers, 3)
            last = await workers.publish_weights(0, 3, store=STORE)
            assert first.kind == earlier.kind == last.kind == WeightsKind.ADAPTER
            assert first.base == last.base
            await workers.init_model()  # without reading the base: the worker has been used
            again = await workers.publish_weights(1, 0, store=STORE)
            assert await bench.weight_bytes(again) == await bench.weight_bytes(first)
            worker.kill()
            worker.start()
            await workers.take_over()
            await workers.load_checkpoint(2)
            other = await workers.publish_weights(2, 1, store=STORE)
            assert (other.kind, other.base, other.canary.digests) == (last.kind, last.base, earlier.canary.digests)
            assert await bench.weight_bytes(other) == await bench.weight_bytes(earlier)
            await bench.train(workers, 3)
            same = await workers.publish_weights(2, 3, store=STORE)
            assert await bench.weight_bytes(same) == await bench.weight_bytes(last)
            await workers.save_hf_model(tmp_path / "export")
            state = run.checkpoints / "step-2" / "state.json"
            text = state.read_text()
            assert json.loads(text)["adapter"] == {"base": first.base, "rank": 4, "alpha": 32.0}
            for old, new, said in (
                (first.base, "0123456789abcdef", f"over the weights 0123456789abcdef, but .* weights {first.base};"),
                ('"rank": 4', '"rank": 8', "holds an adapter of rank 8 .*, but the run trains an adapter of rank 4 "),
                ('"alpha": 32.0', '"alpha": 8.0', "and alpha 8 .*, but the run trains .* and alpha 32 "),
                ('"adapter"', '"other"', "holds all weights of a model, but the run trains an adapter of rank 4 "),
            ):
                state.write_text(text.replace(old, new))
                with pytest.raises(RpcError, match=said) as caught:
                    await workers.load_checkpoint(2)
                assert caught.value.code == ErrorCode.CONFLICT
                await workers.take_over()
            state.write_text(text)
            assert (await workers.load_checkpoint(2)).step == 2

    with processes(run) as worker:
        asyncio.run(scenario(worker))
    assert sorted(path.name for path in (tmp_path / "export" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    run.remove_volatile()
