"""Loads a model folder's tokenizer, and says with which token the answers end on which a policy is trained.

`python -m shared.tokenizer FOLDER` prints the `AnswerEnds` as a JSON line, for processes that import no model library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from shared.rpc.errors import BadInput
from shared.topology.model_files import end_tokens

_ANSWER = "0123456789"


class AnswerEnds(msgspec.Struct, frozen=True):
    """The ids of the tokens that end an answer: `text` for raw prompts, and `turn` for prompts that consist of messages
    (None if there is none). Sampling ends at each token of `stop`."""

    stop: list[int]
    text: int | None
    turn: int | None

    def end(self, messages: bool) -> int:
        """Return the token that ends the answer to a prompt. Raises a one-line ValueError if sampling would not end at
        it, or if there is none."""
        number = self.turn if messages else self.text
        if number is None:
            raise ValueError("the tokenizer has no end-of-sequence token, so an answer could not end")
        if number not in self.stop:
            raise ValueError(
                f"the chat template ends an answer with token {number}, but sampling ends at {self.stop} only; add it "
                "to eos_token_id in the model's generation_config.json"
            )
        return number


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer from the model directory. No code of the model is run. This imports transformers.

    Raises BadInput.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"model {model}: no tokenizer: {first[:300]}") from error


def answer_ends(model: Path, tokenizer: Any) -> AnswerEnds:
    """Return the tokens that end answers. Raises BadInput if the model's files contradict each other."""
    try:
        stop = end_tokens(str(model))
    except ValueError as error:
        raise BadInput(f"model {model}: {error}") from None
    own = tokenizer.eos_token_id
    if own is not None and own not in stop:
        raise BadInput(
            f"model {model}: its tokenizer ends texts with token {own}, which neither tokenizer_config.json and "
            f"tokenizer.json nor generation_config.json names (they name {stop}); write the tokenizer with "
            "save_pretrained, or add the token to eos_token_id in generation_config.json"
        )
    turn = _turn_end(tokenizer)
    return AnswerEnds(stop, own, own if turn is None else turn)


def _turn_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after an assistant's answer, or None if it writes none."""
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception:  # a template may raise anything
        return None
    special = {int(number) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for number in tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]:
        if int(number) in special:
            return int(number)
        if tokenizer.decode([number]).strip():
            break
    return None


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    print(json.dumps(msgspec.to_builtins(answer_ends(folder, load_tokenizer(folder)))))


if __name__ == "__main__":
    main(sys.argv[1:])
