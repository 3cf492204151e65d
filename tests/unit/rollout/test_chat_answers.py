"""Tests which tokens of a conversation supervised fine-tuning trains on, for several chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import TaskHandle
from services.rollout.sampling.answers import dataset_answers
from services.rollout.sampling.prompts import GivenAnswer, NoChatTemplate, PromptBuilder
from services.rollout.sampling.tasks import ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, answers_of, single_turns
from shared.data.source import usable
from tests.unit.rollout.chat_models import CHATML, START, STRICT, chat_model

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": [{"type": "text", "text": "I say "}, "5"]},
    {"role": "user", "content": "Thanks."},
]
GIVEN = "<start>system\nAdd.<end>\n<start>user\n1+1=<end>\n<start>assistant\n"
TRAINED = ["2<end>", "I say 5<end>"]
ANSWER = "m['role'] == 'assistant'"
MARKED = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}"
    "{% if " + ANSWER + " %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<end>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
HEADED = MARKED.replace("{{ '<start>assistant\n' }}", "{{ '<start>assistant\n<think></think>' }}")
"""Its prompt for an answer is not how it writes answers, so only its marks say what is generated."""
THINKING = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}"
    "{% if " + ANSWER + " and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
"""Like the template of Qwen3, it leaves out the reasoning of earlier answers."""


def builder(folder: Path, template: str | None) -> PromptBuilder:
    return PromptBuilder(chat_model(folder, template=template), add_generation_prompt=True)


def texts(made: PromptBuilder, given: list[int], answer: GivenAnswer) -> tuple[str, list[str]]:
    """Return the text of the prompt, and each text of consecutive tokens that are trained on."""
    pieces, parts = made.pieces(answer.token_ids), [""]
    for piece, trained in zip(pieces, answer.trained, strict=True):
        if trained:
            parts[-1] += piece
        elif parts[-1]:
            parts.append("")
    return "".join(made.pieces(given)), parts


@pytest.mark.parametrize("template", [CHATML, STRICT, MARKED, HEADED], ids=["prefixes", "tools", "marks", "headed"])
def test_every_answer_is_trained_on_with_its_end_and_nothing_else(tmp_path: Path, template: str) -> None:
    made = builder(tmp_path, template)
    given, answer = made.conversation({"messages": MESSAGES})
    assert texts(made, given, answer) == (GIVEN, TRAINED)
    between = "".join(made.pieces([*given, *answer.token_ids]))
    assert between == GIVEN + "2<end>\n<start>user\n2+3=<end>\n<start>assistant\nI say 5<end>"


def test_the_tokens_before_an_answer_are_those_of_the_prompt_for_it(tmp_path: Path) -> None:
    made = builder(tmp_path, CHATML)
    given, answer = made.conversation({"messages": MESSAGES})
    assert given == made.token_ids({"prompt": MESSAGES[:2]})
    assert [*given, *answer.token_ids[: -answer.trained[::-1].index(False)]] == made.token_ids({"prompt": MESSAGES[:4]})


def test_a_call_of_a_tool_is_trained_on_and_its_result_is_not(tmp_path: Path) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"x": 1}}}
    made = builder(tmp_path, STRICT)
    given, answer = made.conversation(
        {
            "messages": [
                {"role": "user", "content": "1+1="},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "assistant", "content": "two"},
            ]
        }
    )
    _, (called, said) = texts(made, given, answer)
    assert called == '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><end>'
    assert said == "two<end>"


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (
            THINKING,
            [*MESSAGES[:2], {"role": "assistant", "content": "<think>1</think>2"}, *MESSAGES[3:]],
            "rewrites",
        ),
        (MARKED.replace("m['content'] + '<end>' }}", "m['content'] }}"), MESSAGES, "does not include a token at which"),
        (CHATML.replace("<end>", ""), MESSAGES, "does not include a token at which sampling ends"),
        (
            CHATML.replace("<start>assistant\n", "<start>assistant: "),
            MESSAGES,
            "does not continue its prompt for",
        ),
        (CHATML, MESSAGES[:2], "messages have no answer"),
        (CHATML, [*MESSAGES[:2], {"role": "assistant", "content": [{"type": "image"}]}], "a policy reads text only"),
        (
            "{% generation %}{% endgeneration %}" + CHATML,
            MESSAGES,
            "marks 1 texts as generated, but there are 2",
        ),
        ("{{ raise_exception('no system') }}", MESSAGES, "no system"),
    ],
    ids=["thinking", "marks", "no-end", "other-prompt", "no-answer", "image", "count", "raises"],
)
def test_a_conversation_that_cannot_be_learned_as_it_would_be_sampled_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        builder(tmp_path, template).conversation({"messages": messages})
    assert "\n" not in str(caught.value)


def test_a_single_thought_answer_is_trained_on_whole(tmp_path: Path) -> None:
    made = builder(tmp_path, THINKING)
    said = {"role": "assistant", "content": "<think>1</think>2"}
    assert texts(made, *made.conversation({"messages": [*MESSAGES[:2], said]}))[1] == ["<think>1</think>2<end>"]


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(NoChatTemplate):
        builder(tmp_path, None).conversation({"messages": MESSAGES})


def test_only_the_answers_of_a_conversation_count_in_its_shards() -> None:
    given = GivenAnswer([5, 6, 7], [True, False, True])
    task = ReadyTask(TaskHandle("train/0/1", 1), {"messages": MESSAGES}, [START], [given])
    recited = dataset_answers([task], swaps=2)
    assert recited is not None
    (completions,) = answers_of(recited, BlockVersions(4, 2))
    ((sequence,),) = single_turns(task.prompt_ids, completions, [np.array(given.trained)])
    assert sequence.token_ids.tolist() == [START, 5, 6, 7]
    assert sequence.loss_mask.tolist() == [0, 1, 0, 1]
    assert sequence.versions.tolist() == [-1, 4, -1, 4]


def test_the_prompt_of_a_conversation_is_what_precedes_its_first_answer() -> None:
    row = usable({"messages": MESSAGES}, {}, "rows:1", str)
    assert row["prompt"] == MESSAGES[:2]
    own = usable({"messages": MESSAGES, "prompt": "text"}, {}, "rows:1", str)
    assert own["prompt"] == "text"
