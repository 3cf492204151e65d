"""Text to tokens and back, with the policy's tokenizer. Sampled tokens are decoded for rewards only: what is trained
on is never tokenised again."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PromptBuilder:
    """Belongs to one thread at a time: fast tokenizers refuse concurrent use."""

    def __init__(self, model: Path, *, add_generation_prompt: bool) -> None:
        """Loads the tokenizer of the model directory; imports transformers."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._add_generation_prompt = add_generation_prompt

    def token_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of the row's prompt: raw text as it is, messages through the chat template.

        Raises ValueError in one line when there is no prompt or the template cannot take it.
        """
        prompt = row.get("prompt")
        try:
            if isinstance(prompt, str):
                ids = self._tokenizer(prompt)["input_ids"]
            elif isinstance(prompt, list):
                ids = self._tokenizer.apply_chat_template(
                    prompt,
                    tools=row.get("tools"),
                    add_generation_prompt=self._add_generation_prompt,
                    tokenize=True,
                    return_dict=False,
                )
            else:
                raise ValueError("row has no prompt: text or a list of messages")
        except Exception as error:  # a template may raise anything over a row
            raise ValueError(f"{error}".replace("\n", " ")[:200]) from None
        if not ids:
            raise ValueError("prompt has no tokens")
        return [int(token) for token in ids]

    def completion(self, token_ids: list[int], stop: tuple[str, ...]) -> str:
        """The text of sampled tokens without special tokens, cut before the first stop text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [at for at in (text.find(each) for each in stop) if at >= 0]
        return text[: min(ends)] if ends else text


def messages_of(row: dict[str, Any], completion: str) -> list[dict[str, Any]]:
    """The conversation with the assistant's answer; a raw-text prompt counts as one user message."""
    prompt = row["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*before, {"role": "assistant", "content": completion}]
