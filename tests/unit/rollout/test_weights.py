"""Checks that a weight sync verifies the loaded weights and refuses an update that does not reach every parameter."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from proto.messages import Canary, ErrorCode, WeightsKind, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.weights.publish import FLOOR, MEDIAN, SIGNAL, Canaries
from services.policy_trainer.worker.weights.publish import TOLERANCE as TRAINERS_TOLERANCE
from services.rollout.engine import Engine, WeightsMismatch
from services.rollout.engines import transformers_engine
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights.source import LoadedWeights, LoadEntry
from services.rollout.weights.sync import CALIBRATION, HeldVersion, WeightsSync
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.passes import FASTEST
from shared.weights.digests import as_int, digest_whole
from shared.weights.drill import (
    CANARY_TOKENS,
    SHORT_CANARY_TOKENS,
    canary_error,
    canary_tokens,
    noise_factors,
    perturb,
)
from shared.weights.weight_set import WeightSet
from tests.unit.rollout.rollout_engine import MODEL
from tests.weights_refs import weights_ref

pytestmark = pytest.mark.slow

SEED = 7
TOLERANCE = 1e-4
SKIPPED = "model.layers.2.self_attn.k_norm.weight"


class DeafEngine(TransformersEngine):
    """An engine whose update never reaches one parameter."""

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        kept = (await self.base_weights())[SKIPPED]
        await super().set_weights({**weights, SKIPPED: kept})


@functools.cache
def trainer() -> torch.nn.Module:
    """Return the model that stands in for the trainer's model; every canary overwrites its weights."""
    return load_model(MODEL, "float32")


def canary(weights: Mapping[str, Array], length: int = CANARY_TOKENS, *, announced: bool = False) -> Canary:
    """Return the canary of a trainer that holds `weights`, with their digests if `announced`."""
    model = trainer()
    with torch.no_grad():
        for name, parameter in named_weights(model).items():
            parameter.copy_(to_torch(weights[name]))
    tokens = canary_tokens(64, SEED, length)
    mask = np.ones(len(tokens), np.uint8)
    mask[0] = 0
    with torch.inference_mode():
        logprobs, _ = token_logprobs(model, tokens, np.array([len(tokens)], np.int32), mask, 1.0, 4096)
    digests = [as_int(digest_whole(to_torch(weights[name]))) for name in sorted(weights)] if announced else []
    return Canary(token_ids=tokens, logprobs=to_numpy(logprobs)[1:].copy(), tolerance=TOLERANCE, digests=digests)


def base() -> dict[str, Array]:
    return {name: to_numpy(value).copy() for name, value in named_weights(load_model(MODEL, "float32")).items()}


def version(step: int, lineage: int = 1, *, announced: bool = False) -> tuple[WeightsRef, dict[str, Array]]:
    """Return a policy version as a trainer publishes it. Training is simulated by perturbing the base weights."""
    start = base()
    weights = {name: perturb(name, values, 1000 + step) for name, values in start.items()}
    drill = {name: perturb(name, values, SEED) for name, values in start.items()}
    ref = weights_ref(
        lineage,
        step,
        canary(weights, announced=announced),
        canary(drill, announced=announced),
        drill_seed=SEED,
        nbytes=sum(values.nbytes for values in weights.values()),
    )
    return ref, weights


def started(kind: type[TransformersEngine] = TransformersEngine, *, deterministic: bool = True) -> TransformersEngine:
    made = kind(model=MODEL, dtype="float32", threads=1, deterministic=deterministic)
    asyncio.run(made.start())
    return made


def test_a_version_is_drilled_loaded_verified_and_reported() -> None:
    engine = started()
    told: list[tuple[str, dict[str, float | str]]] = []
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: told.append((topic, values)))
    ref, weights = version(3)
    asyncio.run(sync.load(ref, weights))
    assert sync.holds == HeldVersion(1, 3)
    assert [topic for topic, _ in told] == ["drill", "weights"]
    assert told[1][1]["bytes"] == ref.nbytes
    assert 0 <= float(told[1][1]["canary_error"]) <= TOLERANCE
    after = asyncio.run(engine.base_weights())
    assert all(np.array_equal(after[name], values) for name, values in weights.items())
    asyncio.run(engine.stop())


def test_an_update_that_never_reaches_one_parameter_fails_the_drill() -> None:
    engine = started(DeafEngine)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    with pytest.raises(RpcError, match=f"start-up drill.* 1 of 46 parameters have wrong bits: {SKIPPED};") as caught:
        asyncio.run(sync.load(*version(1)))
    assert caught.value.code == ErrorCode.CONFLICT
    assert "\n" not in str(caught.value)
    assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_weights_of_a_version_other_than_the_announced_one_fail_the_canary() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, _ = version(1)
    _, other = version(2)
    with pytest.raises(RpcError, match="canary mismatch after version 1"):
        asyncio.run(sync.load(ref, other))
    assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_a_short_canary_refuses_one_wrong_parameter_and_accepts_the_right_ones() -> None:
    """A model with at least `SHORT_CANARY_BYTES` of float32 weights has a short canary."""
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    ref = structs.replace(ref, canary=canary(weights, SHORT_CANARY_TOKENS))
    assert asyncio.run(sync.load(ref, weights)).canary_error <= TOLERANCE
    for name in ("model.embed_tokens.weight", SKIPPED, "model.layers.1.mlp.down_proj.weight"):
        wrong = {**weights, name: perturb(name, weights[name], SEED)}
        with pytest.raises(RpcError, match="canary mismatch after version 1"):
            asyncio.run(sync.load(ref, wrong))
        assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_missing_and_unexpected_parameters_are_reported_and_no_weight_changes() -> None:
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


def test_a_parameter_of_the_wrong_shape_is_reported() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    weights["model.norm.weight"] = weights["model.norm.weight"][:64]
    with pytest.raises(RpcError, match=r"model\.norm\.weight: float32 \[64\] given"):
        asyncio.run(sync.load(ref, weights))
    asyncio.run(engine.stop())


@pytest.mark.parametrize(
    ("held", "wanted", "exact", "needed"),
    [
        (HeldVersion(), (1, 0), False, True),
        (HeldVersion(1, 3), (1, 3), True, False),
        (HeldVersion(1, 4), (1, 3), False, False),
        (HeldVersion(1, 4), (1, 3), True, True),
        (HeldVersion(1, 4), (2, 2), False, True),
        (HeldVersion(2, 2), (1, 4), False, False),
    ],
)
def test_an_engine_loads_newer_versions_and_the_exact_one_that_is_requested(
    held: HeldVersion, wanted: tuple[int, int], exact: bool, needed: bool
) -> None:
    empty = Canary(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32), tolerance=TOLERANCE)
    ref = weights_ref(wanted[0], wanted[1], empty, drill_seed=SEED, nbytes=0)
    engine = TransformersEngine(model=MODEL, dtype="float32", threads=1, deterministic=True, passes=FASTEST)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    sync.holds = held
    assert sync.needs(ref, exact=exact) is needed


@pytest.mark.parametrize(("length", "margin"), [(CANARY_TOKENS, 50), (SHORT_CANARY_TOKENS, 9)])
def test_a_stale_value_of_any_parameter_is_revealed_by_the_drill(length: int, margin: int) -> None:
    start = base()
    drill = {name: perturb(name, values, SEED) for name, values in start.items()}
    wanted = canary(drill, length)
    for name in start:
        kept = canary({**drill, name: start[name]}, length)
        assert np.abs(kept.logprobs - wanted.logprobs).max() > margin * TOLERANCE, name


def test_weights_in_host_memory_are_adopted_without_a_copy_and_tied_ones_stay_tied() -> None:
    engine = started(deterministic=False)
    ref, weights = version(3)

    async def scenario() -> Mapping[str, Array]:
        await WeightsSync(engine, "rollout/0", lambda topic, values: None).load(ref, weights)
        return await engine.base_weights()

    held = asyncio.run(scenario())
    assert held.keys() == weights.keys()  # Untied weights would add a name.
    assert all(np.shares_memory(held[name], weights[name]) for name in weights)
    asyncio.run(engine.stop())


def test_adopted_weights_are_verified_without_reading_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> NoReturn:
        raise AssertionError("bits were read")

    monkeypatch.setattr(transformers_engine, "digest_whole", read)
    monkeypatch.setattr(torch, "equal", read)
    engine = started(deterministic=False)
    weights = base()

    async def scenario() -> None:
        await engine.set_weights(weights)
        await engine.verify(weights, {})
        await engine.stop()

    asyncio.run(scenario())


# ---- verification of single weights by the embedded engine, without a canary


class Altered(TransformersEngine):
    """An engine that replaces the weights it is given with those in `altered`."""

    altered: Mapping[str, Array] = {}

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        await super().set_weights({**weights, **self.altered})


def flipped(values: Array) -> Array:
    """Return a copy with one bit flipped."""
    copy = values.copy()
    copy.reshape(-1).view(np.uint8)[-2] ^= 1
    return copy


@functools.cache
def base_in(dtype: str) -> dict[str, Array]:
    return {name: to_numpy(value).copy() for name, value in named_weights(load_model(MODEL, dtype)).items()}


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [
        ("bfloat16", False),
        ("float32", True),
        pytest.param("bfloat16", True, marks=pytest.mark.long),
        pytest.param("float32", False, marks=pytest.mark.long),
        pytest.param("float16", False, marks=pytest.mark.long),
        pytest.param("float16", True, marks=pytest.mark.long),
    ],
)
def test_each_weight_whose_bits_differ_in_the_engine_is_reported(dtype: str, deterministic: bool) -> None:
    engine = Altered(model=MODEL, dtype=dtype, threads=1, deterministic=deterministic)
    old = base_in(dtype)
    new = {name: perturb(name, values, SEED) for name, values in old.items()}
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, values in new.items():
        shapes.setdefault(values.shape, []).append(name)

    async def refused(altered: Mapping[str, Array], names: Sequence[str]) -> None:
        engine.altered = altered
        await engine.set_weights(new)
        with pytest.raises(WeightsMismatch, match=f"^{len(names)} of 46 .*bits: {', '.join(sorted(names))}$"):
            await engine.verify(new, {})

    async def scenario() -> None:
        await engine.start()
        await engine.set_weights(new)
        await engine.verify(new, {})
        for name in new:
            alike = shapes[new[name].shape]
            other = alike[alike.index(name) - 1]
            await refused({name: old[name]}, [name])
            await refused({name: flipped(new[name])}, [name])
            if other != name:
                await refused({name: new[other], other: new[name]}, [name, other])
        await engine.stop()

    asyncio.run(scenario())


def test_a_version_that_differs_from_the_announced_one_by_a_bit_is_refused() -> None:
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1, announced=True)
    asyncio.run(sync.load(ref, weights))
    name = "model.layers.3.self_attn.q_norm.weight"
    with pytest.raises(RpcError, match=f"does not hold version 1 .*: 1 of 46 .* bits: {name};"):
        asyncio.run(sync.load(ref, {**weights, name: flipped(weights[name])}))
    assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_a_version_with_a_wrong_number_of_digests_is_refused() -> None:
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1, announced=True)
    fewer = msgspec.structs.replace(ref.canary, digests=ref.canary.digests[:-1])
    with pytest.raises(RpcError, match=r"does not hold version 1 .*: 45 digests announced for 46 parameters"):
        asyncio.run(sync.load(msgspec.structs.replace(ref, canary=fewer), weights))
    assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


class Sent:
    """Weights that the trainer put into the engine itself, so the rollout has no copy to compare them with."""

    entry = LoadEntry.SET

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights

    async def begin(self) -> None: ...

    def decline(self) -> None: ...

    async def load(self, engine: Engine) -> LoadedWeights:
        await engine.set_weights(self._weights)
        return LoadedWeights("transfer", self.entry, WeightSet.of(self._weights))


def test_a_version_that_was_sent_without_digests_is_refused() -> None:
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1, announced=True)
    asyncio.run(sync.load(ref, weights))
    ref, weights = version(2, announced=True)
    asyncio.run(sync.load(ref, Sent(weights)))
    ref, weights = version(3)
    with pytest.raises(RpcError, match="sent them by transfer and announced no digests"):
        asyncio.run(sync.load(ref, Sent(weights)))
    assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_an_engine_refuses_a_kind_of_version_that_it_cannot_load_and_keeps_its_version() -> None:
    engine = started(deterministic=False)
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    asyncio.run(sync.load(ref, weights))
    ref, weights = version(2)
    adapter = msgspec.structs.replace(ref, kind=WeightsKind.ADAPTER, base="weights/1/0")
    swaps = engine.swaps
    with pytest.raises(RpcError, match=r"version 2 of lineage 1 is of kind adapter over weights/1/0; .* only full"):
        asyncio.run(sync.load(adapter, weights))
    assert (sync.holds, engine.swaps) == (HeldVersion(1, 1), swaps)
    asyncio.run(engine.stop())


def test_a_head_that_is_no_longer_tied_to_its_embedding_is_reported() -> None:
    engine = started(deterministic=False)
    weights = base()

    async def scenario() -> None:
        await engine.set_weights(weights)
        head = engine._model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        with pytest.raises(WeightsMismatch, match=r"have wrong bits: lm_head\.weight"):
            await engine.verify(weights, {})

    asyncio.run(scenario())
    asyncio.run(engine.stop())


def test_a_tied_head_that_reads_the_embedding_with_other_strides_is_reported() -> None:
    engine = started(deterministic=False)
    weights = base()

    async def scenario() -> None:
        await engine.set_weights(weights)
        head, embedding = engine._model.lm_head, engine._model.get_input_embeddings().weight.detach()
        rows, columns = embedding.shape
        crossed = torch.as_strided(embedding, (rows, columns), (1, rows))  # the same bytes in another order
        head.weight = torch.nn.Parameter(crossed, requires_grad=False)
        with pytest.raises(WeightsMismatch, match=r"have wrong bits: lm_head\.weight|model\.embed_tokens\.weight"):
            await engine.verify(weights, {})

    asyncio.run(scenario())
    asyncio.run(engine.stop())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_parameter_that_reads_the_given_bytes_with_other_strides_is_reported(name: str) -> None:
    engine = started(deterministic=False)
    weights = base()

    async def scenario() -> None:
        await engine.set_weights(weights)
        parameter = engine._model.get_parameter(name)
        rows, columns = parameter.shape
        parameter.data = torch.as_strided(parameter.data, (rows, columns), (1, rows))
        with pytest.raises(WeightsMismatch, match=f"1 of 46 parameters have wrong bits: {name}"):
            await engine.verify(weights, {})

    asyncio.run(scenario())
    asyncio.run(engine.stop())


# ---- the canary


class Scored(TransformersEngine):
    """An engine whose log-probs are off by `wrong`."""

    wrong: Array = np.zeros(1, np.float32)

    async def score(self, token_ids: Array) -> Array:
        wrong: Array = await super().score(token_ids) + self.wrong
        return wrong


def judged(sync: WeightsSync, engine: Scored, ref: WeightsRef, weights: Mapping[str, Array], wrong: Array) -> float:
    engine.wrong = wrong
    return asyncio.run(sync.load(ref, weights)).tolerance


def scored() -> Scored:
    engine = started(Scored)
    assert isinstance(engine, Scored)
    return engine


def test_an_engine_with_the_right_weights_and_a_wrong_computation_fails_the_canary() -> None:
    engine = scored()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    none = np.zeros(CANARY_TOKENS - 1, np.float32)
    assert judged(sync, engine, ref, weights, none) == TOLERANCE
    for place, by in ((0, 2 * TOLERANCE), (30, -2 * TOLERANCE), (7, np.nan), (3, np.inf)):
        wrong = none.copy()
        wrong[place] = by
        with pytest.raises(RpcError, match="canary mismatch after version 1"):
            judged(sync, engine, ref, weights, wrong)
        assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_a_nan_in_the_trainers_canary_is_a_mismatch() -> None:
    engine = started()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    ref, weights = version(1)
    logprobs = ref.canary.logprobs.copy()
    logprobs[4] = np.nan
    for quantile, floor in ((1.0, 0.0), (MEDIAN, FLOOR["bfloat16"])):
        broken = structs.replace(ref.canary, logprobs=logprobs, quantile=quantile, floor=floor)
        with pytest.raises(RpcError, match=r"canary mismatch after version 1 .* error nan"):
            asyncio.run(sync.load(structs.replace(ref, canary=broken), weights))
        assert sync.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_an_entry_counts_as_drilled_only_after_the_canary_of_the_drill_matched() -> None:
    engine, told = scored(), list[str]()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: told.append(topic))
    ref, weights = version(1)
    with pytest.raises(RpcError, match="canary mismatch after the start-up drill"):
        judged(sync, engine, ref, weights, np.full(1, 1.0, np.float32))
    assert not sync.is_drilled(LoadEntry.SET)
    assert told == []
    asyncio.run(engine.stop())
    engine = scored()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: told.append(topic))
    judged(sync, engine, ref, weights, np.zeros(1, np.float32))
    assert sync.is_drilled(LoadEntry.SET)
    assert told == ["drill", "weights"]
    asyncio.run(engine.stop())


def test_the_tolerance_of_16_bit_weights_is_calibrated_between_its_floor_and_its_limit() -> None:
    """The tolerance is four times the larger of two median errors: the drill's and the first version's. Outliers and
    later errors do not change the tolerance."""
    ref, weights = version(1)
    floor, limit = 0.01, 0.5
    ref = structs.replace(
        ref,
        canary=structs.replace(ref.canary, tolerance=limit, quantile=0.5, floor=floor),
        drill=structs.replace(ref.drill, tolerance=limit, quantile=0.5, floor=floor),
    )
    noise, outlier = np.full(CANARY_TOKENS - 1, 0.02, np.float32), np.zeros(CANARY_TOKENS - 1, np.float32)
    outlier[:10] = 7.0
    engine = scored()
    sync = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    assert judged(sync, engine, ref, weights, noise + outlier) == pytest.approx(0.08, rel=0.01)
    assert judged(sync, engine, ref, weights, 3 * noise) == pytest.approx(0.08, rel=0.01)
    with pytest.raises(RpcError, match=r"error 0\.1 exceeds the tolerance 0\.08"):
        judged(sync, engine, ref, weights, 5 * noise)
    asyncio.run(engine.stop())
    engine = scored()
    exact = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    assert judged(exact, engine, ref, weights, np.zeros(1, np.float32)) == floor
    with pytest.raises(RpcError, match=r"exceeds the tolerance 0\.01"):
        judged(exact, engine, ref, weights, np.full(1, 1.5 * floor, np.float32))
    asyncio.run(engine.stop())
    engine = scored()
    broken = WeightsSync(engine, "rollout/0", lambda topic, values: None)
    with pytest.raises(RpcError, match=r"cannot be calibrated: .* differ by 0\.2 .* the drill allows only 0\.5"):
        judged(broken, engine, ref, weights, 10 * noise)
    assert broken.holds == HeldVersion()
    asyncio.run(engine.stop())


def test_production_tolerances_have_fixed_values() -> None:
    """A looser tolerance would miss defects without failing any other test."""
    assert TRAINERS_TOLERANCE == 1e-4
    assert FLOOR == {"bfloat16": 0.02, "float16": 0.003}
    assert (MEDIAN, SIGNAL, CALIBRATION) == (0.5, 2.0, 4.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_the_trainers_canary_has_the_production_tolerance_and_its_drill_reveals_stale_weights(
    dtype: str, tmp_path: Path
) -> None:
    """Log-probs alone reveal all 46 weights in float32 and float16, and all but 4 in bfloat16. Digests reveal all."""
    options = BackendOptions(max_tokens=4096, threads=1, device="cpu", scratch=tmp_path, passes=FASTEST)
    backend = TorchBackend(MODEL, dtype, options, Layout(1).place(0))
    canaries = Canaries(backend, MODEL, dtype, SEED, with_digests=True)
    canary, drill = canaries.current(), canaries.drill
    assert drill is not None
    old = base_in(dtype)
    factors = noise_factors(old, canaries.drill_factors)
    noisy = {name: perturb(name, values, canaries.drill_seed, factors[name]) for name, values in old.items()}
    assert drill.digests == [as_int(digest_whole(to_torch(noisy[name]))) for name in sorted(noisy)]
    if dtype == "float32":
        assert (canary.tolerance, canary.floor, canary.quantile) == (1e-4, 0.0, 1.0)
    else:
        assert (canary.floor, canary.quantile) == (FLOOR[dtype], 0.5)
        assert 4 * canary.floor < canary.tolerance < 0.5
    engine = TransformersEngine(model=MODEL, dtype=dtype, threads=1, deterministic=False, passes=FASTEST)
    limit = canary.floor or canary.tolerance

    async def missed() -> list[str]:
        found = []
        await engine.start()
        await engine.set_weights(noisy)
        assert canary_error(drill.logprobs, await engine.score(drill.token_ids), drill.quantile) <= limit
        for name in noisy:
            await engine.set_weights({**noisy, name: old[name]})
            if canary_error(drill.logprobs, await engine.score(drill.token_ids), drill.quantile) <= limit:
                found.append(name)
        await engine.stop()
        return found

    assert len(asyncio.run(missed())) <= (4 if dtype == "bfloat16" else 0)
