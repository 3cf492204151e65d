"""Checks that the embedded engine computes with exactly the adapter that the trainer has published, over its base."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from proto.messages import WeightsKind
from proto.tensors import Array
from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.weights.drill import make_drill
from services.reference.frozen import FrozenTorch
from services.reference.scorer import FrozenScorer
from services.rollout.engine import WeightsMismatch
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights.sync import WeightsSync
from shared.colocation.devices import KV_CACHE, WEIGHTS
from shared.model.adapter import (
    AdapterStart,
    adapt,
    adapters_of,
    base_weights,
    first_adapters,
    is_adapted,
    scales_of,
    targets_of,
    trained_weights,
)
from shared.model.load import load_model, named_weights
from shared.rpc.errors import BadInput, RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from shared.weights.digests import digests_of
from shared.weights.drill import canary_error
from shared.weights.weight_set import WeightSet
from tests.unit.rollout.adapter_trainer import SEED, START, AdapterTrainer
from tests.unit.rollout.rollout_engine import MODEL

pytestmark = pytest.mark.slow

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def trainer_in(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda dtype: AdapterTrainer(dtype, tmp_path_factory.mktemp(dtype)))


def started(dtype: str, *, deterministic: bool = True, adapter: AdapterStart | None = START) -> TransformersEngine:
    made = TransformersEngine(
        model=MODEL, dtype=dtype, threads=1, deterministic=deterministic, passes=FASTEST, adapter=adapter
    )
    asyncio.run(made.start())
    return made


def sync_of(engine: TransformersEngine) -> WeightsSync:
    return WeightsSync(engine, "rollout/0", lambda topic, values: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_versions_are_drilled_loaded_and_proved_and_the_canary_moves(
    dtype: str, deterministic: bool, trainer_in: Any
) -> None:
    trainer = trainer_in(dtype)
    (first, tensors), (second, _) = trainer.first, trainer.second
    assert first.kind == WeightsKind.ADAPTER
    assert len(tensors) == 56
    tolerance = first.canary.floor or first.canary.tolerance
    moved = canary_error(first.canary.logprobs, second.canary.logprobs, second.canary.quantile)
    assert moved > 4 * tolerance
    # An untrained B is zero, and the drill changes it.
    assert canary_error(first.canary.logprobs, first.drill.logprobs[: len(first.canary.logprobs)], 1.0) > tolerance
    engine = started(dtype, deterministic=deterministic)
    sync = sync_of(engine)
    for ref, weights in (trainer.first, trainer.second):
        report = asyncio.run(sync.load(ref, weights))
        assert report.canary_error <= tolerance
        assert report.parameters == 56


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_left_out_swapped_or_changed_by_a_bit_is_named(dtype: str, trainer_in: Any) -> None:
    ref, weights = trainer_in(dtype).second
    old = trainer_in(dtype).first[1]
    announced = WeightSet(WeightSet.of(weights).parameters, digests=ref.canary.digests)
    engine = started(dtype)

    def verified(set_: Mapping[str, Array]) -> None:
        asyncio.run(engine.set_weights(set_))
        asyncio.run(engine.verify({}, announced.digest_of))

    verified(weights)
    for name in weights:
        with pytest.raises(WeightsMismatch, match=f"missing {name}"):
            asyncio.run(engine.set_weights({other: weights[other] for other in weights if other != name}))
        with pytest.raises(WeightsMismatch, match=f"^1 of 56 parameters have wrong bits: {name}$"):
            verified({**weights, name: old[name]})
        flipped = to_torch(weights[name]).clone()
        bits = flipped.view(torch.uint8).reshape(-1)
        bits[len(bits) // 2] ^= 1
        with pytest.raises(WeightsMismatch, match=f"^1 of 56 parameters have wrong bits: {name}$"):
            verified({**weights, name: to_numpy(flipped)})
        twin = next(other for other in weights if other != name and weights[other].shape == weights[name].shape)
        with pytest.raises(WeightsMismatch, match=r"^2 of 56 parameters have wrong bits"):
            verified({**weights, name: weights[twin], twin: weights[name]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["the scale is forgotten", "the adapter is not applied"])
def test_an_engine_that_computes_otherwise_with_the_right_bits_must_not_sample(
    dtype: str, fault: str, trainer_in: Any
) -> None:
    engine = started(dtype)
    for layer in adapters_of(engine._model).values():
        if "scale" in fault:
            layer.scale = 1.0 / START.lora.scale
        else:
            layer.applies = False
    with pytest.raises(RpcError, match="canary mismatch after the start-up drill"):
        asyncio.run(sync_of(engine).load(*trainer_in(dtype).second))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0), ("bfloat16", 20)])
def test_log_probs_alone_tell_that_a_single_layer_is_not_applied(dtype: str, most: int, trainer_in: Any) -> None:
    """In 16 bits the rounding of all other layers hides some of the 28 layers, on some machines more than on others.
    Their bits are proved by digests."""
    engine, missed = started(dtype), 0
    for layer in adapters_of(engine._model).values():
        layer.applies = False
        with contextlib.suppress(RpcError):
            asyncio.run(sync_of(engine).load(*trainer_in(dtype).second))
            missed += 1
        layer.applies = True
    assert missed <= most


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_base_that_differs_by_one_bit_is_named_before_anything_is_sampled(dtype: str, trainer_in: Any) -> None:
    ref, weights = trainer_in(dtype).second
    engine = started(dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    base_weights(engine._model)[name].view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(RpcError, match=f"does not hold the weights under the adapter.*1 of 46 .* wrong bits: {name};"):
        asyncio.run(sync_of(engine).load(ref, weights))
    engine = started(dtype)
    with pytest.raises(RpcError, match="45 digests announced for 46 parameters"):
        asyncio.run(sync_of(engine).load(structs.replace(ref, base_digests=ref.base_digests[1:]), weights))


def test_a_base_is_loaded_and_proved_again_after_a_sleep(trainer_in: Any) -> None:
    ref, weights = trainer_in("float32").second
    engine = started("float32", deterministic=False)
    sync = sync_of(engine)
    asyncio.run(sync.load(ref, weights))

    async def sleep() -> None:
        sync.forget()
        await engine.sleep()
        await engine.wake(frozenset({WEIGHTS}))

    asyncio.run(sleep())
    assert asyncio.run(sync.load(ref, weights)).canary_error <= ref.canary.tolerance
    asyncio.run(sleep())
    base_weights(engine._model)["model.norm.weight"][0] += 1
    with pytest.raises(RpcError, match=r"wrong bits: model\.norm\.weight"):
        asyncio.run(sync.load(ref, weights))
    asyncio.run(engine.wake(frozenset({KV_CACHE})))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_refreshed_reference_takes_adapters_as_versions(dtype: str, trainer_in: Any) -> None:
    scorer = FrozenScorer(
        lambda: FrozenTorch(MODEL, dtype, 4096, passes=FASTEST, adapter=START), source=MODEL, threads=1, temperature=1.0
    )
    asyncio.run(scorer.start())
    ref, weights = trainer_in(dtype).second
    assert asyncio.run(scorer.init_model(ref, weights)) <= (ref.canary.floor or ref.canary.tolerance)
    with pytest.raises(RpcError, match="are not those of model"):
        asyncio.run(scorer.init_model(ref, dict(list(weights.items())[1:])))
    scorer.stop()


def test_engines_refuse_versions_of_the_other_kind(trainer_in: Any) -> None:
    ref, weights = trainer_in("float32").second
    with pytest.raises(RpcError, match=r"is of kind adapter over .*; this engine loads only full"):
        asyncio.run(sync_of(started("float32", adapter=None)).load(ref, weights))
    with pytest.raises(RpcError, match="is of kind full over no base; this engine loads only adapter"):
        asyncio.run(sync_of(started("float32")).load(structs.replace(ref, kind="full", base=""), weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_adapter_changes_nothing_and_depends_only_on_seed_and_name(dtype: str) -> None:
    model = load_model(MODEL, dtype)
    names = set(named_weights(model))
    adapt(model, START)
    assert is_adapted(model)
    assert names == set(base_weights(model))
    assert not any(tensor.requires_grad for name, tensor in model.named_parameters() if name in names)
    tensors = trained_weights(model)
    again = first_adapters(dict(reversed(list(adapters_of(model).items()))), START)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    other = first_adapters(adapters_of(model), AdapterStart(START.lora, SEED + 1))
    for name, tensor in tensors.items():
        if name.endswith("lora_B"):
            assert not tensor.any()
            continue
        bound = 1 / np.sqrt(tensor.shape[1])
        assert 0.9 * bound < float(tensor.abs().max()) <= bound * (1 + 2**-8)
        assert abs(float(tensor.float().std()) * np.sqrt(3) / bound - 1) < 0.15
        assert not torch.equal(tensor, other[name])
    assert len(set(digests_of({name: tensors[name] for name in tensors if name.endswith("lora_A")}).values())) == 28
    assert set(scales_of(model).values()) == {7.0 / 4.0}


def test_targets_are_named_with_the_reason_why_a_layer_is_left() -> None:
    targets = partial(targets_of, load_model(MODEL, "float32"))
    chosen = targets(Lora(rank=4))
    assert len(chosen.chosen) == 28
    assert dict(chosen.left) == {"lm_head": "outside the decoder's layers; name it to adapt it"}
    some = targets(Lora(rank=4, target_modules=("q_proj", "model.layers.1.mlp.up_proj", "lm_head")))
    assert len(some.chosen) == 4 + 1 + 1
    assert some.left["model.layers.0.mlp.up_proj"] == "not named by target_modules"
    without = targets(Lora(rank=4, exclude_modules=("mlp.up_proj", "layers.0.self_attn.q_proj")))
    assert len(without.chosen) == 28 - 4 - 1
    assert without.left["model.layers.0.self_attn.q_proj"] == "named by exclude_modules"
    for lora, error in (
        (Lora(rank=4, target_modules=("query",)), r"target_modules: query is no linear layer of this model; it has .*"),
        (Lora(rank=4, exclude_modules=("embed_tokens",)), r"exclude_modules: embed_tokens is no linear layer"),
        (Lora(rank=4, target_modules=("q_proj",), exclude_modules=("q_proj",)), r"no linear layer gets an adapter"),
    ):
        with pytest.raises(BadInput, match=rf"^policy\.lora(\.|: ){error}"):
            targets(lora)


def test_an_adapter_that_the_model_does_not_read_is_refused_by_name() -> None:
    model = adapt(load_model(MODEL, "float32"), START, scaled=True)
    layer: Any = adapters_of(model)["model.layers.2.mlp.down_proj"]
    layer.forward = lambda rows: rows @ layer.weight.t()

    def text(_: torch.nn.Module) -> Sequences:
        mask = np.ones(20, np.uint8)
        mask[0] = 0
        return Sequences(np.arange(20, dtype=np.int32), np.array([20], np.int32), mask)

    with pytest.raises(BadInput, match=r"does not call model\.layers\.2\.mlp\.down_proj as a layer"):
        make_drill(lambda: model, text, SEED, tolerance=1e-4, with_digests=False)
