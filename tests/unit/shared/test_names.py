"""Tests names of files that are not UTF-8 and names that only look like numbers."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from proto.messages import ErrorCode
from shared import names
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, checkpoint_steps, newest_run, parse_service_name
from shared.samples import reader
from shared.topology import distribution

BAD = os.fsdecode(b"bad-\xff")


def run_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_a_listing_leaves_out_names_that_are_not_utf8_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("plain", "größe", BAD):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert {path.name for path in names.listed(tmp_path.iterdir())} == {"plain", "größe"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/bad-\\xff: left out, because its name is not UTF-8; rename it"
    ]


def test_the_newest_run_is_the_newest_whose_name_is_utf8(tmp_path: Path) -> None:
    good = run_at(tmp_path / "good")
    os.utime(good / "run.json", (1, 1))
    run_at(tmp_path / BAD)
    assert newest_run(tmp_path) == good


def test_a_run_is_neither_created_nor_opened_at_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    run_at(tmp_path / BAD)
    for path, use in ((tmp_path / BAD, RunDir.open), (tmp_path / f"new-{BAD}", RunDir.create)):
        with pytest.raises(RpcError, match=r"bad-\\xff: its path is not UTF-8") as caught:
            use(path)
        assert caught.value.code == ErrorCode.BAD_REQUEST
    assert not (tmp_path / f"new-{BAD}").exists()


def test_folders_of_samples_and_files_of_a_model_are_left_out(tmp_path: Path) -> None:
    for name in ("held", BAD):
        folder = tmp_path / "samples" / "eval" / name
        folder.mkdir(parents=True)
        (folder / "1.jsonl").write_text("")
    assert reader.splits(tmp_path) == ["eval/held"]
    model = tmp_path / "model"
    (model / BAD).mkdir(parents=True)
    for file in ("config.json", f"{BAD}/x", BAD + "x"):
        (model / file).write_text("{}")
    data = {"policy": {"model": str(model)}, "data": {"train": {"source": "builtin:addition"}}}
    assert [file.path for file, _ in distribution.files(data)] == ["0/model/config.json"]


@pytest.mark.parametrize("name", ["²", "٣", "007", "1_0", "", "-1", "9" * 5000])
def test_a_name_that_only_looks_like_a_number_is_none(tmp_path: Path, name: str) -> None:
    assert names.number(name) is None
    if name:
        with pytest.raises(RpcError, match="write NAME"):
            parse_service_name(f"rollout/{name}")
    if len(name) < 100:
        (tmp_path / f"step-{name}").mkdir()
    (tmp_path / "step-12").mkdir()
    assert checkpoint_steps(tmp_path) == [12]
