"""Tests the records that are built from shards."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from proto.messages import EndedTask
from proto.tensors import Array
from services.recorder.build import bare, records
from services.recorder.files import SampleFiles
from shared.samples.reader import read
from shared.samples.record import SampleState, group_scores, split_of
from shared.samples.text import SampleText, TaskText, pack, unpack
from shared.stages import text_limit_bytes


def shards() -> dict[str, Array]:
    """Return the shards of two samples.

    The second sample has two sequences; the first of these has a token that was not sampled.
    """
    text = TaskText(
        "2 + 3 =",
        [
            SampleText("5", "stop", 1.0, {"exact": 1.0}, pieces=["5", "<eos>"]),
            SampleText("6", "length", 0.5, {"exact": 0.5}, {"calls": 1.0}, 2, 1, pieces=["a", "b", "c", "6"]),
        ],
        answer=5,
    )
    return {
        "token_ids": np.array([1, 2, 5, 9, 1, 7, 8, 7, 1, 2, 6], np.int32),
        "lengths": np.array([4, 4, 3], np.int32),
        "sample_index": np.array([0, 1, 1], np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1], np.uint8),
        "rollout_logprobs": np.array([0, 0, -0.5, -0.25, 0, -1, 0, -2, 0, 0, -3], np.float32),
        "versions": np.array([-1, -1, 3, 3, -1, 3, -1, 4, -1, -1, 4], np.int32),
        "text": pack(text, 11),
    }


ENDED = EndedTask("train/0/7", 1, "trained", 5, 2, 2, "batch-store/0")


def test_a_record_holds_the_tokens_of_each_sequence_from_the_first_sampled_token_on() -> None:
    one, two = records(ENDED, shards(), 9.0)
    assert (one.token_ids, one.pieces, one.logprobs, one.sampled) == ([5, 9], ["5", "<eos>"], [-0.5, -0.25], None)
    assert (one.prompt, one.completion, one.answer, one.rewards) == ("2 + 3 =", "5", 5, {"exact": 1.0})
    assert (one.task, one.sample, one.samples, one.step, one.lineage) == ("train/0/7", 0, 2, 5, 2)
    assert (two.token_ids, two.sampled) == ([7, 8, 7, 6], [1, 0, 1, 1])
    assert (two.versions, two.length, two.turns, two.tool_calls) == ([3, 4], 3, 2, 1)
    assert one.advantage is one.train_logprobs is None


def test_rewards_that_a_reward_model_made_take_the_place_of_those_of_the_rollout() -> None:
    ended = msgspec.structs.replace(ENDED, rewards={"reward": [3.0, -1.0], "reward/part/reward_model": [2.0, -1.5]})
    one, two = records(ended, shards(), 9.0)
    assert (one.reward, one.rewards) == (3.0, {"exact": 1.0, "reward_model": 2.0})
    assert (two.reward, two.rewards) == (-1.0, {"exact": 0.5, "reward_model": -1.5})
    assert (one.group_mean, one.group_best) == (1.0, 3.0)
    unscored = msgspec.structs.replace(ENDED, state="dropped", rewards={"reward": [math.nan, math.nan]})
    assert [(each.reward, each.group_mean) for each in records(unscored, shards(), 9.0)] == [(None, None)] * 2


def test_every_record_has_the_mean_and_the_best_reward_of_its_group() -> None:
    ended = EndedTask("held/3/0", 1, "scored", 3, 0, 2, "batch-store/0")
    for each in records(ended, shards(), 9.0):
        assert (each.group_mean, each.group_best) == (0.75, 1.0)
        assert group_scores(each) == {"group mean": 0.75, "group best": 1.0}
    assert group_scores(bare(ended, 9.0)) == {}


def test_advantages_and_the_trainers_log_probs_belong_to_their_samples() -> None:
    more = {
        "sample_advantages": np.array([0.5, -0.5], np.float32),
        "train_logprobs": np.array([0, 0, -0.4, -0.2, 0, -1.1, 0, -2.1, 0, 0, -3.1], np.float32),
    }
    one, two = records(ENDED, {**shards(), **more}, 9.0)
    assert (one.advantage, two.advantage) == (0.5, -0.5)
    assert (one.train_logprobs, two.train_logprobs) == ([-0.4, -0.2], [-1.1, 0, -2.1, -3.1])


def test_numbers_that_json_cannot_represent_do_not_hide_a_sample(tmp_path: Path) -> None:
    given = shards()
    given["rollout_logprobs"][2:4] = [np.nan, -np.inf]
    text = TaskText(
        "p", [SampleText("c", "stop", float("nan"), {"a": float("nan"), "b": 1.0}, {"m": float("inf")})] * 2
    )
    more = {"text": pack(text, 11), "sample_advantages": np.array([np.nan, np.inf], np.float32)}
    files = SampleFiles(tmp_path / "samples", 1 << 20)
    assert files.append(records(ENDED, {**given, **more}, 9.0))
    one, two = read(tmp_path)
    assert one.logprobs[0] == 0.0
    assert one.logprobs[1] < -1e38
    assert (one.reward, one.rewards, one.advantage) == (0.0, {"b": 1.0}, 0.0)
    assert one.metrics["m"] > 1e38
    assert two.advantage is not None
    assert two.advantage > 1e38


def test_log_probs_that_the_trainer_did_not_compute_are_left_out() -> None:
    more = {"sample_advantages": np.zeros(2, np.float32), "train_logprobs": np.zeros(11, np.float32)}
    assert [each.train_logprobs for each in records(ENDED, {**shards(), **more}, 9.0)] == [None, None]


def test_a_task_without_shards_has_one_record_that_gives_the_reason() -> None:
    record = bare(EndedTask("held/4/7", 1, "dropped", 4, 0, reason="too_long: 9 tokens"), 9.0)
    assert (record.split, record.sample, record.state) == ("eval/held", -1, SampleState.DROPPED)
    assert record.reason == "too_long: 9 tokens"
    assert split_of("train/1/2") == "train"


def test_failed_samples_come_last_without_a_reward_and_do_not_count_for_the_group() -> None:
    given = shards()
    text = unpack(given["text"])
    text.failed = [SampleText("hm", "length", None, failure="my:fn: no answer within 4 s", length=3)]
    one, _, lost = records(ENDED, {**given, "text": pack(text, 11)}, 9.0)
    assert (one.sample, one.samples, one.reward, one.failure) == (0, 3, 1.0, "")
    assert (lost.sample, lost.samples, lost.reward, lost.failure) == (2, 3, None, "my:fn: no answer within 4 s")
    assert (lost.prompt, lost.completion, lost.answer) == ("2 + 3 =", "hm", 5)
    assert (lost.length, lost.finish_reason, lost.token_ids) == (3, "length", [])
    assert (lost.group_mean, lost.group_best) == (0.75, 1.0)


def test_a_dropped_task_keeps_its_failed_samples_or_its_prompt() -> None:
    ended = EndedTask("train/0/7", 1, "dropped", 5, 2, 0, "batch-store/0", "reward_failed: 2 of 2 samples failed")
    failed = [SampleText(name, "stop", None, failure="f: no") for name in ("a", "b")]
    found = records(ended, {"text": pack(TaskText("2 + 3 =", [], 5, failed=failed), 8)}, 9.0)
    assert [(each.sample, each.samples, each.completion, each.reward) for each in found] == [
        (0, 2, "a", None),
        (1, 2, "b", None),
    ]
    assert {(each.state, each.reason, each.group_mean) for each in found} == {("dropped", ended.reason, None)}
    (only,) = records(ended, {"text": pack(TaskText("2 + 3 =", [], 5), 0)}, 9.0)
    assert (only.sample, only.samples, only.prompt, only.answer) == (-1, 1, "2 + 3 =", 5)


def test_text_beyond_its_limit_is_left_out_and_counted() -> None:
    huge = "\x1b[31m" * 2_000_000
    text = TaskText([{"role": "user", "content": huge}], [SampleText(huge, "stop", 1.0, pieces=[huge])], answer=huge)
    packed = pack(text, 8)
    assert packed.nbytes <= text_limit_bytes(8, 1)
    kept = unpack(packed)
    assert kept.samples[0].pieces == []
    assert kept.samples[0].completion == huge[: len(kept.samples[0].completion)] != ""
    assert kept.cut > 3 * 9_000_000
    failed = [SampleText(huge, "stop", None, failure=huge, info={"found": huge})] * 2
    packed = pack(TaskText(huge, [], huge, failed=failed), 8)
    assert packed.nbytes <= text_limit_bytes(8, 2)
    assert unpack(packed).failed[0].failure
    assert pack(TaskText(huge, []), 0).nbytes <= text_limit_bytes(0, 1)


def test_values_that_cannot_be_stored_are_replaced_and_do_not_fail_the_task() -> None:
    kept = unpack(pack(TaskText("p", [SampleText("c", "stop", 1.0)], answer=1 + 2j), 100))
    assert kept.answer == "(1+2j)"
    kept = unpack(pack(TaskText([{"content": "a\ud800b"}], [SampleText("c\udfff", "stop", 1.0)], answer=1 << 90), 100))
    assert kept.prompt == [{"content": "a?b"}]
    assert (kept.samples[0].completion, kept.answer) == ("c?", str(1 << 90))
