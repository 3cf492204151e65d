"""Tests the tokenization of prompts: where a continuation is cut, and texts that are too long to tokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import ErrorCode
from services.rollout.engine import Generation
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.workflows.conversation import Conversation
from shared.rpc.errors import RpcError
from shared.workflow import ContextFull
from tests.unit.rollout.rollout_engine import MODEL

WITH_TOOLS = (
    "{% if tools %}tools: {{ tools }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DIGITS = "0123456789"
HEX: list[Any] = [{"type": "function", "function": {"name": "hex", "description": f"characters {DIGITS}abcdef"}}]
CONTEXT = 512
LONG = 1 << 24


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    made = PromptBuilder(MODEL, add_generation_prompt=True)
    made._tokenizer.chat_template = WITH_TOOLS
    return made


class _Counting:
    """A wrapper around the tokenizer that counts the characters passed to it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.characters = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._inner(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("tools", [None, HEX])
@pytest.mark.parametrize("said", ["again", f"{DIGITS} {DIGITS}", "1023456789"])
def test_the_text_after_an_answer_is_cut_correctly_whatever_tools_and_messages_contain(
    prompts: PromptBuilder, tools: Any, said: str
) -> None:
    ids = prompts.continuation([{"role": "tool", "content": said}], tools, [])
    assert prompts._tokenizer.decode(ids) == f"\ntool: {said}\nassistant: "


def test_a_template_that_omits_an_answer_is_refused() -> None:
    made = PromptBuilder(MODEL, add_generation_prompt=True)
    made._tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="does not write an assistant's answer unchanged"):
        made.continuation([{"role": "user", "content": DIGITS}], None, [])


@pytest.mark.parametrize("how", ["new", "continued", "text"])
def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenised(how: str) -> None:
    prompts = PromptBuilder(MODEL, add_generation_prompt=True)
    prompts._tokenizer = counting = _Counting(prompts._tokenizer)
    conversation = Conversation(prompts, context_tokens=CONTEXT, max_tokens=4096, max_new_tokens=8)
    long = {"role": "user", "content": "1+" * (LONG // 2)}
    asked: list[Any] = [{"role": "user", "content": "1+1="}]
    sampled = Generation(np.array([5, 6], np.int32), np.zeros(2, np.float32), "stop", np.zeros(2, np.int32))
    conversation.end(conversation.begin(asked, None), sampled, [0, 0], "2")
    history = [*asked, {"role": "assistant", "content": "2"}]
    counting.characters = 0
    begin = {
        "new": lambda: conversation.begin([long], None),
        "continued": lambda: conversation.begin([*history, long], None),
        "text": lambda: conversation.begin_text(long["content"]),
    }[how]
    with pytest.raises(ContextFull, match=r"a prompt of 167\d+ characters: .* but there is room for \d+"):
        begin()
    assert counting.characters < 32 * CONTEXT


def test_a_prompt_of_few_tokens_is_not_refused_for_its_number_of_characters(prompts: PromptBuilder) -> None:
    text = "<eos>" * 3000  # Each token is five characters long.
    assert len(prompts.token_ids({"prompt": text}, 3000)) == 3000
    assert prompts.token_ids({"prompt": text}, 3000) == prompts.token_ids({"prompt": text})


def test_a_missing_or_too_large_tokenizer_is_refused_with_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(RpcError, match=f"model {tmp_path}: no tokenizer: ") as caught:
        PromptBuilder(tmp_path, add_generation_prompt=True)
    assert caught.value.code == ErrorCode.BAD_REQUEST
    assert "\n" not in str(caught.value)
    prompts = PromptBuilder(MODEL, add_generation_prompt=True)
    prompts.check_vocabulary(64)
    with pytest.raises(RpcError, match="its tokenizer has token 63, but the vocabulary size is 63; enlarge") as caught:
        prompts.check_vocabulary(63)
    assert caught.value.code == ErrorCode.BAD_REQUEST
