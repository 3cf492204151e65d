"""A sleeping engine frees its memory and produces nothing until it has been given weights again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from proto.messages import Canary
from proto.tensors import Array
from services.rollout.engine import Prompt
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights.sync import HeldVersion, WeightsSync
from shared.colocation.devices import ENGINE, KV_CACHE, WEIGHTS
from shared.rpc.errors import RpcError
from shared.topology.passes import FASTEST
from shared.weights.drill import perturb
from tests.unit.rollout.rollout_engine import sampling
from tests.unit.tiny_models import make_model
from tests.weights_refs import weights_ref

pytestmark = pytest.mark.slow

PROMPTS = [Prompt("a", [1, 2, 3]), Prompt("b", [4, 5])]
SEED = 3


def engine_of(folder: Path, **config: int) -> TransformersEngine:
    make_model("qwen3", head_dim=64, **config).save_pretrained(folder / "model")
    return TransformersEngine(model=folder / "model", dtype="float32", threads=1, deterministic=True, passes=FASTEST)


async def sampled(engine: TransformersEngine) -> list[Array]:
    groups = await engine.generate(PROMPTS, sampling(), threading.Event())
    return [each.logprobs for group in groups for each in group]


async def weigh(folder: Path) -> None:
    """Put the engine to sleep and wake it, twice, and assert the effect on this process's memory."""
    engine = engine_of(folder, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    await engine.start()
    weights = {name: value.copy() for name, value in (await engine.base_weights()).items()}
    nbytes = sum(value.nbytes for value in weights.values())
    assert nbytes > 80e6
    before = await sampled(engine)
    for _ in range(2):
        awake = psutil.Process().memory_info().rss
        await engine.sleep()
        await engine.sleep()  # A second sleep changes nothing.
        given_back = awake - psutil.Process().memory_info().rss
        assert given_back > 0.8 * nbytes, f"{given_back} of {nbytes} bytes"
        await engine.wake(frozenset({WEIGHTS}))
        await engine.set_weights(weights)
        await engine.wake(frozenset({KV_CACHE}))
        after = await sampled(engine)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    await engine.stop()


def test_memory_falls_by_the_size_of_the_weights_and_grows_back_with_the_next_version(tmp_path: Path) -> None:
    # A separate process is used, as for a rollout service, because in this process's heap, garbage from other tests
    # lies between the weights.
    code = "import asyncio, pathlib, sys; from tests.unit.rollout.test_engine_sleep import weigh; "
    code += "asyncio.run(weigh(pathlib.Path(sys.argv[1])))"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_nothing_is_generated_or_scored_between_a_sleep_and_new_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = engine_of(tmp_path)
        await engine.start()
        await engine.sleep()
        await engine.wake(ENGINE)
        with pytest.raises(RpcError, match="before its weights were set"):
            await sampled(engine)
        with pytest.raises(RpcError, match="before its weights were set"):
            await engine.score(np.array([1, 2], np.int32))
        await engine.stop()

    asyncio.run(scene())


def test_a_sync_interrupted_by_a_sleep_sets_the_weights_again_and_verifies_them(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = engine_of(tmp_path)
        await engine.start()
        base = {name: value.copy() for name, value in (await engine.base_weights()).items()}
        ids = np.arange(1, 9, dtype=np.int32)
        canary = Canary(token_ids=ids, logprobs=await engine.score(ids), tolerance=1e-6)
        await engine.set_weights({name: perturb(name, value, SEED) for name, value in base.items()})
        drill = Canary(token_ids=ids, logprobs=await engine.score(ids), tolerance=1e-6)
        await engine.set_weights(base)
        ref = weights_ref(0, 0, canary, drill, drill_seed=SEED)
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)

        async def sleep() -> None:
            sync.forget()
            await engine.sleep()
            await engine.wake(ENGINE)

        await sleep()  # The sleep precedes the drill, which reads the base weights from the folder.
        await sync.place(ref, base)
        await sleep()
        await sync.prove()
        assert sync.holds == HeldVersion(0, 0)
        await sync.place(ref, base)
        await sleep()
        assert sync.holds == HeldVersion()
        await sync.prove()
        await sleep()
        assert sync.needs(ref, exact=False)
        await engine.stop()

    asyncio.run(scene())
