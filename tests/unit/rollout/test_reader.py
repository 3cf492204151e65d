"""Tests that texts are read as sequence classifiers of transformers read them, by the reward model and in its
training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from proto.messages import LossReason
from proto.tensors import Array
from services.rollout.engine import FinishReason
from services.rollout.results.finish import _read
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.score import Score
from services.rollout.sampling.prompts import NoChatTemplate, PromptBuilder, PromptTooLong
from services.rollout.sampling.reader import TextReader
from services.rollout.sampling.tasks import TaskSets
from services.rollout.sampling.trajectory import Made
from shared.sample import Sample, messages_of
from tests.reward_folder import TINY

TOKENIZER: Any = AutoTokenizer.from_pretrained(TINY)
CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


def sample(prompt: Any, completion: str) -> Sample:
    row = {"prompt": prompt}
    return Sample("train/0/0", row, messages_of(row, completion), completion, [1], FinishReason.STOP)


def read(texts: SampleTexts, one: Sample, score: Score = Score(1.0)) -> tuple[Made, Score]:  # noqa: B008  # frozen
    assert texts._reader is not None
    return texts._read(texts._reader, Made([], truncated=False, sample=one), score)


def texts(*, most_read: int = 64, single: bool = True) -> SampleTexts:
    prompts: PromptBuilder = SimpleNamespace()  # type: ignore[assignment]  # it is not used
    on_text: Any = None
    return SampleTexts(None, prompts, ["builtin:reward_model"], on_text, TextReader(TINY), most_read=most_read,
                       single=single)  # fmt: skip


def test_a_raw_text_ends_with_the_end_token_and_a_conversation_as_its_template_writes_it() -> None:
    reader = TextReader(TINY)
    raw = reader.token_ids("1+2=3", at_most=64)
    assert raw == [*TOKENIZER("1+2=3")["input_ids"], TOKENIZER.eos_token_id]
    chat = reader.token_ids(CHAT, at_most=64)
    assert chat == TOKENIZER.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert TOKENIZER.decode(chat) == TOKENIZER.apply_chat_template(CHAT, tokenize=False)


def test_a_text_that_is_too_long_and_a_chat_without_a_template_are_refused() -> None:
    reader = TextReader(TINY)
    assert len(reader.token_ids("1" * 63, at_most=64)) == 64
    for text in ("1" * 64, "1" * 20_000):
        with pytest.raises(PromptTooLong, match="there is room for 64"):
            reader.token_ids(text, at_most=64)
    reader._tokenizer.chat_template = None
    with pytest.raises(NoChatTemplate):
        reader.token_ids(CHAT, at_most=64)
    reader._tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ValueError, match="no system"):
        reader.token_ids(CHAT, at_most=64)


def test_the_text_of_a_sample_is_its_prompt_and_its_answer() -> None:
    reader = TextReader(TINY)
    made, score = read(texts(), sample("1+2=", "3"))
    assert made.read is not None
    assert (made.read.tolist(), made.read.dtype, score) == (reader.token_ids("1+2=3", at_most=64), np.int32, Score(1.0))
    made, _ = read(texts(), sample(CHAT[:1], "3"))
    assert made.read is not None
    assert made.read.tolist() == reader.token_ids(CHAT, at_most=64)
    made, _ = read(texts(single=False), replace(sample("1+2=", "3"), messages=CHAT))
    assert made.read is not None
    assert made.read.tolist() == reader.token_ids(CHAT, at_most=64)


def test_a_sample_that_cannot_be_read_fails_alone_and_says_why() -> None:
    made, score = read(texts(most_read=4), sample("1+2=", "3456"))
    assert (made.read, score.value, score.kind) == (None, None, LossReason.UNREADABLE)
    assert "a text of 9 tokens: there is room for 4 (reward_model.max_tokens)" in score.failure
    _, score = read(texts(single=False), replace(sample("1+2=", "3"), messages=[]))
    assert "the workflow has asked the policy for no chat" in score.failure
    failed = Score(None, "it raised")
    assert read(texts(), sample("1+2=", "3"), failed) == (Made([], truncated=False, sample=sample("1+2=", "3")), failed)


def test_the_texts_of_a_task_are_ragged_shards() -> None:
    made = [read(texts(), sample("1+2=", answer))[0] for answer in ("3", "345")]
    shards: dict[str, Array] = _read(made)
    assert shards["read_lengths"].tolist() == [6, 8]
    assert shards["read_ids"].tolist() == [*made[0].read.tolist(), *made[1].read.tolist()]  # type: ignore[union-attr]
    assert _read([Made([], truncated=False, sample=made[0].sample)]) == {}


@pytest.mark.parametrize("prompt", ["1+2=", CHAT[:1]])
def test_a_reward_model_is_trained_on_the_texts_that_it_will_read(prompt: Any, tmp_path: Path) -> None:
    sets = object.__new__(TaskSets)
    sets._reader, sets._context_tokens = TextReader(TINY), 64
    row = {"prompt": prompt, "chosen": "3", "rejected": "44"}
    alone = PromptBuilder(TINY, add_generation_prompt=True).token_ids(row)
    ids, answers = sets._answers(row, alone, ("chosen", "rejected"), {})
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        made, _ = read(texts(), sample(prompt, row[name]))
        assert made.read is not None
        assert [*ids, *answer.token_ids] == made.read.tolist()
        assert all(answer.trained)
