"""The tokens of one sample's calls. This module decides which sequence a call continues and what is appended to it.

Sampled tokens are kept as they are; their text is not tokenised again. A call continues a sequence if its messages mean
the same as the sequence's history, however an agent has rewritten them. Messages that a policy would read differently
do not compare equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.rollout.engine import FinishReason, Generation
from services.rollout.sampling.prompts import PromptBuilder, PromptTooLong
from shared.data.source import content_text
from shared.openai_api.tools import called, tool_calls
from shared.workflow import ContextFull, Message, Sequence, WorkflowError

_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


@dataclass(eq=False)
class _Open:
    """A sequence and the history that its tokens encode. `tools` are part of its first prompt."""

    history: list[Message]
    tools: list[dict[str, Any]] | None
    tokens: Sequence = field(default_factory=Sequence)
    busy: bool = False


@dataclass(frozen=True)
class PreparedCall:
    """A call to sample. `prompt_ids` is the whole input; its last `added` tokens are not in the sequence yet."""

    sequence: _Open
    messages: list[Message]
    prompt_ids: list[int]
    added: int


class Conversation:
    """All sequences of one sample. Only the tokenizer's thread uses them."""

    def __init__(self, prompts: PromptBuilder, *, context_tokens: int, max_tokens: int, max_new_tokens: int) -> None:
        """`context_tokens` is the model's limit, `max_tokens` limits all sequences together, and `max_new_tokens` one
        call."""
        self._prompts = prompts
        self._context_tokens = context_tokens
        self._max_tokens = max_tokens
        self._max_new_tokens = max_new_tokens
        self._open: list[_Open] = []
        self._reserved_tokens = 0
        self.last_messages: list[Message] = []
        self.last_text = ""
        self.finish_reason = FinishReason.UNFINISHED
        self.turns = 0

    def begin(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> PreparedCall:
        """Return the call for a history. It continues the longest matching sequence, or opens a new one.

        Raises ContextFull if the call does not fit, and WorkflowError if the chat template rejects the messages.
        """
        if not messages:
            raise WorkflowError("a chat needs at least one message")
        try:
            for sequence in sorted(self._open, key=lambda each: -len(each.history)):
                begun = len(sequence.history)
                if sequence.busy or sequence.tools != tools or not _continues(messages, sequence.history):
                    continue
                tokens = sequence.tokens.token_ids
                room = self._context_tokens - len(tokens)
                calls = messages[begun - 1].get("tool_calls")
                added = self._prompts.continuation(messages[begun:], tools, tokens, room, calls)
                return self._reserve(PreparedCall(sequence, messages, [*tokens, *added], len(added)))
            ids = self._prompts.token_ids({"prompt": messages, "tools": tools}, self._context_tokens)
        except PromptTooLong as error:
            raise ContextFull(f"{error} (the model's context: {self._context_tokens})") from None
        except ValueError as error:
            raise WorkflowError(f"{error}") from None
        return self._reserve(PreparedCall(_Open([], tools), messages, ids, len(ids)))

    def begin_text(self, prompt: str) -> PreparedCall:
        """Return the call for raw text, which always opens a new sequence. Raises the same errors as `begin`."""
        try:
            ids = self._prompts.token_ids({"prompt": prompt}, self._context_tokens)
        except PromptTooLong as error:
            raise ContextFull(f"{error} (the model's context: {self._context_tokens})") from None
        except ValueError as error:
            raise WorkflowError(f"{error}") from None
        return self._reserve(PreparedCall(_Open([], None), [{"role": "user", "content": prompt}], ids, len(ids)))

    def room(self, call: PreparedCall) -> int:
        """Return the number of tokens that the call may sample."""
        return min(self._max_new_tokens, self._context_tokens - len(call.prompt_ids))

    def end(self, call: PreparedCall, generation: Generation, versions: list[int], text: str) -> None:
        """Append the sampled tokens to the call's sequence. `versions` holds the policy version of each token."""
        sequence, tokens = call.sequence, call.sequence.tokens
        if sequence not in self._open:
            self._open.append(sequence)
        self.give_up(call)
        new, sampled = call.prompt_ids[len(call.prompt_ids) - call.added :], generation.token_ids.tolist()
        tokens.token_ids += [*new, *sampled]
        tokens.loss_mask += [0] * len(new) + [1] * len(sampled)
        tokens.logprobs += [0.0] * len(new) + generation.logprobs.tolist()
        tokens.versions += [-1] * len(new) + versions
        tokens.turns.append((self.turns, len(tokens.token_ids) - 1))
        sequence.history = [*call.messages, {"role": "assistant", "content": text}]
        self.last_messages, self.last_text = sequence.history, text
        self.finish_reason = generation.finish_reason
        self.turns += 1

    def give_up(self, call: PreparedCall) -> None:
        """Release the call's sequence and the tokens reserved for it."""
        call.sequence.busy = False
        self._reserved_tokens -= call.added + self.room(call)

    def sequences(self) -> list[Sequence]:
        """Return all sequences in the order in which they were opened."""
        return [sequence.tokens for sequence in self._open]

    def _reserve(self, call: PreparedCall) -> PreparedCall:
        room = self.room(call)
        if room < 1:
            raise ContextFull(
                f"a prompt of {len(call.prompt_ids)} tokens leaves no room in the model's context of "
                f"{self._context_tokens}"
            )
        taken = sum(len(sequence.tokens.token_ids) for sequence in self._open) + self._reserved_tokens
        if taken + call.added + room > self._max_tokens:
            raise ContextFull(
                f"{taken} tokens so far, {call.added} to add and {room} to sample exceed workflow.max_tokens "
                f"({self._max_tokens}) for one sample"
            )
        call.sequence.busy = True
        self._reserved_tokens += call.added + room
        return call


def _continues(messages: Items[Message], history: Items[Message]) -> bool:
    """Return whether `messages` begins with `history` and is longer."""
    return len(messages) > len(history) and all(map(same, messages, history))


def same(one: Message, other: Message) -> bool:
    """Return whether both messages mean the same thing. Fields that agents add (such as refusal: null) are ignored."""
    # The messages are compared as JSON, in which True, 1 and 1.0 differ.
    return one is other or _encoded(_plain(one)) == _encoded(_plain(other))


def _plain(message: Message) -> dict[str, Any]:
    kept = {key: message[key] for key in _COMPARED if message.get(key)}
    if "content" in kept:
        kept["content"] = content_text(message)
    if message.get("role") == "assistant" and "tool_calls" in kept and isinstance(kept.get("content"), str):
        written = [[call.name, call.arguments] for call in tool_calls(kept["content"])]
        # An agent that returns the calls next to the text from which they were parsed has changed nothing.
        with contextlib.suppress(AttributeError, TypeError):
            if _encoded(called(kept["tool_calls"])) == _encoded(written):
                del kept["tool_calls"]
    return kept


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
