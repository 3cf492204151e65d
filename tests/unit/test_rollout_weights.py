"""Weight syncs: what is loaded is proved, and an update that does not reach every parameter is refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from msgspec import structs

from proto.messages import Canary, ErrorCode, WeightsRef
from proto.tensors import Array
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights_sync import Version, WeightsSync
from shared.drill import CANARY_TOKENS, SHORT_CANARY_TOKENS, canary_tokens, perturb
from shared.model.digests import as_int, digest_whole
from shared.model.few_rows import FewRows
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy, to_torch
from tests.unit.rollout_engine import MODEL

SEED = 7
TOLERANCE = 1e-4
SKIPPED = "model.layers.2.self_attn.k_norm.weight"


class DeafEngine(TransformersEngine):
    """An engine with a defect: its update never reaches one parameter."""

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        kept = (await self.base_weights())[SKIPPED]
        await super().set_weights({**weights, SKIPPED: kept})


@functools.cache
def trainer() -> torch.nn.Module:
    """The model that stands for the trainer's; its weights are overwritten by every canary."""
    return load_model(MODEL, "float32")


def canary(weights: Mapping[str, Array], length: int = CANARY_TOKENS, *, announced: bool = False) -> Canary:
    """As a trainer that holds `weights` makes it; `announced`: with their digests."""
    model = trainer()
    with torch.no_grad():
        for name, parameter in named_weights(model).items():
            parameter.copy_(to_torch(weights[name]))
    tokens = canary_tokens(64, SEED, length)
    mask = np.ones(len(tokens), np.uint8)
    mask[0] = 0
    with torch.inference_mode(), FewRows():
        logprobs, _ = token_logprobs(model, tokens, np.array([len(tokens)], np.int32), mask, 1.0, 4096)
    digests = [as_int(digest_whole(to_torch(weights[name]))) for name in sorted(weights)] if announced else []
    return Canary(token_ids=tokens, logprobs=to_numpy(logprobs)[1:].copy(), tolerance=TOLERANCE, digests=digests)


def base() -> dict[str, Array]:
    return {name: to_numpy(value).copy() for name, value in named_weights(load_model(MODEL, "float32")).items()}


def version(step: int, lineage: int = 1, *, announced: bool = False) -> tuple[WeightsRef, dict[str, Array]]:
    """A policy version as a trainer would publish it: the base, trained (here: moved) a little."""
    start = base()
    weights = {name: perturb(name, values, 1000 + step) for name, values in start.items()}
    drill = {name: perturb(name, values, SEED) for name, values in start.items()}
    ref = WeightsRef(
        lineage=lineage,
        step=step,
        task_id=f"weights/{lineage}/{step}",
        fence=1,
        store="batch-store/0",
        nbytes=sum(values.nbytes for values in weights.values()),
        canary=canary(weights, announced=announced),
        drill=canary(drill, announced=announced),
        drill_seed=SEED,
    )
    return ref, weights


def started(kind: type[TransformersEngine] = TransformersEngine, *, deterministic: bool = True) -> TransformersEngine:
    made = kind(model=MODEL, dtype="float32", threads=1, deterministic=deterministic)
    asyncio.run(made.start())
    return made


def test_a_version_is_drilled_loaded_proved_and_reported() -> None:
    engine = started()
    told: list[tuple[str, dict[str, float | str]]] = []
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: told.append((topic, values)))
    ref, weights = version(3)
    asyncio.run(sync.load(ref, weights))
    assert sync.holds == Version(1, 3)
    assert [topic for topic, _ in told] == ["drill", "weights"]
    assert told[1][1]["bytes"] == ref.nbytes
    assert 0 <= float(told[1][1]["canary_error"]) <= TOLERANCE
    after = asyncio.run(engine.base_weights())
    assert all(np.array_equal(after[name], values) for name, values in weights.items())
    asyncio.run(engine.stop())


def test_an_update_that_never_reaches_one_parameter_fails_the_drill() -> None:
    engine = started(DeafEngine)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    with pytest.raises(RpcError, match=f"start-up drill.* 1 of 46 parameters have other bits: {SKIPPED};") as caught:
        asyncio.run(sync.load(*version(1)))
    assert caught.value.code == ErrorCode.CONFLICT
    assert "\n" not in str(caught.value)
    assert sync.holds == Version()
    asyncio.run(engine.stop())


def test_weights_of_another_version_than_announced_fail_the_canary() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, _ = version(1)
    _, other = version(2)
    with pytest.raises(RpcError, match="canary mismatch after version 1"):
        asyncio.run(sync.load(ref, other))
    assert sync.holds == Version()
    asyncio.run(engine.stop())


def test_a_short_canary_refuses_one_wrong_parameter_and_passes_the_right_ones() -> None:
    """As float32 weights of `SHORT_CANARY_BYTES` and more have it: few tokens, through oneDNN's linear layers."""
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    ref = structs.replace(ref, canary=canary(weights, SHORT_CANARY_TOKENS))
    assert asyncio.run(sync.load(ref, weights)).canary_error <= TOLERANCE
    for name in ("model.embed_tokens.weight", SKIPPED, "model.layers.1.mlp.down_proj.weight"):
        wrong = {**weights, name: perturb(name, weights[name], SEED)}
        with pytest.raises(RpcError, match="canary mismatch after version 1"):
            asyncio.run(sync.load(ref, wrong))
        assert sync.holds == Version()
    asyncio.run(engine.stop())


def test_missing_and_unexpected_parameters_are_named_and_nothing_is_touched() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    asyncio.run(sync.load(ref, weights))
    broken = dict(weights)
    broken["model.norm.wait"] = broken.pop("model.norm.weight")
    with pytest.raises(RpcError, match=r"missing model\.norm\.weight, unexpected model\.norm\.wait"):
        asyncio.run(sync.load(version(2)[0], broken))
    after = asyncio.run(engine.base_weights())
    assert all(np.array_equal(after[name], values) for name, values in weights.items())
    asyncio.run(engine.stop())


def test_a_parameter_of_another_shape_is_named() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    weights["model.norm.weight"] = weights["model.norm.weight"][:64]
    with pytest.raises(RpcError, match=r"model\.norm\.weight: torch\.float32 \[64\] given"):
        asyncio.run(sync.load(ref, weights))
    asyncio.run(engine.stop())


@pytest.mark.parametrize(
    ("held", "wanted", "exact", "needed"),
    [
        (Version(), (1, 0), False, True),
        (Version(1, 3), (1, 3), True, False),
        (Version(1, 4), (1, 3), False, False),
        (Version(1, 4), (1, 3), True, True),
        (Version(1, 4), (2, 2), False, True),
        (Version(2, 2), (1, 4), False, False),
    ],
)
def test_an_engine_loads_what_is_newer_or_exactly_asked_for(
    held: Version, wanted: tuple[int, int], exact: bool, needed: bool
) -> None:
    empty = Canary(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), tolerance=TOLERANCE)
    ref = WeightsRef(
        lineage=wanted[0],
        step=wanted[1],
        task_id=f"weights/{wanted[0]}/{wanted[1]}",
        fence=1,
        store="batch-store/0",
        nbytes=0,
        canary=empty,
        drill=empty,
        drill_seed=SEED,
    )
    engine = TransformersEngine(model=MODEL, dtype="float32", threads=1, deterministic=True)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    sync.holds = held
    assert sync.needs(ref, exact=exact) is needed


@pytest.mark.parametrize(("length", "margin"), [(CANARY_TOKENS, 50), (SHORT_CANARY_TOKENS, 9)])
def test_every_parameter_of_the_model_is_seen_by_the_drill(length: int, margin: int) -> None:
    start = base()
    drill = {name: perturb(name, values, SEED) for name, values in start.items()}
    wanted = canary(drill, length)
    for name in start:
        kept = canary({**drill, name: start[name]}, length)
        assert np.abs(kept.logprobs - wanted.logprobs).max() > margin * TOLERANCE, name


def test_weights_in_host_memory_are_taken_over_without_a_copy_and_tied_ones_stay_tied() -> None:
    engine = started(deterministic=False)
    ref, weights = version(3)

    async def scenario() -> Mapping[str, Array]:
        await WeightsSync(engine, "rollout/0", lambda topic, values: None).load(ref, weights)
        return await engine.base_weights()

    held = asyncio.run(scenario())
    assert held.keys() == weights.keys()  # tied weights came apart otherwise: one name more
    assert all(np.shares_memory(held[name], weights[name]) for name in weights)
    asyncio.run(engine.stop())
