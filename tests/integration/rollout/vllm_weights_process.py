"""Gives a vLLM engine, in a separate process, weights with one defect after another. The canary is not used, so
the digests alone must find every defect. This process asserts nothing.

`python -m tests.integration.rollout.vllm_weights_process MODEL DTYPE RANKS EVERY ANSWER.json` damages every EVERY-th
weight.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proto.tensors import Array
from services.rollout.engine import WeightsMismatch
from services.rollout.engines import vllm_worker
from services.rollout.engines.proof import load_trace
from services.rollout.engines.vllm_engine import VllmEngine
from shared.tensors_torch import to_torch
from shared.weights.digests import digests_of
from shared.weights.drill import perturb

SEED = 7
STALE = "model.layers.1.self_attn.qkv_proj"


class Scenario:
    def __init__(self, engine: VllmEngine, ranks: int) -> None:
        self._engine = engine
        self._ranks = ranks
        self._base: dict[str, Array] = {}
        self._new: dict[str, Array] = {}
        self._announced: dict[str, int] = {}
        self._answer: dict[str, Any] = {"refused": {}}

    async def run(self, every: int) -> dict[str, Any]:
        engine, answer = self._engine, self._answer
        await engine.start()
        self._base = await engine.base_weights()
        self._new = {name: perturb(name, values, SEED) for name, values in self._base.items()}
        self._announced = digests_of({name: to_torch(values) for name, values in self._new.items()})
        answer["names"] = list(self._base)
        began = time.perf_counter()
        answer["first"] = await self._verdict(self._new)  # All packed weights are read back.
        answer["first_s"] = time.perf_counter() - began
        await self._each(every)
        if self._ranks == 1:
            await self._left_in_the_worker()
            await engine.set_weights(self._new)
            answer["read_back"] = await engine._compute.run(self._unpacked)
        began = time.perf_counter()
        answer["last"] = await self._verdict(self._new)
        answer["last_s"] = time.perf_counter() - began
        await engine.stop()
        return answer

    async def _each(self, every: int) -> None:
        base, new, refused = self._base, self._new, self._answer["refused"]
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name, values in new.items():
            shapes.setdefault(values.shape, []).append(name)
        for name in list(new)[::every]:
            alike = shapes[new[name].shape]
            other = alike[alike.index(name) - 1]
            bit = new[name].copy()
            bit.reshape(-1).view(np.uint8)[-2] ^= 1
            refused[f"stale {name}"] = await self._verdict({**new, name: base[name]})
            refused[f"bit {name}"] = await self._verdict({**new, name: bit})
            if other != name:
                refused[f"swapped {name}"] = await self._verdict({**new, name: new[other], other: new[name]})

    async def _left_in_the_worker(self) -> None:
        """Load correct weights into the engine in ways that do not reach the place where they are used."""
        new, refused = self._new, self._answer["refused"]
        model = self._model()
        module = model.get_submodule(STALE)
        # Where a CPU has no packed layout for the dtype, the product reads the weight itself, which cannot be stale.
        self._answer["unpackable"] = ["float16", *([] if torch.cpu._is_avx512_supported() else ["bfloat16"])]
        self._answer["packed"] = load_trace.handle_of(module) is not None
        if self._answer["packed"]:
            packed = module.cpu_linear
            await self._engine.set_weights(new)
            module.cpu_linear = packed
            refused[f"handle {STALE}"] = await self._judged()
        await self._engine.set_weights(new)
        with torch.inference_mode():
            model.get_parameter("model.norm.weight").mul_(1.5)
        refused["overwritten model.norm.weight"] = await self._judged()
        repair = vllm_worker.rebuild_tied_heads
        vllm_worker.rebuild_tied_heads = lambda model: 0
        self._answer["head"] = await self._verdict(new)
        vllm_worker.rebuild_tied_heads = repair
        load = type(model).load_weights
        for name in ("model.layers.2.self_attn.k_proj.weight", "model.layers.0.mlp.gate_proj.weight"):

            def without(model: Any, weights: Any, name: str = name) -> Any:
                return load(model, ((each, tensor) for each, tensor in weights if each != name))

            type(model).load_weights = without
            refused[f"skipped {name}"] = await self._verdict(new)
            type(model).load_weights = load
        one, two = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"

        def crossed(model: Any, weights: Any) -> Any:
            return load(model, (({one: two, two: one}.get(each, each), tensor) for each, tensor in weights))

        type(model).load_weights = crossed
        refused["crossed model.layers.0.mlp.gate_up_proj.weight"] = await self._verdict(new)
        type(model).load_weights = load

    def _unpacked(self) -> dict[str, bool]:
        """Return whether products with unit vectors give exactly the fused weights, for every packed linear layer."""
        found: dict[str, bool] = {}
        for path, module in self._model().named_modules():
            if getattr(module, "cpu_linear", None) is None:
                continue
            prefix, _, leaf = path.rpartition(".")
            fused = self._model().packed_modules_mapping.get(leaf, [leaf])
            names = [f"{prefix}.{each}.weight" for each in fused]
            if leaf in ("embed_tokens", "lm_head"):
                names = [name for name in self._new if name == "model.embed_tokens.weight"]
            weight = torch.cat([to_torch(self._new[name]) for name in names])
            units = torch.eye(weight.shape[1], dtype=weight.dtype)
            product = module.cpu_linear(units, getattr(module, "weight", None), None)
            found[path] = torch.equal(product[:, : len(weight)].t(), weight)
        return found

    async def _verdict(self, weights: Mapping[str, Array]) -> str:
        await self._engine.set_weights(weights)
        return await self._judged()

    async def _judged(self) -> str:
        """Return the error of `verify` for the announced version, or an empty string."""
        try:
            await self._engine.verify({}, self._announced)
        except WeightsMismatch as mismatch:
            return str(mismatch)
        return ""

    def _model(self) -> Any:
        return self._engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def main() -> None:
    model, dtype, ranks, every, answer = sys.argv[1:]
    load_trace.READ_BACK_FLOP = 10**12  # All weights are read back.
    engine = VllmEngine(
        model=Path(model),
        dtype=dtype,
        threads=1,
        deterministic=False,
        engine_args={"max_model_len": 128, "max_num_seqs": 8},
        tensor_parallel=int(ranks),
    )
    result = asyncio.run(Scenario(engine, int(ranks)).run(int(every)))
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
