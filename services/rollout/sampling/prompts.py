"""Converts text to tokens and back with the policy's tokenizer.

Sampled tokens are decoded for rewards only. Their text is never tokenised again for training.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shared.data.source import ANSWER, answer_text, content_text, not_text
from shared.rpc.errors import BadInput
from shared.tokenizer import answer_ends, load_tokenizer, special_tokens

CLOCK = datetime(2025, 1, 1)  # a template writes the local date
"""The time that chat templates see in deterministic runs."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark at which a chat template begins what the policy generates."""
_DIGITS = "0123456789"
_STAND_INS = 16
_EDGE_TOKENS = 256
"""Maximum number of tokens by which a truncated text may exceed the same part of the whole text."""
_CHARACTER_TOKENS = 4
"""Maximum number of tokens that make up one character."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CHARACTERS = 8
"""Length of the first prefix that is tokenised, in characters for each token of room."""


class PromptTooLong(ValueError):
    """A prompt has more tokens than the caller has room for. The message is one line."""


class NoChatTemplate(ValueError):
    """A prompt consists of messages, but the tokenizer has no chat template. The message is one line."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The token ids after a prompt, from the data set, and which of them are trained on."""

    token_ids: list[int]
    trained: list[bool]


class PromptBuilder:
    """Builds prompts. Only one thread may use it at a time, because fast tokenizers refuse concurrent use."""

    def __init__(
        self,
        model: Path,
        *,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any] = MappingProxyType({}),
        fixed_clock: bool = False,
    ) -> None:
        """Load the tokenizer from the model directory. This imports transformers. Raises BadInput.

        `template_args` are variables of the chat template. If `fixed_clock`, a template that writes the date always
        writes that of `CLOCK`.
        """
        self._tokenizer = load_tokenizer(model)
        self._ends = answer_ends(model, self._tokenizer)
        self._add_generation_prompt = add_generation_prompt
        self._template_args = dict(template_args) | ({"strftime_now": CLOCK.strftime} if fixed_clock else {})
        self._appended = self._tokens_after_a_text()
        self._pieces: dict[int, str] = {}
        """Texts of individually decoded tokens."""
        special = special_tokens(self._tokenizer)
        self._special_ids, self._special_texts = special.keys(), [text for text in special.values() if text]

    def check_vocabulary(self, size: int) -> None:
        """Raise BadInput if the tokenizer has token ids beyond a model's vocabulary of `size` tokens."""
        largest = max(self._tokenizer.get_vocab().values(), default=-1)
        if largest >= size:
            raise BadInput(
                f"model {self._tokenizer.name_or_path}: its tokenizer has token {largest}, but the vocabulary size is "
                f"{size}; enlarge the embedding (resize_token_embeddings), or use the model's original tokenizer",
            )

    def token_ids(
        self,
        row: dict[str, Any],
        at_most: int | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of the row's prompt: raw text as it is, messages through the chat template, which has
        `template_args` beside its variables for the whole run.

        Raises a one-line ValueError if there is no prompt or the template rejects it, NoChatTemplate if there is no
        template, and PromptTooLong for a prompt well above `at_most` tokens, before the whole prompt is tokenised.
        """
        prompt = row.get("prompt")
        try:
            if isinstance(prompt, str):
                self._check_length(prompt, at_most)
                ids = self._tokenizer(prompt)["input_ids"]
                if self._appended and ids[-len(self._appended) :] == self._appended:
                    ids = ids[: -len(self._appended)]
            elif isinstance(prompt, list):
                if not self._tokenizer.chat_template:
                    raise NoChatTemplate("the prompt has messages, but the model's tokenizer has no chat template")
                ids = self._ids(self._rendered(prompt, row.get("tools"), args=template_args), at_most)
            else:
                raise ValueError("row has no prompt (text or a list of messages)")
        except (PromptTooLong, NoChatTemplate):
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        if not ids:
            raise ValueError("prompt has no tokens")
        return [int(token) for token in ids]

    def answer(self, row: dict[str, Any], field: str = ANSWER) -> GivenAnswer:
        """Return the answer in the `field` of the row as the policy would have to generate it, with the token that ends
        it (`AnswerEnds`).

        Raises a one-line ValueError if there is no answer, or if sampling would not end at that token.
        """
        answer = answer_text(row, field)
        end = self._ends.end(messages=isinstance(row.get("prompt"), list))
        ids = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        return GivenAnswer([*(int(token) for token in ids), end], [True] * (len(ids) + 1))

    def conversation(
        self, row: dict[str, Any], template_args: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[list[int], GivenAnswer]:
        """Return the token ids of the row's `messages` before the first answer, and those up to the end of the last
        answer, of which the tokens of every answer are trained on.

        Answers are tokenised apart from what precedes them, as if they had been sampled. Raises a one-line ValueError
        if the template rejects the messages, if it writes an answer otherwise once other messages follow, so that a
        policy would learn in contexts that it never meets, or if sampling would not end where an answer ends.
        """
        if not self._tokenizer.chat_template:
            raise NoChatTemplate("the row has messages, but the model's tokenizer has no chat template")
        try:
            text, answers = self._marked(row["messages"], row.get("tools"), template_args)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        ids: list[int] = []
        trained: list[bool] = []
        at = first = 0
        for start, end in answers:
            ids += self._ids(text[at:start], None)
            first = first or len(ids)
            own = self._ids(text[start:end], None)
            length = max((number for number, token in enumerate(own, 1) if token in self._ends.stop), default=0)
            if not length:
                raise ValueError(
                    f"what the chat template writes as the answer {text[start:end]!r:.60} does not include a token at "
                    f"which sampling ends ({self._ends.stop}), so the policy would not learn to end answers"
                )
            trained += [False] * (len(ids) - len(trained)) + [True] * length
            ids += own
            at = end
        return ids[:first], GivenAnswer(ids[first : len(trained)], trained[first:])

    def _marked(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, args: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the begin and end of each answer: where the template marks it as generated
        or, if it marks nothing, from the prompt for the answer to the next message."""
        whole = self._rendered(messages, tools, prompted=False, args=args)
        spans = []
        for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
            before = self._rendered(messages[:number], tools, args=args)
            after = self._rendered(messages[: number + 1], tools, prompted=False, args=args)
            if not whole.startswith(after):
                raise ValueError(f"the chat template rewrites message {number}, an answer, when other messages follow")
            spans.append((len(before), len(after)))
            if not self._marks(tools) and not after.startswith(before):
                raise ValueError(
                    f"the chat template does not continue its prompt for message {number} with that answer"
                )
        if not spans:
            raise ValueError("messages have no answer (a message of role assistant) to train on")
        if not self._marks(tools):
            return whole, spans
        from transformers.utils import chat_template_utils

        jinja: Any = chat_template_utils
        (text,), (marked,) = jinja.render_jinja_template(
            [texts_of(messages)],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._template_args, **args},
        )
        if len(marked) != len(spans):
            raise ValueError(
                f"the chat template marks {len(marked)} texts as generated, but there are {len(spans)} answers"
            )
        return text, [(start, end) for start, end in marked]

    def _marks(self, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template marks what the policy generates."""
        return bool(_GENERATION.search(self._tokenizer.get_chat_template(tools=tools)))

    def _tokens_after_a_text(self) -> list[int]:
        """Return the tokens that the tokenizer appends to a text, such as an end token. A prompt must not end with
        them."""
        plain, whole = (
            [int(token) for token in self._tokenizer("a", add_special_tokens=special)["input_ids"]]
            for special in (False, True)
        )
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return whole[at + len(plain) :]
        return []

    def continuation(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        earlier: Sequence[int],
        at_most: int | None = None,
        calls: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids that `messages` add to a conversation whose tokens `held` end with the policy's answer.

        These ids begin with what the template writes after an answer, unless the answer's last token already provides
        it (a sampled end-of-turn token). `calls` are the tool calls of that answer, for templates that accept the
        result of a tool only after the call. Raises a one-line ValueError if the template rejects the messages, and
        PromptTooLong for text well above `at_most` tokens.
        """
        try:
            ids = self._ids(self._after(messages, tools, calls), at_most)
        except PromptTooLong:
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        return ids[1:] if ids and earlier and ids[0] == earlier[-1] and ids[0] in self._special_ids else ids

    def _after(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, calls: list[dict[str, Any]] | None
    ) -> str:
        """Return the text that the template writes for `messages` after an answer, or after an answer with `calls`."""
        try:
            return self._after_an_answer(messages, tools)
        except Exception:  # a template may raise anything
            if messages[0].get("role") != "tool":
                raise
            return self._after_a_call(messages, tools, calls or _stand_in_call(messages[0]))

    def _after_a_call(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, calls: list[dict[str, Any]]
    ) -> str:
        """Return the text that the template writes for `messages` after an answer that consists of `calls`, beginning
        with the special token that ends the answer."""
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        before = self._rendered(conversation, tools, prompted=False)
        whole = self._rendered([*conversation, *messages], tools)
        if not whole.startswith(before):
            raise ValueError("the chat template rewrites an assistant's tool call when its result follows")
        name = str(calls[-1].get("function", {}).get("name", ""))
        at = before.rfind(name) + len(name)
        ends = [before.rfind(token) for token in self._special_texts]
        return whole[max([end for end in ends if end >= at], default=len(before)) :]

    def _after_an_answer(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Return the text that the template writes for `messages` after an answer, including the end of the answer."""
        # The messages are rendered after a stand-in conversation, because templates that rewrite earlier answers
        # (dropping their reasoning) would change the tokens that were sampled. The stand-in answer must occur exactly
        # once, but tools and messages may contain digits, too. The stand-in answer contains each digit once, so that no
        # two occurrences can overlap.
        for digits in itertools.islice(itertools.permutations(_DIGITS), _STAND_INS):
            answer = "".join(digits)
            before = [{"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
            text = self._rendered([*before, *messages], tools)
            occurrences = text.count(answer)
            if occurrences == 1:
                return text.partition(answer)[2]
            if not occurrences:
                break
        raise ValueError("the chat template does not write an assistant's answer unchanged and exactly once")

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        prompted: bool = True,
        args: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text. Unless `prompted`, nothing follows that asks for an answer."""
        text: str = self._tokenizer.apply_chat_template(
            texts_of(messages),
            tools=tools,
            add_generation_prompt=prompted and self._add_generation_prompt,
            tokenize=False,
            **{**self._template_args, **args},
        )
        return text

    def _ids(self, text: str, at_most: int | None) -> list[int]:
        """Return the token ids of rendered text, which already contains its special tokens."""
        self._check_length(text, at_most)
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _check_length(self, text: str, at_most: int | None) -> None:
        """Raise PromptTooLong if a prefix of the text shows that the text is too long.

        Each prefix is twice as long as the previous one, since a token may stand for any number of characters.
        Tokenising all of a text that is too long would hold up the other users of the tokenizer.
        """
        if at_most is None:
            return
        most = max(at_most, 0) + _EDGE_TOKENS
        looked_at = _CHARACTERS * most
        while looked_at < len(text):
            tokens = len(self._tokenizer(text[:looked_at], add_special_tokens=False)["input_ids"])
            if tokens > most:
                raise PromptTooLong(
                    f"a prompt of {len(text)} characters: its first {looked_at} characters have {tokens} tokens, but "
                    f"there is room for {at_most}"
                )
            looked_at *= 2

    def completion(self, token_ids: list[int], stop: tuple[str, ...]) -> str:
        """Return the text of sampled tokens without special tokens, cut before the first stop text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [at for at in (text.find(ending) for ending in stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens included. A character made up of several tokens belongs to the
        last of them."""
        unknown = [token for token in dict.fromkeys(token_ids) if token not in self._pieces]
        self._pieces.update(zip(unknown, map(self._text_of, ([token] for token in unknown)), strict=True))
        pieces = [self._pieces[token] for token in token_ids]
        at = 0
        while at < len(pieces):
            for end in range(at + 2, min(at + _CHARACTER_TOKENS, len(pieces)) + 1) if _BROKEN in pieces[at] else ():
                text = self._text_of(token_ids[at:end])
                if _BROKEN not in text:
                    pieces[at:end] = [*[""] * (end - at - 1), text]
                    at = end - 1
                    break
            at += 1
        return pieces

    def _text_of(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text


def texts_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the text of each. Raises ValueError for content that is not text."""
    for message in messages:
        if isinstance(message.get("content"), list) and (part := not_text(message["content"])):
            raise ValueError(f"a message of role {message.get('role')}: {part}; a policy reads text only")
    return [m | {"content": content_text(m)} if isinstance(m.get("content"), list) else m for m in messages]


def _stand_in_call(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a call that a tool's result may follow if the answer contains none."""
    function = {"name": str(result.get("name") or "tool"), "arguments": {}}
    return [{"type": "function", "id": str(result.get("tool_call_id") or "call"), "function": function}]
