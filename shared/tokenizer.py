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
from shared.topology.model_files import AnswerEnds, end_tokens

_ANSWER = "0123456789"


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


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens by id."""
    return {int(number): token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


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
    special = special_tokens(tokenizer)
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
