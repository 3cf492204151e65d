"""Gives a vLLM engine, in a separate process, versions of a mixture of experts with one defect after another. The
canary is not used, so the digests alone must find every defect. This process asserts nothing.

`python -m tests.integration.rollout.vllm_experts_process MODEL DTYPE RANKS ANSWER.json`
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from proto.tensors import Array
from services.rollout.engine import WeightsMismatch
from services.rollout.engines import vllm_worker
from services.rollout.engines.vllm_engine import VllmEngine
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_torch
from shared.weights.digests import digests_of
from shared.weights.drill import canary_tokens, perturb

SEED = 7
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
Weights = dict[str, Array]


def damaged(base: Weights, new: Weights, experts: list[int]) -> Iterator[tuple[str, Weights]]:
    """Yield (what is wrong, weights) for defects of the `experts` of every layer, each in one tensor."""
    for name in (name for name in new if name.endswith((GATE_UP, DOWN))):
        values = new[name]
        for expert in experts:
            for what, change in (
                ("stale", lambda made, expert=expert, name=name: made.__setitem__(expert, base[name][expert])),
                ("bit", lambda made, expert=expert: flip(made[expert])),
                (
                    "swapped",
                    lambda made, expert=expert, values=values: made.__setitem__(
                        [expert - 1, expert], values[[expert, expert - 1]]
                    ),
                ),
            ):
                yield f"{what} {expert} {name}", {**new, name: changed(values, change)}
            if name.endswith(GATE_UP):
                half = len(values[expert]) // 2
                turned = np.roll(values[expert], half, 0)
                made = changed(values, lambda made, expert=expert, turned=turned: made.__setitem__(expert, turned))
                yield f"halves {expert} {name}", {**new, name: made}


def changed(values: Array, change: Callable[[Array], object]) -> Array:
    made = values.copy()
    change(made)
    return made


def flip(values: Array) -> None:
    values.reshape(-1).view(np.uint8)[-2] ^= 1


class Mixture:
    def __init__(self, engine: VllmEngine, ranks: int) -> None:
        self._engine = engine
        self._ranks = ranks
        self._new: Weights = {}
        self._announced: dict[str, int] = {}

    async def run(self) -> dict[str, Any]:
        engine = self._engine
        await engine.start()
        base = await engine.base_weights()
        self._new = {name: perturb(name, values, SEED) for name, values in base.items()}
        self._announced = digests_of({name: to_torch(values) for name, values in self._new.items()})
        answer: dict[str, Any] = {"names": list(base), "first": await self._verdict(self._new)}
        tokens = canary_tokens(64, SEED)
        answer |= {"tokens": tokens.tolist(), "logprobs": (await engine.score(tokens)).tolist()}
        answer["refused"] = {
            what: await self._verdict(weights) for what, weights in damaged(base, self._new, experts=[1, 7])
        }
        if self._ranks == 1:
            answer["refused"] |= await self._loaded_wrongly()
        answer["last"] = await self._verdict(self._new)
        answer["again"] = (await engine.score(tokens)).tolist()
        await engine.stop()
        return answer

    async def _loaded_wrongly(self) -> dict[str, str]:
        """Return what is said of correct weights that the worker puts into the wrong places, or leaves unpacked."""
        found = {}
        model = self._engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        load, pack = type(model).load_weights, vllm_worker.pack_experts
        stored = [
            name for name, _ in vllm_worker.stored_names(self._engine._llm.model_config.hf_config)(self._tensors())
        ]
        gate, up, down = ((f"experts.0.{each}.", f"experts.1.{each}.") for each in kinds(stored))
        for what, (one, two) in {
            "crossed gates": gate,
            "crossed downs": down,
            "crossed halves": (gate[0], up[0]),
        }.items():

            def crossed(model: Any, weights: Any, one: str = one, two: str = two) -> Any:
                return load(
                    model, ((name.replace(one, "\0").replace(two, one).replace("\0", two), t) for name, t in weights)
                )

            type(model).load_weights = crossed
            found[what] = await self._verdict(self._new)
        type(model).load_weights = load
        vllm_worker.pack_experts = lambda model: None
        found["unpacked"] = await self._verdict(self._new)
        vllm_worker.pack_experts = pack
        return found

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        return ((name, to_torch(values)) for name, values in self._new.items())

    async def _verdict(self, weights: Mapping[str, Array]) -> str:
        """Return the error of `verify` for the announced version, or an empty string."""
        try:
            await self._engine.set_weights(weights)
            await self._engine.verify({}, self._announced)
        except (WeightsMismatch, RpcError) as error:
            return str(error)
        return ""


def kinds(stored: list[str]) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down projection in a checkpoint."""
    return ("w1", "w3", "w2") if any(".w1." in name for name in stored) else ("gate_proj", "up_proj", "down_proj")


def main() -> None:
    model, dtype, ranks, answer = sys.argv[1:]
    engine = VllmEngine(
        model=Path(model),
        dtype=dtype,
        threads=1,
        deterministic=False,
        engine_args={"max_model_len": 128, "max_num_seqs": 8},
        tensor_parallel=int(ranks),
    )
    Path(answer).write_text(json.dumps(asyncio.run(Mixture(engine, int(ranks)).run())))


if __name__ == "__main__":
    main()
