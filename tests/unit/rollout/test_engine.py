"""Tests the embedded engine: its samples, their log-probs, and whether a given seed reproduces them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.rollout.engine import GenerationCancelled, Prompt
from services.rollout.engines import transformers_engine
from services.rollout.engines.slots import MAX_ROWS, pick
from services.rollout.engines.transformers_engine import TransformersEngine, eos_ids
from services.rollout.results.finish import task_shards
from services.rollout.sampling.trajectory import BlockVersions, answers_of, single_turns
from shared.model.load import load_model
from shared.model.logprobs import token_logprobs
from shared.topology.passes import FASTEST
from tests.unit.rollout.rollout_engine import MODEL, engine, generate, sampling

EOS = 2


@pytest.fixture(scope="module")
def tiny() -> Iterator[TransformersEngine]:
    made = engine()
    yield made
    asyncio.run(made.stop())


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Return ragged prompts of 3 to 12 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["47+85=", "1+2=", "90+11=", "47+85=132 12+13=", "5+5"]
    return [Prompt(f"train/0/{i}", tokenizer(text)["input_ids"]) for i, text in enumerate(texts)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_equal_those_of_a_forward_pass_over_the_whole_sequence(
    tiny: TransformersEngine, prompts: list[Prompt], temperature: float
) -> None:
    generated = generate(tiny, prompts, sampling(temperature=temperature))
    groups = answers_of(generated, BlockVersions(0, tiny.swaps))
    model = load_model(MODEL, "float32")
    for prompt, group in zip(prompts, groups, strict=True):
        shards = task_shards(single_turns(prompt.token_ids, group))
        with torch.inference_mode():
            again, _ = token_logprobs(
                model, shards["token_ids"], shards["lengths"], shards["loss_mask"], temperature, 4096
            )
        assert np.abs(again.numpy() - shards["rollout_logprobs"]).max() < 1e-4
        assert (shards["rollout_logprobs"][shards["loss_mask"] == 1] < 0).all()


def test_greedy_sampling_equals_transformers_generate(tiny: TransformersEngine, prompts: list[Prompt]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    groups = generate(tiny, prompts, sampling(samples=1, temperature=0.0))
    for prompt, (ours,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert ours.token_ids.tolist() == theirs[0, ids.shape[1] :].tolist()


def test_the_same_seed_gives_bit_identical_samples_and_a_different_seed_gives_different_tokens(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    first = generate(tiny, prompts, sampling(samples=8))
    second = generate(tiny, prompts, sampling(samples=8))
    other = generate(tiny, prompts, sampling(samples=8, seed=1))
    for left, right in zip(first, second, strict=True):
        for a, b in zip(left, right, strict=True):
            assert a.token_ids.tobytes() == b.token_ids.tobytes()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
    tokens = [[each.token_ids.tolist() for group in groups for each in group] for groups in (first, other)]
    assert tokens[0] != tokens[1]


def test_a_task_gets_the_same_tokens_whatever_else_is_in_the_block(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    wanted = prompts[3]  # This is the longest prompt, so both blocks have the same padded length.
    alone = generate(tiny, [wanted, *prompts[:2]], sampling(samples=8, block_rows=40))[0]
    last = generate(tiny, [prompts[4], prompts[2], wanted], sampling(samples=8, block_rows=40))[2]
    for a, b in zip(alone, last, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_padding_rows_are_neither_returned_nor_counted(tiny: TransformersEngine, prompts: list[Prompt]) -> None:
    before = tiny.stats()["generated_tokens"]
    groups = generate(tiny, prompts[:2], sampling(samples=3, block_rows=64))
    assert [len(group) for group in groups] == [3, 3]
    generated = sum(len(each.token_ids) for group in groups for each in group)
    assert tiny.stats()["generated_tokens"] - before == generated


def test_a_completion_ends_with_the_sampled_eos_or_at_the_limit(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    reasons = set()
    for group in generate(tiny, prompts, sampling(samples=32, temperature=1.5, max_new_tokens=4)):
        for each in group:
            reasons.add(each.finish_reason)
            assert EOS not in each.token_ids[:-1]
            assert len(each.logprobs) == len(each.token_ids) <= 4
            if each.finish_reason == "stop":
                assert each.token_ids[-1] == EOS
            else:
                assert len(each.token_ids) == 4
                assert each.token_ids[-1] != EOS
    assert reasons == {"stop", "length"}


def test_a_stop_text_ends_a_completion_and_is_kept_in_its_tokens(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plain = generate(tiny, prompts[:1], sampling(samples=16))[0]
    stopped = generate(tiny, prompts[:1], sampling(samples=16, stop=("1",)))[0]
    seen = 0
    for before, after in zip(plain, stopped, strict=True):
        text = tokenizer.decode(before.token_ids.tolist(), skip_special_tokens=True)
        if "1" in text:
            seen += 1
            assert after.finish_reason == "stop"
            assert tokenizer.decode(after.token_ids.tolist()) == text[: text.index("1") + 1]
        else:
            assert after.token_ids.tolist() == before.token_ids.tolist()
    assert seen


def test_dropping_finished_rows_does_not_change_tokens(prompts: list[Prompt], tiny: TransformersEngine) -> None:
    compacting = engine(deterministic=False)
    fixed = generate(tiny, prompts, sampling(samples=16))
    compacted = generate(compacting, prompts, sampling(samples=16))
    asyncio.run(compacting.stop())
    for left, right in zip(fixed, compacted, strict=True):
        for a, b in zip(left, right, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


def test_a_lease_with_more_rows_than_a_loop_can_take_is_sampled_in_parts(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    samples = MAX_ROWS // 2 + 1
    groups = generate(tiny, prompts[:2], sampling(samples=samples, max_new_tokens=2))
    assert [len(group) for group in groups] == [samples, samples]


def test_a_cancelled_block_is_abandoned(tiny: TransformersEngine, prompts: list[Prompt]) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(GenerationCancelled):
        asyncio.run(tiny.generate(prompts, sampling(), cancel))


def test_a_paused_engine_makes_no_progress_and_continues_after_resume(
    tiny: TransformersEngine, prompts: list[Prompt]
) -> None:
    async def scenario() -> None:
        await tiny.pause()
        before = tiny.progress
        work = asyncio.create_task(tiny.generate(prompts, sampling(), threading.Event()))
        _, pending = await asyncio.wait({work}, timeout=0.3)
        assert pending
        assert tiny.progress == before
        await tiny.resume()
        assert len(await asyncio.wait_for(work, 10)) == len(prompts)
        assert tiny.progress > before

    asyncio.run(scenario())


def test_sampled_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    uniform = torch.rand((1, 20000), generator=torch.Generator().manual_seed(0))
    picked = pick(probabilities.log()[None], uniform)[0]
    counts = torch.bincount(picked, minlength=4) / 20000
    assert counts[1] == 0
    assert (counts - probabilities).abs().max() < 0.015


@pytest.mark.gpu
def test_a_gpu_never_samples_a_token_of_probability_0() -> None:
    logprobs = torch.full((4, 151_936), float("-inf"), device="cuda")
    likely = torch.arange(7, 151_936, 30_011, device="cuda")
    logprobs[:, likely] = torch.randn(4, len(likely), device="cuda").log_softmax(-1)
    uniform = torch.rand((4, 200_000), generator=torch.Generator().manual_seed(0))
    assert torch.isin(pick(logprobs, uniform), likely).all()


def test_eos_ids_come_from_the_model_directory() -> None:
    assert eos_ids(MODEL) == (EOS,)


def test_the_engine_sets_up_its_device_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def own_device(kind: str, rank: int) -> str:
        asked.append((kind, rank))
        return "cpu"  # this machine may have no GPU

    monkeypatch.setattr(transformers_engine, "own_device", own_device)

    async def scene() -> None:
        engine = TransformersEngine(
            model=MODEL, dtype="float32", threads=1, deterministic=False, device="cuda", passes=FASTEST
        )
        await engine.start()
        await engine.stop()

    asyncio.run(scene())
    assert asked == [("cuda", 0)]
