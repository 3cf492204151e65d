"""Tests that the embedded engine samples with several adapters and their base at the same time, each as if alone, in
the ways that direct requests may choose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from proto.tensors import Array
from services.rollout.engine import BASE, Generation, Prompt, SamplingParams
from services.rollout.engines.slots import truncated
from services.rollout.engines.transformers_engine import TransformersEngine
from shared.model.adapter import AdapterStart, adapt, adapters_off, trained_weights
from shared.model.load import load_model
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_torch
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from shared.weights.drill import perturb
from tests.unit.rollout.rollout_engine import MODEL

pytestmark = pytest.mark.slow

START = AdapterStart(Lora(rank=4, alpha=8.0), 3)
STRENGTH = 10.0
"""Factor of the noise in an adapter, so that versions differ by far more than rounding."""
PROMPT = list(range(5, 17))
HEAT = 0.7


class Served:
    """An engine that holds the base and two adapters, and a model that computes with any of them."""

    def __init__(self, *, deterministic: bool = False, steps: Sequence[int] = (1, 2)) -> None:
        self.engine = TransformersEngine(
            model=MODEL, dtype="float32", threads=1, deterministic=deterministic, passes=FASTEST, adapter=START, live=3
        )
        self.loop = asyncio.new_event_loop()
        self.run(self.engine.start())
        first = self.run(self.engine.base_weights())
        self._versions = {
            step: {name: perturb(name, values, 100 + step, STRENGTH) for name, values in first.items()}
            for step in range(1, 5)
        }
        self._model = adapt(load_model(MODEL, "float32"), START, scaled=True).eval()
        self.steps = {BASE: 0}
        for step in steps:
            self.engine.retain([swaps for swaps in self.steps if swaps != BASE])
            self.run(self.engine.set_weights(self.version(step)))
            self.steps[self.engine.swaps] = step

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def version(self, step: int) -> dict[str, Array]:
        return self._versions[step]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the base and the two versions."""
        return list(self.steps)

    @torch.inference_mode()
    def distributions(self, swaps: int, ids: list[int]) -> torch.Tensor:
        """Return the logits [T - 1, V] after each token but the last."""
        step = self.steps[swaps]
        for name, parameter in trained_weights(self._model).items():
            parameter.copy_(to_torch(self.version(step or 1)[name]))
        if step:
            return self._model(input_ids=torch.tensor([ids[:-1]])).logits[0]
        with adapters_off(self._model):
            return self._model(input_ids=torch.tensor([ids[:-1]])).logits[0]

    async def sample(self, swaps: int | None, *, cancel: threading.Event | None = None, **chosen: Any) -> Generation:
        (group,) = await self.group(swaps, cancel=cancel, **chosen)
        return group[0]

    async def group(self, swaps: int | None, *, cancel: threading.Event | None = None, **chosen: Any) -> Any:
        settings = {"samples": 1, "temperature": HEAT, "max_new_tokens": 40, "seed": 1, "ends": False} | chosen
        prompt = settings.pop("prompt", PROMPT)
        params = SamplingParams(**settings, swaps=swaps)
        return await self.engine.generate([Prompt("", prompt)], params, cancel or threading.Event())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.run(made.engine.stop())
    made.loop.close()


def error(served: Served, swaps: int, made: Generation, **limits: Any) -> float:
    """Return the largest difference between the sampled tokens' log-probs and those of one pass over the whole text."""
    ids = [*PROMPT, *made.token_ids.tolist()]
    logprobs = (served.distributions(swaps, ids)[len(PROMPT) - 1 :] / HEAT).log_softmax(-1)
    if limits:
        rows = len(logprobs)
        logprobs = truncated(logprobs, torch.tensor([limits["top_k"]] * rows), torch.tensor([limits["top_p"]] * rows))
    ours = logprobs.gather(1, torch.tensor(made.token_ids)[:, None].long())[:, 0].numpy()
    return float(np.abs(ours - made.logprobs).max())


def test_two_adapters_and_the_base_are_sampled_in_turn_and_each_is_right(served: Served) -> None:
    async def together() -> list[Generation]:
        return await asyncio.gather(*map(served.sample, served.numbers))

    made = served.run(together())
    for swaps, each in zip(served.numbers, made, strict=True):
        assert set(each.swaps.tolist()) == {swaps}
        assert error(served, swaps, each) <= 1e-5
        others = [other for other in served.numbers if other != swaps]
        assert min(error(served, other, each) for other in others) > 0.05


def test_a_seed_gives_the_same_tokens_whatever_else_is_sampled(served: Served) -> None:
    def sampled(swaps: int, seed: int) -> list[int]:
        ids: list[int] = served.run(served.sample(swaps, seed=seed, temperature=3.0)).token_ids.tolist()
        return ids

    alone = {swaps: sampled(swaps, 9) for swaps in served.numbers}

    async def crowded() -> dict[int, list[int]]:
        crowd = [
            asyncio.create_task(
                served.group(
                    served.numbers[number % 3],
                    seed=number,
                    samples=1 + number,
                    max_new_tokens=5 + 7 * number,
                    prompt=PROMPT[: 2 + number],
                )
            )
            for number in range(8)
        ]
        asked = {swaps: asyncio.create_task(served.sample(swaps, seed=9, temperature=3.0)) for swaps in served.numbers}
        await asyncio.gather(*crowd)
        return {swaps: (await task).token_ids.tolist() for swaps, task in asked.items()}

    assert served.run(crowded()) == alone
    assert len({tuple(ids) for ids in alone.values()}) == 3
    assert sampled(served.numbers[1], 10) != alone[served.numbers[1]]


@pytest.mark.parametrize("limits", [{"top_k": 3, "top_p": 1.0}, {"top_k": 0, "top_p": 0.6}, {"top_k": 5, "top_p": 0.8}])
def test_truncated_samples_have_the_log_probs_of_what_is_left(served: Served, limits: dict[str, Any]) -> None:
    swaps = served.numbers[2]

    async def beside_others() -> list[Any]:
        groups = [served.group(swaps, samples=4, **limits), served.group(swaps, samples=4, seed=1)]
        return [group for (group,) in await asyncio.gather(*groups)]

    left, whole = served.run(beside_others())
    assert max(error(served, swaps, each, **limits) for each in left) <= 1e-5
    assert max(error(served, swaps, each) for each in whole) <= 1e-5
    assert max(error(served, swaps, each) for each in left) > 0.05
    if limits["top_k"]:
        for each in left:
            ids = [*PROMPT, *each.token_ids.tolist()]
            likeliest = served.distributions(swaps, ids)[len(PROMPT) - 1 :].topk(limits["top_k"], -1).indices
            assert (likeliest == torch.tensor(each.token_ids)[:, None]).any(-1).all()


def test_stop_tokens_and_end_tokens_end_a_sample_only_if_they_are_asked_for(served: Served) -> None:
    swaps = served.numbers[1]
    free = served.run(served.sample(swaps, max_new_tokens=80, temperature=3.0))
    assert len(free.token_ids) == 80
    assert free.finish_reason == "length"
    ids = free.token_ids.tolist()
    stopped = served.run(served.sample(swaps, max_new_tokens=80, temperature=3.0, stop_ids=(ids[6], ids[9])))
    at = min(ids.index(ids[6]), ids.index(ids[9]))
    assert stopped.token_ids.tolist() == ids[: at + 1]
    assert stopped.finish_reason == "stop"
    (ended,) = served.run(served.group(swaps, samples=64, max_new_tokens=80, temperature=3.0, ends=True))
    (endless,) = served.run(served.group(swaps, samples=64, max_new_tokens=80, temperature=3.0, ends=False))
    assert min(len(each.token_ids) for each in ended) < 80
    assert {len(each.token_ids) for each in endless} == {80}
    for one, other in zip(ended, endless, strict=True):
        assert other.token_ids[: len(one.token_ids)].tolist() == one.token_ids.tolist()


@pytest.mark.parametrize("top", [0, 3])
def test_prompts_are_scored_with_the_version_that_is_named(served: Served, top: int) -> None:
    ids = np.array(PROMPT, np.int32)
    targets = np.random.default_rng(0).integers(-1, 60, (len(ids) - 1, top)).astype(np.int32)

    async def beside_samples() -> list[Any]:
        sampling = asyncio.create_task(served.group(served.numbers[1], samples=8, max_new_tokens=100))
        scores = [await served.engine.score_prompt(ids, swaps, top, targets) for swaps in served.numbers]
        assert not sampling.done()  # a score does not wait for the end of samples
        await sampling
        return scores

    for swaps, scores in zip(served.numbers, served.run(beside_samples()), strict=True):
        logprobs = served.distributions(swaps, PROMPT).log_softmax(-1)
        assert np.abs(scores.logprobs - logprobs.gather(1, torch.tensor(PROMPT)[1:, None])[:, 0].numpy()).max() <= 1e-5
        assert scores.top_ids.shape == scores.top_logprobs.shape == (len(PROMPT) - 1, top)
        assert scores.top_ids.tolist() == logprobs.topk(top, -1).indices.tolist()
        assert np.abs(scores.top_logprobs - logprobs.topk(top, -1).values.numpy()).max(initial=0) <= 1e-5
        ours = logprobs.gather(1, torch.from_numpy(targets).long().clamp(min=0)).numpy() * (targets >= 0)
        assert np.abs(scores.target_logprobs - ours).max(initial=0) <= 1e-5
        assert not top or (targets == -1).any()


def test_running_samples_keep_their_version_when_another_is_set_and_it_is_dropped_afterwards() -> None:
    served = Served()
    old = served.engine.swaps
    alone = served.run(served.sample(old, max_new_tokens=100))

    async def replaced() -> Generation:
        running = asyncio.create_task(served.sample(old, max_new_tokens=100))
        await asyncio.sleep(0.02)
        assert served.engine.retain([old])
        await served.engine.set_weights(served.version(3))
        assert not running.done()
        return await running

    assert served.run(replaced()).token_ids.tolist() == alone.token_ids.tolist()
    assert not served.engine.retain([old, old + 1, old + 2])
    served.engine.retain([])
    served.run(served.engine.set_weights(served.version(4)))
    with pytest.raises(RpcError, match=f"version number {old} is no longer in memory"):
        served.run(served.sample(old))
    served.run(served.engine.stop())


def test_a_deterministic_engine_gives_a_version_the_same_bits_beside_others_and_alone() -> None:
    def bits(steps: list[int]) -> dict[int, list[bytes]]:
        """Return the samples of each version of an engine that has loaded these versions, in two rounds."""
        served = Served(deterministic=True, steps=steps)
        made: dict[int, list[bytes]] = {step: [] for step in served.steps.values()}
        for _ in range(2):
            for swaps, step in served.steps.items():
                (group,) = served.run(served.group(swaps, samples=3))
                made[step] += [each.token_ids.tobytes() + each.logprobs.tobytes() for each in group]
        served.run(served.engine.stop())
        for rounds in made.values():
            assert rounds[:3] == rounds[3:]
        return made

    together, alone = bits([1, 2]), bits([2])
    assert together[2] == alone[2]
    assert together[0] == alone[0]
    assert together[1] != together[2]


def test_a_cancelled_call_frees_its_rows_and_changes_no_other(served: Served) -> None:
    swaps = served.numbers[1]
    alone = served.run(served.sample(swaps, max_new_tokens=60)).token_ids.tolist()

    async def cancelled() -> list[int]:
        event = threading.Event()
        beside = asyncio.create_task(served.sample(swaps, max_new_tokens=60))
        gone = asyncio.create_task(served.group(swaps, samples=32, max_new_tokens=400, cancel=event))
        await asyncio.sleep(0.02)
        event.set()
        with pytest.raises(Exception, match="abandoned"):
            await gone
        return (await beside).token_ids.tolist()

    assert served.run(cancelled()) == alone
    served.run(served.engine.compute(lambda: None))  # after the last step
    versions = served.engine._versions
    assert not versions._of
    assert all(version.table.is_empty and version.table._passes is None for version in versions._versions.values())


def naive(logprobs: list[float], top_k: int, top_p: float) -> list[float]:
    """Return the probabilities that are left, one step after the other."""
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))
    kept = order[: top_k or len(order)]
    total = sum(np.exp(logprobs[token]) for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if nucleus and sum(np.exp(logprobs[each]) for each in nucleus) / total >= top_p:
            break
        nucleus.append(token)
    total = sum(np.exp(logprobs[token]) for token in nucleus)
    return [np.exp(logprobs[token]) / total if token in nucleus else 0.0 for token in range(len(logprobs))]


def test_the_truncated_distribution_is_the_one_that_its_definition_gives() -> None:
    random = torch.Generator().manual_seed(1)
    logprobs = (torch.randn(200, 17, generator=random) * 3).log_softmax(-1)
    logprobs[::5] = logprobs[::5].round()  # with ties
    logprobs = logprobs.log_softmax(-1)
    top_k = torch.randint(0, 20, (200,), generator=random)
    top_p = torch.rand(200, generator=random).clamp(min=0.01)
    top_p[::3] = 1.0
    left = truncated(logprobs, top_k, top_p).exp()
    for row, k, p, ours in zip(logprobs.double().tolist(), top_k.tolist(), top_p.tolist(), left, strict=True):
        assert np.abs(np.array(naive(row, k, p)) - ours.numpy()).max() < 1e-5
    assert torch.equal(truncated(logprobs, torch.zeros(200), torch.ones(200)), logprobs)
    assert torch.equal(truncated(logprobs, torch.ones(200), top_p).argmax(-1), logprobs.argmax(-1))
