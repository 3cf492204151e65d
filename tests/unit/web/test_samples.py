"""Tests the samples on the page: their sizes are bounded, and no path outside the run's samples is read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.web import samples
from shared.samples.reader import Order
from shared.samples.record import SampleRecord


def write(run: Path, step: int, *records: SampleRecord, split: str = "train") -> None:
    path = run / "samples" / split / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def test_the_newest_step_is_listed_if_no_step_is_given(tmp_path: Path) -> None:
    write(tmp_path, 3, SampleRecord(task="train/0/1", step=3, prompt="1+1=", completion="2", reward=1.0))
    write(tmp_path, 12, SampleRecord(task="train/0/2", step=12), SampleRecord(task="train/0/2", sample=1, step=12))
    newest = samples.listed(tmp_path, "train", None)
    assert (newest["step"], newest["steps"], len(newest["samples"])) == (12, [3, 12], 2)
    [first] = samples.listed(tmp_path, "train", 3)["samples"]
    assert (first["prompt"], first["completion"], first["reward"]) == ("1+1=", "2", 1.0)


def test_a_run_without_samples_has_an_empty_list(tmp_path: Path) -> None:
    assert samples.listed(tmp_path, "train", None)["samples"] == []


def test_texts_of_ten_megabytes_and_very_long_tokens_are_truncated_and_counted(tmp_path: Path) -> None:
    big, count = "x" * 10_000_000, 20_000
    record = SampleRecord(
        task="t/0/0",
        step=1,
        prompt=big,
        completion=big,
        pieces=["y" * 500] + ["z"] * count,
        logprobs=[-1.0] * (count + 1),
    )
    write(tmp_path, 1, record)
    [listed] = samples.listed(tmp_path, "train", 1)["samples"]
    assert len(listed["prompt"]) == len(listed["completion"]) == samples.HEAD_CHARS
    shown = samples.shown(tmp_path, "train", 1, "t/0/0", 0)
    assert shown is not None
    assert len(shown["completion"]) == samples.MAX_CHARS
    assert len(shown["pieces"]) == len(shown["logprobs"]) == samples.MAX_TOKENS
    assert shown["tokens"] == count + 1
    assert shown["cut"] >= 2 * (len(big) - samples.MAX_CHARS)
    assert len(msgspec.json.encode(shown)) < 400_000


def test_a_split_that_names_a_path_outside_the_samples_is_not_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, 1, SampleRecord(task="t/0/0", step=1))
    write(tmp_path, 1, SampleRecord(task="secret", step=1), split="other")
    for split in ("../../samples/other", "/etc", "..", ""):
        assert samples.shown(run, split, 1, "secret", 0) is None
        assert samples.listed(run, split, 1)["split"] == "train"


def test_messages_are_shown_with_their_roles(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    write(tmp_path, 1, SampleRecord(task="t/0/0", step=1, prompt=prompt))
    shown = samples.shown(tmp_path, "train", 1, "t/0/0", 0)
    assert shown is not None
    assert shown["prompt"] == "[system]\nBe brief.\n\n[user]\nHi"


def test_the_worst_samples_of_a_step_come_first_wherever_they_were_written(tmp_path: Path) -> None:
    count = samples.MAX_RECORDS + 100
    write(tmp_path, 1, *(SampleRecord(task=f"train/0/{at}", step=1, reward=float(count - at)) for at in range(count)))
    found = samples.listed(tmp_path, "train", 1, order=Order.WORST)
    assert [each["reward"] for each in found["samples"]] == [float(at + 1) for at in range(samples.MAX_RECORDS)]
    assert found["total"] == count


def test_a_task_is_found_in_its_own_split_and_in_all_steps(tmp_path: Path) -> None:
    write(tmp_path, 1, SampleRecord(task="train/0/1", step=1))
    write(tmp_path, 4, SampleRecord(task="held/4/0", step=4), SampleRecord(task="held/4/1", step=4), split="eval/held")
    write(tmp_path, 8, SampleRecord(task="held/8/0", step=8), split="eval/held")
    found = samples.listed(tmp_path, "train", 1, task="held/4/1")
    assert (found["split"], found["step"], [each["task"] for each in found["samples"]]) == (
        "eval/held",
        None,
        ["held/4/1"],
    )
    assert samples.listed(tmp_path, "train", 1, task="../other/0/0")["samples"] == []
