"""Tests prompts and answers with tokenizers and chat templates as models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engine import FinishReason, Generation
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.workflows.conversation import Conversation
from shared.rpc.errors import BadInput
from shared.tokenizer import answer_ends, load_tokenizer
from shared.topology.model_files import end_tokens
from tests.unit.rollout.chat_models import CHATML, END, EOS, STRICT, chat_model

CHAT: dict[str, Any] = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
TEXT: dict[str, Any] = {"prompt": "1+1=", "answer": "2"}
CALL: dict[str, Any] = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"x": 1}}}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "46"}


def builder(folder: Path) -> PromptBuilder:
    return PromptBuilder(folder, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("eos", "generation", "config", "ends"),
    [
        ("<end>", None, {"eos_token_id": EOS}, [END, EOS]),
        ("<end>", {"eos_token_id": [0, EOS]}, {"eos_token_id": 5}, [0, END, EOS]),
        ("<eos>", {"eos_token_id": END}, {}, [END, EOS]),
        ("<end>", {}, {"eos_token_id": None}, [END]),
        ("<end>", {}, {"eos_token_id": None, "text_config": {"eos_token_id": 7}}, [END, 7]),
    ],
)
def test_sampling_ends_at_the_tokens_of_the_tokenizer_and_of_the_generation_config(
    tmp_path: Path, eos: str, generation: dict[str, Any] | None, config: dict[str, Any], ends: list[int]
) -> None:
    model = chat_model(tmp_path, eos=eos, generation=generation, config=config)
    assert end_tokens(str(model)) == ends
    assert load_tokenizer(model).eos_token_id in ends


@pytest.mark.parametrize("named", [-1, True, "2", [2, 1.5], {"id": 2}])
def test_an_end_token_that_is_no_token_id_is_refused(tmp_path: Path, named: object) -> None:
    model = chat_model(tmp_path, generation={"eos_token_id": named})
    with pytest.raises(ValueError, match="not a token id or a list of them"):
        end_tokens(str(model))
    with pytest.raises(BadInput, match=r"generation_config\.json: eos_token_id is"):
        builder(model)


def test_an_answer_to_messages_ends_as_the_chat_template_ends_it_and_one_to_text_as_the_tokenizer_does(
    tmp_path: Path,
) -> None:
    made = builder(chat_model(tmp_path, eos="<eos>", generation={"eos_token_id": END}))
    assert made.answer(CHAT).token_ids[-1] == END
    assert made.answer(TEXT).token_ids[-1] == EOS


def test_an_answer_whose_end_does_not_end_sampling_is_refused(tmp_path: Path) -> None:
    made = builder(chat_model(tmp_path, eos="<eos>", generation={"eos_token_id": EOS}))
    assert made.answer(TEXT).token_ids[-1] == EOS
    with pytest.raises(ValueError, match=r"ends an answer with token 2, but sampling ends at \[3\] only; add it"):
        made.answer(CHAT)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, END),
        (CHATML.replace("'<end>\n'", "'\n<end>\n'"), END),
        (CHATML.replace("'<end>\n'", "'\n'"), EOS),  # no token ends the turn
        (CHATML.replace("'<end>\n'", "'. Bye.<end>\n'"), EOS),
        ("{{ raise_exception('no') }}", EOS),
        (None, EOS),
    ],
)
def test_the_end_of_an_answer_is_the_special_token_that_the_template_writes(
    tmp_path: Path, template: str | None, end: int
) -> None:
    model = chat_model(tmp_path, eos="<eos>", template=template)
    assert answer_ends(model, load_tokenizer(model)).turn == end


def test_a_prompt_does_not_end_with_a_token_that_the_tokenizer_appends_to_every_text(tmp_path: Path) -> None:
    plain, appending = builder(chat_model(tmp_path / "a")), builder(chat_model(tmp_path / "b", appended=True))
    assert load_tokenizer(tmp_path / "b")("1+1=")["input_ids"][-1] == END
    for row in (TEXT, CHAT):
        assert appending.token_ids(row) == plain.token_ids(row)


def test_texts_of_a_messages_parts_are_joined(tmp_path: Path) -> None:
    made = builder(chat_model(tmp_path))
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    assert made.token_ids({"prompt": [{"role": "user", "content": parts}]}) == made.token_ids(CHAT)
    with pytest.raises(ValueError, match="role user: part 1 of its content is no text but image_url"):
        made.token_ids({"prompt": [{"role": "user", "content": [parts[0], {"type": "image_url"}]}]})


@pytest.mark.parametrize("calls", [[CALL], None])
def test_a_template_that_wants_a_call_before_its_result_gets_one(
    tmp_path: Path, calls: list[dict[str, Any]] | None
) -> None:
    made = builder(chat_model(tmp_path, template=STRICT))
    conversation = Conversation(made, context_tokens=512, max_tokens=512, max_new_tokens=64)
    asked = conversation.begin(CHAT["prompt"], None)
    sampled = [40, 41, END]
    generation = Generation(
        np.array(sampled, np.int32), np.zeros(3, np.float32), FinishReason.STOP, np.zeros(3, np.int32)
    )
    conversation.end(asked, generation, [0] * 3, "answer")
    said: dict[str, Any] = {"role": "assistant", "content": "answer"} | ({"tool_calls": calls} if calls else {})
    if calls:  # an agent that returns the calls instead of the text
        conversation._open[0].history[-1]["tool_calls"] = calls
    call = conversation.begin([*CHAT["prompt"], said, RESULT], None)
    text = made._tokenizer.decode(call.prompt_ids)
    assert text.startswith("<start>user\n1+1=<end>\n<start>assistant\n")
    assert text.endswith("<end>\n<start>tool\n46<end>\n<start>assistant\n")
    assert "<end><end>" not in text
    assert call.prompt_ids[: len(asked.prompt_ids) + 3] == [*asked.prompt_ids, *sampled]


def test_variables_of_the_chat_template_can_be_set(tmp_path: Path) -> None:
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
    model = chat_model(tmp_path, template=template)
    plain, silent = (
        PromptBuilder(model, add_generation_prompt=True, template_args=args)._rendered(CHAT["prompt"], None)
        for args in ({}, {"enable_thinking": False})
    )
    assert silent == f"{plain}none"


def test_a_template_that_writes_the_date_writes_the_same_one_in_every_deterministic_run(tmp_path: Path) -> None:
    model = chat_model(tmp_path, template="{{ strftime_now('%d %b %Y') }}" + CHATML)
    fixed, now = (
        PromptBuilder(model, add_generation_prompt=True, fixed_clock=fixed)._rendered(CHAT["prompt"], None)
        for fixed in (True, False)
    )
    assert fixed.startswith("01 Jan 2025<start>")
    assert not now.startswith("01 Jan 2025")
