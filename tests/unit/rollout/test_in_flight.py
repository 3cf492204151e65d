"""Tests the replacement of weights during a block: the version that samples each token, and the state that the block
keeps."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from proto.tensors import Array
from services.rollout.engine import Generation, Prompt
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.sampling.trajectory import BlockVersions, answers_of, single_turns
from shared.model.load import load_model, named_weights
from shared.tensors_torch import to_numpy, to_torch
from shared.weights.drill import perturb
from tests.unit.rollout.rollout_engine import MODEL, engine, sampling

pytestmark = pytest.mark.slow

TEMPERATURE = 8.0  # The distribution is nearly uniform, so EOS is rare and the block is long.
NEW_TOKENS = 96


def weights_of(step: int) -> dict[str, Array]:
    base = {name: to_numpy(each).copy() for name, each in named_weights(load_model(MODEL, "float32")).items()}
    return {name: perturb(name, values, step) for name, values in base.items()} if step else base


def model_of(step: int) -> Any:
    model = load_model(MODEL, "float32").eval().requires_grad_(False)
    weights = weights_of(step)
    for name, parameter in named_weights(model).items():
        parameter.copy_(to_torch(weights[name]))
    return model


def expected_logprobs(prompt: list[int], ids: list[int], swap: int, temperature: float) -> Array:
    """Return log-probs for `ids`. From `swap` on, version 1 samples with the keys and values of version 0."""
    old, new = model_of(0), model_of(1)
    # Pass t reads token t - 1, so version 0 has read the prompt and all tokens before swap - 1.
    read = prompt + ids[: swap - 1]
    with torch.inference_mode():
        before = old(input_ids=torch.tensor([read]), use_cache=True)
        after = new(input_ids=torch.tensor([ids[swap - 1 : -1]]), past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]]) / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


async def sampled_across_an_update(made: TransformersEngine, prompts: list[Prompt]) -> list[list[Generation]]:
    """Pause a block after some steps, set version 1, score a prompt, and resume."""
    chosen = sampling(samples=4, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)
    block = asyncio.create_task(made.generate(prompts, chosen, threading.Event()))
    begun = made.progress
    while made.progress < begun + 12:
        await asyncio.sleep(0)
    await made.pause()
    await made.set_weights(weights_of(1))
    scores = await made.score(np.array(prompts[0].token_ids, np.int32))
    assert len(scores) == len(prompts[0].token_ids) - 1
    assert not block.done()
    await made.resume()
    return await block


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [Prompt(f"train/0/{i}", tokenizer(text)["input_ids"]) for i, text in enumerate(["47+85=", "1+2="])]


@pytest.mark.parametrize("deterministic", [True, False], ids=["block", "table"])
def test_a_running_block_keeps_its_tokens_and_cache_and_continues_under_new_weights(
    prompts: list[Prompt], deterministic: bool
) -> None:
    made = engine(deterministic=deterministic)
    groups = asyncio.run(sampled_across_an_update(made, prompts))
    asyncio.run(made.stop())
    crossed = 0
    for prompt, group in zip(prompts, groups, strict=True):
        for each in group:
            assert len(each.swaps) == len(each.token_ids)
            swap = int((each.swaps == 0).sum())
            assert each.swaps.tolist() == [0] * swap + [1] * (len(each.swaps) - swap)
            if not 1 < swap < len(each.swaps):
                continue
            crossed += 1
            expected = expected_logprobs(list(prompt.token_ids), each.token_ids.tolist(), swap, TEMPERATURE)
            assert np.abs(expected - each.logprobs).max() < 1e-4
    assert crossed > 0


def test_every_token_carries_the_version_that_sampled_it() -> None:
    versions = BlockVersions(7, 3)
    versions.replaced(8, 4)
    versions.replaced(10, 5)
    swaps = np.array([3, 3, 4, 5], np.int32)
    first = Generation(np.array([5, 6, 7, 2], np.int32), np.zeros(4, np.float32), "stop", swaps)
    second = Generation(np.array([5, 2], np.int32), np.zeros(2, np.float32), "stop", swaps[2:])
    (answers,) = answers_of([[first, second]], versions)
    samples = single_turns([3, 4], answers)
    assert [sequence.versions.tolist() for (sequence,) in samples] == [[-1, -1, 7, 7, 8, 10], [-1, -1, 8, 10]]


def test_a_block_counts_swaps_since_the_engine_started(prompts: list[Prompt]) -> None:
    made = engine()
    asyncio.run(made.set_weights(weights_of(1)))
    groups = asyncio.run(made.generate(prompts, sampling(), threading.Event()))
    asyncio.run(made.stop())
    assert {int(swaps) for group in groups for each in group for swaps in each.swaps} == {made.swaps} == {1}


@pytest.mark.parametrize("swaps", [1, 4], ids=["set before", "not proved"])
def test_a_token_from_weights_without_a_version_is_refused(swaps: int) -> None:
    versions = BlockVersions(7, 2)
    versions.replaced(8, 3)
    with pytest.raises(ValueError, match=f"after {swaps} to {swaps} swaps"):
        versions.of(np.array([swaps], np.int32))


def test_weights_are_set_and_tokens_are_scored_while_paused_without_a_block() -> None:
    async def scenario(made: TransformersEngine) -> Array:
        await made.pause()
        await made.set_weights(weights_of(1))
        scores = await made.score(np.arange(3, 20, dtype=np.int32))
        await made.resume()
        return scores

    made = engine()
    first = asyncio.run(made.score(np.arange(3, 20, dtype=np.int32)))
    second = asyncio.run(scenario(made))
    asyncio.run(made.stop())
    assert np.abs(first - second).max() > 1e-3
