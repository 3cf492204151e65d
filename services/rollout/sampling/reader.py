"""Converts whole texts, each a prompt with its answer, to the tokens after which a model gives the text one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.rollout.sampling.prompts import CLOCK, NoChatTemplate, PromptTooLong, texts_of
from shared.tokenizer import load_tokenizer

_LONGEST_TOKEN = 256
"""A text with more characters than this for each token of room is too long. It is not tokenised to find out."""


class TextReader:
    """Reads texts as sequence classifiers of transformers do. Only one thread may use it at a time."""

    def __init__(
        self, model: Path, *, template_args: Mapping[str, Any] = MappingProxyType({}), fixed_clock: bool = False
    ) -> None:
        """Load the tokenizer from the model directory. This imports transformers. For the arguments, see
        `PromptBuilder`. Raises BadInput."""
        self._tokenizer = load_tokenizer(model)
        self._template_args = dict(template_args) | ({"strftime_now": CLOCK.strftime} if fixed_clock else {})

    def token_ids(
        self,
        text: str | Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        at_most: int,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a raw text with the end-of-sequence token, or of messages as the chat template writes
        them, without a prompt for another answer.

        Raises a one-line ValueError if the template rejects the messages, NoChatTemplate if the tokenizer has no
        template, and PromptTooLong for more than `at_most` tokens.
        """
        raw = isinstance(text, str)
        if not isinstance(text, str):
            text = self._rendered([dict(message) for message in text], tools, template_args)
        if len(text) > _LONGEST_TOKEN * at_most:
            raise PromptTooLong(f"a text of {len(text)} characters: there is room for {at_most} tokens")
        ids = [int(token) for token in self._tokenizer(text, add_special_tokens=raw)["input_ids"]]
        end = self._tokenizer.eos_token_id
        if raw and end is not None and ids[-1:] != [end]:
            ids.append(int(end))
        if len(ids) > at_most:
            raise PromptTooLong(f"a text of {len(ids)} tokens: there is room for {at_most}")
        if not ids:
            raise ValueError("the text has no tokens")
        return ids

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, args: Mapping[str, Any]
    ) -> str:
        if not self._tokenizer.chat_template:
            raise NoChatTemplate("there are messages, but the model's tokenizer has no chat template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                texts_of(messages), tools=tools, tokenize=False, **{**self._template_args, **args}
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        return text
