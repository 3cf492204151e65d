"""Tests the prompts and sampling settings for a lease: templates, limits, and rows that cannot be sampled."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proto.messages import BatchMeta, DropReason, ErrorCode, LeaseGrant, Outcome, TaskHandle
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import TaskSets, prepare
from shared.data.open import open_source
from shared.data.source import read_rows
from shared.lease import Lease, LeaseLost
from shared.rpc.errors import RpcError
from shared.sample import messages_of
from shared.topology import load
from tests.unit.rollout.rollout_engine import MODEL

TOPOLOGY = """\
run: {{name: tasks-test, steps: 3, seed: 11}}
policy: {{model: {model}, dtype: float32}}
data:
  train: {{source: "jsonl:rows.jsonl", max_prompt_tokens: 60}}
  eval:
    held: {{source: "builtin:addition?split=test", samples: 2, temperature: 0.5, max_new_tokens: 4}}
    same: {{source: "builtin:addition?split=test"}}
reward: {{function: "builtin:exact_match"}}
sampling: {{temperature: 0.9, max_new_tokens: 8, stop: ["1"]}}
algorithm: {{tasks_per_step: 4, group_size: 4, loss: {{anchor: rollout}}}}
optimizer: {{lr: 1.0e-4}}
"""
ROWS = [
    {"prompt": "1+2=", "answer": "3"},
    {"prompt": [{"role": "user", "content": "1+2="}]},
    {"prompt": "1+2=" * 16},
    {"answer": "3"},
]


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=True)


@pytest.fixture
def sets(tmp_path: Path, prompts: PromptBuilder) -> TaskSets:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "t.yaml").write_text(TOPOLOGY.format(model=MODEL))
    return TaskSets(load(tmp_path / "t.yaml"), prompts, context_tokens=512)


def grant(split: str, *indices: int, group_size: int = 4, epoch: int = 0) -> LeaseGrant:
    tasks = [TaskHandle(f"{split}/{epoch}/{index}", 1) for index in indices]
    return LeaseGrant(
        lease_id=1,
        stage="rollout",
        split=split,
        lease_s=30,
        batch=BatchMeta(tasks=tasks),
        group_size=group_size,
        block_rows=16,
    )


def test_train_tasks_are_sampled_with_the_settings_from_the_topology(sets: TaskSets) -> None:
    prepared = sets.prepare(grant("train", 0, 1))
    sampling = prepared.sampling
    assert (sampling.samples, sampling.temperature, sampling.max_new_tokens) == (4, 0.9, 8)
    assert (sampling.seed, sampling.stop, sampling.block_rows) == (11, ("1",), 16)
    assert prepared.min_survivors == 2
    assert [task.prompt().name for task in prepared.ready] == ["train/0/0", "train/0/1"]


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if think %}={% endif %}"


def of_sources(folder: Path, train: str) -> TaskSets:
    """Return the task sets of two sources with two rows each, of messages in `chat` and of texts in `raw`."""
    model = Path(shutil.copytree(MODEL, folder / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        [{"role": "user", "content": "1+2="}],
        [{"role": "system", "content": "9"}, {"role": "user", "content": "3"}],
    ]
    for name, made in (("chat", chats), ("raw", ["4+5=", "1234567890"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in made))
    text = TOPOLOGY.format(model=model).replace('source: "jsonl:rows.jsonl", max_prompt_tokens: 60', train)
    (folder / "t.yaml").write_text(text)
    return TaskSets(load(folder / "t.yaml"), PromptBuilder(model, add_generation_prompt=True), context_tokens=512)


def test_a_source_adds_its_system_message_and_its_variables_of_the_template(tmp_path: Path) -> None:
    chat = '{source: "jsonl:chat.jsonl", system: "7", chat_template: {think: true}}'
    sets = of_sources(tmp_path, f'sources: {{chat: {chat}, raw: {{source: "jsonl:raw.jsonl"}}}}')
    tokenizer = PromptBuilder(tmp_path / "model", add_generation_prompt=True)
    ready = sets.prepare(grant("train", 0, 1, 2, 3)).ready
    texts = ["".join(tokenizer.pieces(task.prompt_ids)) for task in ready]
    assert [text.replace("<unk>", "") for text in texts][2:] == ["4+5=", "1234567890"]
    assert [task.source for task in ready] == ["chat", "chat", "raw", "raw"]
    assert [message["content"] for message in ready[0].row["prompt"]] == ["7", "1+2="]
    assert [message["content"] for message in ready[1].row["prompt"]] == ["9", "3"]  # It has a system message.
    assert texts[0].endswith("1+2==")
    assert "7" in texts[0]
    [evaluated] = sets.prepare(grant("same", 3)).ready
    assert evaluated.source == ""


def test_rows_of_a_source_keep_their_numbers_when_rows_are_added_to_the_one_before(tmp_path: Path) -> None:
    train = 'sources: {raw: {source: "jsonl:raw.jsonl"}, chat: {source: "jsonl:chat.jsonl"}}'
    sets = of_sources(tmp_path, train)
    begun = {
        f"data.train.sources.{name}.source": read_rows(open_source(f"jsonl:{tmp_path}/{name}.jsonl", where="")).digests
        for name in ("raw", "chat")
    }
    before = [task.row["prompt"] for task in sets.prepare(grant("train", 0, 1, 2, 3)).ready]
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write('{"prompt": "1"}\n')
    prompts = PromptBuilder(tmp_path / "model", add_generation_prompt=True)
    again = TaskSets(load(tmp_path / "t.yaml"), prompts, context_tokens=512, begun=begun)
    assert [task.row["prompt"] for task in again.prepare(grant("train", 0, 1, 2, 3)).ready] == before


@pytest.mark.parametrize(("cut", "left"), [("left", "7890"), ("right", "1234"), ("drop", None)])
def test_a_prompt_that_is_too_long_is_cut_or_dropped(cut: str, left: str | None, tmp_path: Path) -> None:
    raw = '{source: "jsonl:raw.jsonl", max_prompt_tokens: 4}'
    sets = of_sources(tmp_path, f"truncate: {cut}, sources: {{raw: {raw}}}")
    prepared = sets.prepare(grant("train", 0, 1))
    texts = ["".join(sets._prompts.pieces(task.prompt_ids)) for task in prepared.ready]
    assert texts == (["4+5="] if left is None else ["4+5=", left])
    limit = r"prompt of 10 tokens: the limit is 4 \(data\.train\.sources\.raw\.max_prompt_tokens\)"
    assert [bool(re.search(limit, result.reason)) for result in prepared.dropped] == [True] * (left is None)


def test_a_system_message_before_a_text_drops_the_row_and_says_so(tmp_path: Path) -> None:
    sets = of_sources(tmp_path, 'sources: {raw: {source: "jsonl:raw.jsonl", system: "7"}}')
    [result] = sets.prepare(grant("train", 0)).dropped
    assert result.why == DropReason.BAD_ROW
    assert "the prompt is text, which data.train.sources.raw.system cannot precede; use messages" in result.reason


def test_raw_text_is_tokenised_unchanged_and_messages_through_the_template(sets: TaskSets) -> None:
    raw, chat = sets.prepare(grant("train", 0, 1)).ready
    assert len(raw.prompt_ids) == 4
    assert len(chat.prompt_ids) > 4
    assert messages_of(raw.row, "3") == [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert messages_of(chat.row, "3")[1:] == [{"role": "assistant", "content": "3"}]


def test_long_prompts_and_bad_rows_are_dropped_and_reported_and_all_other_rows_continue(sets: TaskSets) -> None:
    prepared = sets.prepare(grant("train", 2, 0, 3))
    assert [task.handle.task_id for task in prepared.ready] == ["train/0/0"]
    long, bad = prepared.dropped
    assert (long.task_id, long.outcome) == ("train/0/2", Outcome.DROP)
    assert "train/0/2" in long.reason
    assert "rows.jsonl" in long.reason
    assert "prompt of 64 tokens: the limit is 60 (data.train.max_prompt_tokens)" in long.reason
    assert "rows.jsonl:4: row has no prompt" in bad.reason
    assert (long.why, bad.why) == (DropReason.TOO_LONG, DropReason.BAD_ROW)
    assert list(prepared.not_sampled) == ["train/0/2"]  # the other row could not be read
    assert "prompt" in prepared.not_sampled["train/0/2"]


def test_messages_without_a_chat_template_are_dropped_for_that_reason(sets: TaskSets, tmp_path: Path) -> None:
    bare = shutil.copytree(MODEL, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    without = TaskSets(load(tmp_path / "t.yaml"), PromptBuilder(bare, add_generation_prompt=True), context_tokens=512)
    prepared = without.prepare(grant("train", 0, 1))
    assert [task.handle.task_id for task in prepared.ready] == ["train/0/0"]
    assert [each.why for each in prepared.dropped] == [DropReason.NO_CHAT_TEMPLATE]
    assert "rows.jsonl:2: the prompt has messages, but the model's tokenizer has no chat template" in (
        prepared.dropped[0].reason
    )


def test_rewards_see_the_whole_trained_answer_in_supervised_fine_tuning(prompts: PromptBuilder, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+2=", "answer": "3 1 4"}) + "\n")
    text = TOPOLOGY.format(model=MODEL).replace(
        "group_size: 4, loss: {anchor: rollout}", "group_size: 1, loss: {name: cross_entropy}"
    )
    (tmp_path / "t.yaml").write_text(text)
    supervised = TaskSets(load(tmp_path / "t.yaml"), prompts, context_tokens=512)
    trained = supervised.prepare(grant("train", 0, group_size=1))
    (task,) = trained.ready
    assert task.answers is not None
    assert prompts.completion(task.answers[0].token_ids, trained.sampling.stop) == "3 1 4"
    evaluated = supervised.prepare(grant("same", 0, group_size=1))
    # Sampled text still ends at the stop text.
    assert prompts.completion(task.answers[0].token_ids, evaluated.sampling.stop) == "3 "


def test_a_preference_has_two_answers_and_is_dropped_if_either_is_too_long(
    prompts: PromptBuilder, tmp_path: Path
) -> None:
    rows = [{"chosen": "3", "rejected": "12"}, {"chosen": "3", "rejected": "123456789"}, {"chosen": "3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "1+2=", **row}) + "\n" for row in rows))
    text = TOPOLOGY.format(model=MODEL).replace("temperature: 0.9, ", "")
    text = text.replace("group_size: 4, loss: {anchor: rollout}", "loss: {name: simpo}")
    (tmp_path / "t.yaml").write_text(text)
    made = TaskSets(load(tmp_path / "t.yaml"), prompts, context_tokens=512).prepare(
        grant("train", 0, 1, 2, group_size=2)
    )
    (task,) = made.ready
    assert [prompts.completion(answer.token_ids, ()) for answer in task.answers or ()] == ["3", "12"]
    assert made.min_survivors == 2
    assert [each.why for each in made.dropped] == [DropReason.TOO_LONG, DropReason.BAD_ROW]
    assert "rejected of 10 tokens: the limit is 8 (sampling.max_new_tokens)" in made.dropped[0].reason
    assert "row has no rejected" in made.dropped[1].reason


def test_an_evaluation_uses_its_own_sampling_settings(sets: TaskSets) -> None:
    prepared = sets.prepare(grant("held", 0, group_size=2))
    assert (prepared.sampling.temperature, prepared.sampling.max_new_tokens, prepared.min_survivors) == (0.5, 4, 1)
    assert sets.prepare(grant("same", 0, group_size=1)).sampling.max_new_tokens == 8


def test_a_split_that_the_topology_lacks_is_refused(sets: TaskSets) -> None:
    with pytest.raises(RpcError, match=r"data\.eval\.other is not set") as caught:
        sets.prepare(grant("other", 0))
    assert caught.value.code == ErrorCode.BAD_REQUEST


def test_a_prompt_must_leave_room_for_the_completion(tmp_path: Path, prompts: PromptBuilder) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "t.yaml").write_text(TOPOLOGY.format(model=MODEL))
    tight = TaskSets(load(tmp_path / "t.yaml"), prompts, context_tokens=11)
    (dropped,) = tight.prepare(grant("train", 0)).dropped
    assert "limit is 3 (the model's context of 11 less 8 new tokens)" in dropped.reason


def test_a_prompt_of_megabytes_is_dropped_as_too_long_before_all_of_it_is_tokenised(
    sets: TaskSets, tmp_path: Path
) -> None:
    for prompt in ("9" * 2_000_000, [{"role": "user", "content": "9" * 2_000_000}]):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        again = TaskSets(
            load(tmp_path / "t.yaml"), PromptBuilder(MODEL, add_generation_prompt=True), context_tokens=512
        )
        (dropped,) = again.prepare(grant("train", 0)).dropped
        assert dropped.why == DropReason.TOO_LONG
        assert "rows.jsonl:1: a prompt of 2000" in dropped.reason
        assert "characters have" in dropped.reason
        assert dropped.reason.endswith("there is room for 60 (data.train.max_prompt_tokens)")


def test_a_completion_is_cut_before_the_first_stop_text(sets: TaskSets, prompts: PromptBuilder) -> None:
    ids = prompts.token_ids({"prompt": "90+12"})
    sampling = sets.prepare(grant("train", 0)).sampling
    assert prompts.completion(ids, sampling.stop) == "90+"


def test_a_lease_is_prepared_a_few_tasks_at_a_time_and_reports_progress(sets: TaskSets) -> None:
    lease = Lease(grant("train", 0, 1, 2, 0, 1, 3, 0, 1, 0), lambda: 0)
    seen: list[int] = []

    async def on_text(work: Callable[[], Any]) -> Any:
        seen.append(lease.progress)
        return work()

    prepared = asyncio.run(prepare(sets, lease, on_text))
    assert seen == [0, 1, 2]
    at_once = sets.prepare(lease.grant)
    assert prepared == at_once
    assert [len(prepared.ready), len(prepared.dropped)] == [7, 2]
    lease.give_up()
    with pytest.raises(LeaseLost):
        asyncio.run(prepare(sets, lease, on_text))
    assert len(seen) == 3
