"""Tests calls that are decoded side by side in one table: no call waits for the longest one, and no sampled token
changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engine import Generation, GenerationCancelled, GenerationWatch, Prompt, SamplingParams
from services.rollout.engines import passes
from services.rollout.engines.compute import ComputeThread, EngineCall, SideBySide
from services.rollout.engines.slots import SlotTable, generator_of, pick
from shared.model.load import allow, load_model
from shared.model.logprobs import token_logprobs
from shared.topology.passes import FASTEST
from tests.unit.rollout.rollout_engine import MODEL, sampling

pytestmark = pytest.mark.slow

EOS = 2
HOT = 3.0
"""Temperature at which lengths vary widely."""
PROMPTS = [Prompt(f"train/0/{i}", [3 + i, 4, 5, 6 + i, 7][: 3 + i % 3]) for i in range(9)]


class Watched:
    """A table over the tiny model that counts its steps and runs each callback in `at` at its step."""

    def __init__(self, slots: int, *, steady: bool = False) -> None:
        self.model = load_model(MODEL, "float32").eval().requires_grad_(False)
        allow(self.model, FASTEST)
        self.table = SlotTable(
            self.model,
            eos_ids=[EOS],
            stopped=lambda texts: None,
            swaps=lambda: self.steps,
            slots=slots,
            steady=steady,
        )
        self.steps = 0
        self.at: dict[int, Callable[[], None]] = {}
        self.compute = ComputeThread()
        self.calls = SideBySide(self.compute, self)

    def add(self, call: EngineCall) -> bool:
        return self.table.add(call)

    def step(self) -> None:
        self.steps += 1
        self.at.pop(self.steps, lambda: None)()
        self.table.step()

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        return self.table.so_far(call)

    def drop(self, call: EngineCall) -> None:
        self.table.drop(call)

    async def generate(
        self, prompts: list[Prompt], chosen: SamplingParams, cancel: threading.Event | None = None
    ) -> list[list[Generation]]:
        return await self.calls.generate(prompts, chosen, cancel or threading.Event(), None)


@pytest.fixture(params=["plain", "model", "model that cannot gather"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    if request.param != "plain":
        monkeypatch.setattr(passes, "is_plain", lambda model: False)
    if request.param == "model that cannot gather":
        monkeypatch.setattr(passes, "grows", lambda cache: False)
    made = Watched(slots=12)
    yield made
    asyncio.run(made.compute.stop(lambda: None, 5))


def alone(made: Watched, prompts: list[Prompt], chosen: SamplingParams) -> list[list[Generation]]:
    """Return the samples of each prompt without a table or cache: one pass over the whole text per token. They do not
    depend on the table, so they are computed once for all of its kinds."""
    for prompt in prompts:
        if (str(prompt), chosen) not in _found:
            _found[str(prompt), chosen] = _alone(made.model, prompt, chosen)
    return [_found[str(prompt), chosen] for prompt in prompts]


_found: dict[tuple[str, SamplingParams], list[Generation]] = {}


@torch.inference_mode()
def _alone(model: Any, prompt: Prompt, chosen: SamplingParams) -> list[Generation]:
    generator, steps = generator_of(chosen.seed, prompt.name), chosen.max_new_tokens
    drawn = [torch.rand((32, chosen.samples), generator=generator) for _ in range(-(-steps // 32))]
    uniform = torch.cat(drawn)
    ids = torch.tensor([prompt.token_ids] * chosen.samples)
    found = []
    for step in range(steps):
        logits = model(input_ids=ids).logits[:, -1].float() / (chosen.temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        new = pick(logprobs, uniform[step][:, None]) if chosen.temperature else logprobs.argmax(-1, keepdim=True)
        found.append(logprobs.gather(1, new))
        ids = torch.cat([ids, new], 1)
    sampled, logprobs = ids[:, len(prompt.token_ids) :].numpy(), torch.cat(found, 1).numpy()
    ends = [(row == EOS).argmax() + 1 if EOS in row else steps for row in sampled]
    return [
        Generation(row[:end], values[:end], "stop" if EOS in row else "length", row[:0])
        for row, values, end in zip(sampled, logprobs, ends, strict=True)
    ]


def ids(groups: list[list[Generation]]) -> list[list[list[int]]]:
    return [[each.token_ids.tolist() for each in group] for group in groups]


def check_logprobs(prompts: list[Prompt], groups: list[list[Generation]], temperature: float) -> None:
    model = load_model(MODEL, "float32")
    for prompt, group in zip(prompts, groups, strict=True):
        for each in group:
            text = np.concatenate([np.array(prompt.token_ids, np.int32), each.token_ids])
            mask = (np.arange(len(text)) >= len(prompt.token_ids)).astype(np.uint8)
            with torch.inference_mode():
                again, _ = token_logprobs(model, text, np.array([len(text)], np.int32), mask, temperature, 4096)
            assert np.abs(again.numpy()[mask == 1] - each.logprobs).max() < 1e-4


def test_finished_rows_are_reused_and_every_sample_equals_the_one_computed_alone(table: Watched) -> None:
    chosen = sampling(samples=4, temperature=HOT, max_new_tokens=48)
    groups = asyncio.run(table.generate(PROMPTS, chosen))
    expected = alone(table, PROMPTS, chosen)
    assert table.table._passes is None  # When there are no calls, no keys or values are kept.
    assert ids(groups) == ids(expected)
    assert [[each.finish_reason for each in group] for group in groups] == [
        [each.finish_reason for each in group] for group in expected
    ]
    check_logprobs(PROMPTS, groups, HOT)
    lengths = [max(len(each.token_ids) for each in group) for group in groups]
    assert max(lengths) > 3 * min(lengths)
    if table.table._joins:
        # 12 rows hold 3 groups. This takes fewer passes than three waves that each wait for their longest group.
        waves = sum(max(lengths[first : first + 3]) for first in range(0, 9, 3))
        assert table.steps < waves


def test_a_later_short_call_ends_while_a_long_one_continues(table: Watched) -> None:
    long, short = sampling(2, 50.0, 60), sampling(3, HOT, 4, seed=1)
    ended: list[str] = []

    async def scenario() -> tuple[list[list[Generation]], list[list[Generation]]]:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        table.at[5] = lambda: loop.call_soon_threadsafe(begun.set)
        first = asyncio.create_task(table.generate(PROMPTS[:2], long))
        first.add_done_callback(lambda _: ended.append("long"))
        await begun.wait()
        second = asyncio.create_task(table.generate(PROMPTS[2:4], short))
        second.add_done_callback(lambda _: ended.append("short"))
        return await first, await second

    first, second = asyncio.run(scenario())
    assert max(len(each.token_ids) for group in first for each in group) > 20
    assert ids(first) == ids(alone(table, PROMPTS[:2], long))
    assert ids(second) == ids(alone(table, PROMPTS[2:4], short))
    check_logprobs(PROMPTS[2:4], second, HOT)
    if table.table._joins:
        assert ended == ["short", "long"]


def test_a_cancelled_call_shows_its_tokens_and_leaves_the_others_unchanged() -> None:
    made = Watched(slots=12)
    chosen = sampling(4, 50.0, 48)
    shown: list[list[list[Generation]]] = []
    cancel = threading.Event()
    made.at[6] = cancel.set

    async def scenario() -> list[list[Generation]]:
        watch = GenerationWatch(1e9, lambda groups: shown.append(groups))
        given_up = asyncio.create_task(made.calls.generate(PROMPTS[:2], chosen, cancel, watch))
        await asyncio.sleep(0)  # The call has been made.
        kept = await made.generate(PROMPTS[2:6], chosen)
        with pytest.raises(GenerationCancelled):
            await given_up
        await made.compute.stop(lambda: None, 5)
        return kept

    kept = asyncio.run(scenario())
    assert ids(kept) == ids(alone(made, PROMPTS[2:6], chosen))
    (groups,) = shown
    whole = alone(made, PROMPTS[:2], chosen)
    assert any(each.finish_reason == "" and len(each.token_ids) for group in groups for each in group)
    for group, ended in zip(groups, whole, strict=True):
        for each, complete in zip(group, ended, strict=True):
            assert each.token_ids.tolist() == complete.token_ids.tolist()[: len(each.token_ids)]
    assert not made.table._held
    assert not made.table._waiting


def test_every_token_has_the_number_of_weight_swaps_before_it() -> None:
    made = Watched(slots=4)  # A token's swap count is its step number.
    groups = asyncio.run(made.generate(PROMPTS[:3], sampling(4, HOT, 48)))
    asyncio.run(made.compute.stop(lambda: None, 5))
    for group in groups:
        for each in group:
            assert (np.diff(each.swaps) >= 1).all()
    assert min(int(each.swaps[0]) for each in groups[2]) > min(int(each.swaps[-1]) for each in groups[0])


def test_greedy_and_sampled_calls_share_a_table() -> None:
    made = Watched(slots=64)
    greedy, warm = sampling(1, 0.0, 12), sampling(3, 1.0, 12)

    async def scenario() -> list[list[list[Generation]]]:
        return await asyncio.gather(made.generate(PROMPTS[:4], greedy), made.generate(PROMPTS[4:8], warm))

    groups = asyncio.run(scenario())
    assert ids(groups[0]) == ids(alone(made, PROMPTS[:4], greedy))
    assert ids(groups[1]) == ids(alone(made, PROMPTS[4:8], warm))
    asyncio.run(made.compute.stop(lambda: None, 5))


def test_a_failed_pass_fails_the_calls_under_way_but_not_later_ones() -> None:
    made = Watched(slots=12)

    def fail() -> None:
        raise MemoryError("no room")

    made.at[3] = fail

    async def scenario() -> list[list[Generation]]:
        with pytest.raises(MemoryError, match="no room"):
            await made.generate(PROMPTS[:2], sampling(4, HOT, 48))
        again = await made.generate(PROMPTS[:2], sampling(4, HOT, 48))
        await made.compute.stop(lambda: None, 5)
        return again

    assert ids(asyncio.run(scenario())) == ids(alone(made, PROMPTS[:2], sampling(4, HOT, 48)))


def test_a_steady_table_samples_calls_in_order_and_runs_their_padding_rows() -> None:
    made = Watched(slots=16, steady=True)
    chosen = sampling(4, HOT, 12, block_rows=12)
    sizes: list[int] = []
    made.at = {step: lambda: sizes.append(len(made.table._rows)) for step in range(1, 40)}

    async def scenario() -> list[list[list[Generation]]]:
        return await asyncio.gather(made.generate(PROMPTS[:2], chosen), made.generate(PROMPTS[2:8], chosen))

    first, second = asyncio.run(scenario())
    asyncio.run(made.compute.stop(lambda: None, 5))
    assert ids(first) == ids(alone(made, PROMPTS[:2], chosen))
    assert ids(second) == ids(alone(made, PROMPTS[2:8], chosen))
    # The second call is sampled in parts of four and two prompts, and the part of two is padded.
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size not in (0, before)] == [12, 16, 12]
