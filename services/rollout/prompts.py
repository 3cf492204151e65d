"""Text to tokens and back, with the policy's tokenizer. Sampled tokens are decoded for rewards only: what is trained
on is never tokenised again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.workflow import ToolCall

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_DIGITS = "0123456789"
_STAND_INS = 16
_EDGE_TOKENS = 256
"""Tokens that a text cut anywhere may have more than as a part of the whole."""
_CHARACTERS = 8
"""Looked at first, for each token that there is room for."""


class PromptTooLong(ValueError):
    """More tokens than the caller has room for. One line."""


class NoChatTemplate(ValueError):
    """A prompt of messages, and the tokenizer has no chat template. One line."""


class PromptBuilder:
    """Belongs to one thread at a time: fast tokenizers refuse concurrent use."""

    def __init__(self, model: Path, *, add_generation_prompt: bool) -> None:
        """Loads the tokenizer of the model directory; imports transformers. Raises RpcError(bad_request)."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RpcError(ErrorCode.BAD_REQUEST, f"model {model}: no tokenizer: {first[:300]}") from None
        self._add_generation_prompt = add_generation_prompt
        self._special_ids = {
            int(number) for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }

    def check_vocabulary(self, size: int) -> None:
        """Raises RpcError(bad_request) when the tokenizer has token ids that a model of `size` tokens does not."""
        largest = max(self._tokenizer.get_vocab().values(), default=-1)
        if largest >= size:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"model {self._tokenizer.name_or_path}: its tokenizer has token {largest}, the model a vocabulary of "
                f"{size}; enlarge its embedding (resize_token_embeddings), or use the tokenizer it was trained with",
            )

    def token_ids(self, row: dict[str, Any], at_most: int | None = None) -> list[int]:
        """Token ids of the row's prompt: raw text as it is, messages through the chat template.

        Raises ValueError in one line when there is no prompt or the template cannot take it, NoChatTemplate when there
        is none, PromptTooLong for what is well above `at_most` tokens, before all of it is tokenised.
        """
        prompt = row.get("prompt")
        try:
            if isinstance(prompt, str):
                self._check_length(prompt, at_most)
                ids = self._tokenizer(prompt)["input_ids"]
            elif isinstance(prompt, list):
                if not self._tokenizer.chat_template:
                    raise NoChatTemplate("a prompt of messages, and the model's tokenizer has no chat template")
                ids = self._ids(self._rendered(prompt, row.get("tools")), at_most)
            else:
                raise ValueError("row has no prompt: text or a list of messages")
        except (PromptTooLong, NoChatTemplate):
            raise
        except Exception as error:  # a template may raise anything over a row
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        if not ids:
            raise ValueError("prompt has no tokens")
        return [int(token) for token in ids]

    def answer_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of the row's `answer` as the policy would have to say it, the end-of-sequence token included.

        Raises ValueError in one line when there is no answer or the tokenizer has no end-of-sequence token.
        """
        answer, eos = row.get("answer"), self._tokenizer.eos_token_id
        if answer is None:
            raise ValueError("row has no answer: supervised fine-tuning (loss cross_entropy) learns from nothing else")
        if eos is None:
            raise ValueError("the tokenizer has no end-of-sequence token, an answer could not end")
        ids = self._tokenizer(str(answer), add_special_tokens=False)["input_ids"]
        return [*(int(token) for token in ids), int(eos)]

    def continuation(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        held: Sequence[int],
        at_most: int | None = None,
    ) -> list[int]:
        """Token ids that `messages` add to a conversation whose tokens `held` end with the policy's answer.

        They begin with what the template writes after an answer, unless the answer's own last token is that already
        (an end-of-turn token that was sampled). Raises ValueError in one line when the template cannot take them,
        PromptTooLong for what is well above `at_most` tokens.
        """
        try:
            ids = self._ids(self._after_an_answer(messages, tools), at_most)
        except PromptTooLong:
            raise
        except Exception as error:  # a template may raise anything over messages
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        return ids[1:] if ids and held and ids[0] == held[-1] and ids[0] in self._special_ids else ids

    def _after_an_answer(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """What the template writes for `messages` after an answer, its end included."""
        # Rendered after a stand-in conversation: templates that rewrite earlier answers (dropping their reasoning)
        # would give other tokens than those that were sampled. The stand-in has to be in it once: tools or messages
        # may hold digits too. Each digit once, so that no two places can overlap.
        for digits in itertools.islice(itertools.permutations(_DIGITS), _STAND_INS):
            answer = "".join(digits)
            before = [{"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
            text = self._rendered([*before, *messages], tools)
            found = text.count(answer)
            if found == 1:
                return text.partition(answer)[2]
            if not found:
                break
        raise ValueError("the chat template does not write an assistant's answer as it is, and once")

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=self._add_generation_prompt, tokenize=False
        )
        return text

    def _ids(self, text: str, at_most: int | None) -> list[int]:
        """Token ids of rendered text, which has its special tokens."""
        self._check_length(text, at_most)
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _check_length(self, text: str, at_most: int | None) -> None:
        """Raise PromptTooLong when a part from the beginning says it, each twice as long as the one before: a token may
        stand for any number of characters, and what has no room must not hold up what others want tokenised."""
        if at_most is None:
            return
        most = max(at_most, 0) + _EDGE_TOKENS
        looked_at = _CHARACTERS * most
        while looked_at < len(text):
            tokens = len(self._tokenizer(text[:looked_at], add_special_tokens=False)["input_ids"])
            if tokens > most:
                raise PromptTooLong(
                    f"a prompt of {len(text)} characters, the first {looked_at} of them {tokens} tokens, where there "
                    f"is room for {at_most}"
                )
            looked_at *= 2

    def completion(self, token_ids: list[int], stop: tuple[str, ...]) -> str:
        """The text of sampled tokens without special tokens, cut before the first stop text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [at for at in (text.find(each) for each in stop) if at >= 0]
        return text[: min(ends)] if ends else text


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; others are text."""
    calls = []
    for found in _TOOL_CALL.findall(text):
        try:
            call = msgspec.json.decode(found)
            calls.append(ToolCall(call["name"], dict(call.get("arguments") or {})))
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return calls


def messages_of(row: dict[str, Any], completion: str) -> list[dict[str, Any]]:
    """The conversation with the assistant's answer; a raw-text prompt counts as one user message."""
    prompt = row["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*before, {"role": "assistant", "content": completion}]
