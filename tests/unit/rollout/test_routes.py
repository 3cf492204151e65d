"""Tests the routes that the embedded engine records, and what replaying them in the trainer's passes changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.rollout.engine import Generation, Prompt, WeightsMismatch
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.sampling.trajectory import BlockVersions, answers_of, single_turns
from shared.model.load import allow, load_model
from shared.model.logprobs import Routing, Scores, TokenScorer
from shared.model.routing import attach, routers_of
from shared.ranks.layout import Layout
from shared.rpc.errors import BadInput
from shared.stages import ROUTES
from shared.tensors_torch import to_torch
from shared.topology.models import Head
from shared.topology.passes import FASTEST, Passes
from shared.weights.digests import as_int, digest_whole
from tests.unit.policy_trainer.training import adamw
from tests.unit.rollout.rollout_engine import MODELS, generate, sampling
from tests.unit.shared.test_routing import mixture as make_mixture
from tests.unit.tiny_models import ragged

pytestmark = pytest.mark.slow
TINY = MODELS / "tiny-moe"
PROMPTS = [Prompt(f"train/0/{number}", [4 + number, 14, 5, 15][: 2 + number % 3]) for number in range(6)]
SCALE = 6.0
"""Factor for the weights of the random mixture, whose log-probs would otherwise hardly depend on its experts."""
OFF = 0.1
"""A token is off if its log-prob differs by more nats than this."""


def engine(model: Path, dtype: str, *, deterministic: bool = False, passes: Passes = FASTEST) -> TransformersEngine:
    made = TransformersEngine(
        model=model, dtype=dtype, threads=1, deterministic=deterministic, passes=passes, routes=True
    )
    asyncio.run(made.start())
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 8 layers with 32 experts each, of which a token uses four."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=61,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def flat_of(
    made: TransformersEngine, prompts: list[Prompt], tokens: int, samples: int = 4
) -> tuple[dict[str, Array], Array]:
    """Sample, and return the flat arrays of all sequences and their log-probs [T]."""
    groups = answers_of(generate(made, prompts, sampling(samples, max_new_tokens=tokens)), BlockVersions(0, 0))
    rows = [
        sequence.by_key()
        for prompt, group in zip(prompts, groups, strict=True)
        for (sequence,) in single_turns(prompt.token_ids, group)
    ]
    flat = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    flat["lengths"] = np.array([len(row["token_ids"]) for row in rows], np.int32)
    return flat, flat["rollout_logprobs"]


@torch.no_grad()
def scored(model: torch.nn.Module, flat: dict[str, Array], given: Array | None) -> tuple[Array, Array, float]:
    """Return the trainer's log-probs, float [T], its routes, and the share of given experts that it rejects."""
    routers = routers_of(model)
    assert routers is not None
    record = np.zeros((len(flat["token_ids"]), routers.width), np.uint8)
    routing, found, strayed = Routing(given, record), np.zeros(len(record)), 0.0
    scorer = TokenScorer(model)
    arrays = flat["token_ids"], flat["lengths"], flat["loss_mask"]
    for batch in scorer.plan(*arrays, 1.0, 4096, None, given):
        scores = scorer.score(batch, 1.0, "none", None, routing)
        found[scores.tokens.numpy()] = scores.outputs.float().numpy()
        strayed += 0.0 if scores.routed is None else float(scores.routed.strayed)
    return found, record, strayed / flat["loss_mask"].sum()


def trainer(folder: Path, dtype: str) -> torch.nn.Module:
    model = load_model(folder, dtype)
    allow(model, FASTEST)
    assert attach(model) == ""
    return model


@pytest.fixture
def stopped() -> Iterator[list[TransformersEngine]]:
    engines: list[TransformersEngine] = []
    yield engines
    for each in engines:
        asyncio.run(each.stop())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_engine_records_the_routes_with_which_each_token_was_computed(
    stopped: list[TransformersEngine], *, deterministic: bool
) -> None:
    """In float32, and far from ties, the trainer takes the same routes. Rows end at different times."""
    made = engine(TINY, "float32", deterministic=deterministic)
    stopped.append(made)
    flat, sampled = flat_of(made, PROMPTS, 24)
    assert len(set(flat["lengths"].tolist())) > 3
    ends = np.cumsum(flat["lengths"]) - 1
    assert not flat[ROUTES][ends].any()
    model = trainer(TINY, "float32")
    found, own, _ = scored(model, flat, None)
    assert np.abs(found - sampled)[flat["loss_mask"] == 1].max() < 1e-4
    inputs = np.ones(len(own), bool)
    inputs[ends] = False
    assert np.array_equal(np.sort(own[inputs].reshape(-1, 2, 2)), np.sort(flat[ROUTES][inputs].reshape(-1, 2, 2)))
    _, _, strayed = scored(model, flat, flat[ROUTES])
    assert strayed == 0


def test_replaying_the_engines_routes_leaves_no_token_far_off(mixture: Path, stopped: list[TransformersEngine]) -> None:
    made = engine(mixture, "bfloat16")
    stopped.append(made)
    flat, sampled = flat_of(made, PROMPTS, 40, 6)
    model = trainer(mixture, "bfloat16")
    trained = flat["loss_mask"] == 1
    own, _, _ = scored(model, flat, None)
    replayed, taken, strayed = scored(model, flat, flat[ROUTES])
    off = [float((np.abs(found - sampled)[trained] > OFF).mean()) for found in (own, replayed)]
    means = [float(np.abs(found - sampled)[trained].mean()) for found in (own, replayed)]
    print(f"{trained.sum()} tokens: share off {off}, mean difference {means}, routes strayed {strayed:.4f}")
    assert off[0] > 0
    assert off[1] == 0
    assert means[1] < means[0]
    assert 0 < strayed < 0.1
    inputs = taken.any(1)
    assert np.array_equal(taken[inputs], flat[ROUTES][inputs])


def test_tokens_keep_the_routes_with_which_they_were_sampled_when_weights_are_swapped(
    stopped: list[TransformersEngine],
) -> None:
    """The routers of the second version prefer other experts. Tokens sampled before the swap keep their routes."""
    made = engine(TINY, "float32")
    stopped.append(made)
    weights = asyncio.run(made.base_weights())
    turned = {name: -value if name.endswith("gate.weight") else value for name, value in weights.items()}
    endless = replace(sampling(2, max_new_tokens=200), ends=False)
    (before,) = generate(made, PROMPTS[:1], endless)
    start = made.progress

    async def swapped() -> list[list[Generation]]:
        """Swap the weights between two steps of the call."""
        call = asyncio.create_task(made.generate(PROMPTS[:1], endless, threading.Event()))
        while made.progress < start + 20:
            await asyncio.sleep(0)
        await made.pause()
        await made.set_weights(turned)
        await made.resume()
        return await call

    given = len(PROMPTS[0].token_ids)
    for one, other in zip(before, asyncio.run(swapped())[0], strict=True):
        assert one.routes is not None
        assert other.routes is not None
        old = int((other.swaps == other.swaps[0]).sum())
        assert 0 < old < len(other.token_ids)
        # The last of these tokens was an input to the new weights.
        assert np.array_equal(one.routes[: given + old - 1], other.routes[: given + old - 1])
        assert (one.routes[given + old :] != other.routes[given + old :]).any(1).mean() > 0.5


def test_an_engine_without_a_cache_cannot_record_routes() -> None:
    made = TransformersEngine(model=TINY, dtype="float32", threads=1, deterministic=False, passes=Passes(), routes=True)
    with pytest.raises(
        BadInput, match=r"router_replay: rollout cannot record its routes: with passes\.sequences single"
    ):
        asyncio.run(made.start())


def test_a_dense_model_cannot_record_routes() -> None:
    dense = MODELS / "tiny-qwen3"
    made = TransformersEngine(model=dense, dtype="float32", threads=1, deterministic=False, passes=FASTEST, routes=True)
    with pytest.raises(BadInput, match="it has no routers"):
        asyncio.run(made.start())


def test_a_correction_bias_is_a_weight_that_is_sent_and_proved(
    tmp_path: Path, stopped: list[TransformersEngine]
) -> None:
    """DeepSeek-V3 and GLM-4-MoE keep the bias of their routers in a buffer."""
    model = make_mixture("glm4_moe")
    model.save_pretrained(tmp_path)
    made = engine(tmp_path, "float32")
    stopped.append(made)
    weights = asyncio.run(made.base_weights())
    (name,) = (name for name in weights if name.endswith("gate.e_score_correction_bias"))
    assert np.array_equal(weights[name], dict(model.named_buffers())[name].numpy())
    changed = {key: value.copy() for key, value in weights.items()} | {name: -weights[name]}
    asyncio.run(made.set_weights(changed))
    announced = {key: as_int(digest_whole(to_torch(value))) for key, value in changed.items()}
    asyncio.run(made.verify(changed, announced))
    with pytest.raises(WeightsMismatch, match=r"1 of .* parameters have wrong bits: .*e_score_correction_bias"):
        asyncio.run(made.verify({}, announced | {name: announced[name] ^ 1}))


def test_training_leaves_a_correction_bias_as_it_is(tmp_path: Path) -> None:
    def load(_: Path, name: str, head: Head) -> torch.nn.Module:
        made: torch.nn.Module = make_mixture("glm4_moe")
        return made

    options = BackendOptions(max_tokens=4096, threads=1, device="cpu", scratch=tmp_path / "scratch", passes=FASTEST)
    backend = TorchBackend(tmp_path, "float32", options, Layout(1).place(0), load=load, load_shapes=load)
    before = backend.state().weights
    (bias,) = (name for name in before if name.endswith("e_score_correction_bias"))
    assert before[bias].any()

    def loss(scores: Scores, _: Any) -> Any:
        return scores.outputs.sum(), {}

    backend.forward_backward(Sequences(*ragged()), 1.0, loss, entropy="none")
    assert backend.step(1, adamw(lr=1e-2)) > 0
    after = backend.published()
    assert torch.equal(after[bias], before[bias])
    gate = bias.replace("e_score_correction_bias", "weight")
    assert not torch.equal(after[gate], before[gate])
