"""Tests what happens when the process that makes reasoning-gym's rows is killed, answers too late, or cannot make a
row."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from proto.messages import ErrorCode
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import TaskSets
from shared.data import DataError, SourceLost, gym_process
from shared.data.gym_process import RowMaker
from shared.rpc.errors import RpcError
from shared.topology import load
from tests.unit.rollout.rollout_engine import MODEL
from tests.unit.rollout.test_tasks import TOPOLOGY, grant

pytestmark = pytest.mark.slow

LIBRARY = """
import dataclasses, os, pathlib, signal

@dataclasses.dataclass
class Config:
    size: int
    seed: int

class Rows(list):
    def __getitem__(self, index):
        if index in (3, 7):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 4:
            signal.pause()
        if index == 5:
            raise ValueError("no such row")
        return {"question": f"{index}+{index}=", "answer": str(2 * index)}

DATASETS = {"rows": (Rows, Config)}

def create_dataset(name, size, seed):
    if pathlib.Path(__file__).with_name("broken").exists():
        os._exit(3)
    return Rows(range(size))
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a fake `reasoning_gym` library with one data set, some of whose rows cannot be made."""
    folder = tmp_path / "reasoning_gym"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "factory.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def kill(source: str) -> None:
    """Kill the process that makes the rows of `source`."""
    (made,) = (each for each in psutil.Process().children() if source in command_of(each))
    os.kill(made.pid, signal.SIGKILL)


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []  # The process has ended, whichever test started it.


def test_a_process_that_is_killed_is_restarted_and_makes_the_same_rows(library: Path) -> None:
    source = "reasoning-gym:rows?size=9&seed=1"
    maker = RowMaker(source, where="where")
    for index in (0, 1, 2):
        kill(source)
        assert maker.entry(index) == {"question": f"{index}+{index}=", "answer": str(2 * index)}
    assert maker.entry(8)["answer"] == "16"


def test_a_row_that_kills_its_process_is_a_bad_row_and_the_next_row_is_made(library: Path) -> None:
    maker = RowMaker("reasoning-gym:rows?size=9", where="where")
    with pytest.raises(DataError, match=r"rows\?size=9 row 7: its process died of SIGKILL") as caught:
        maker.entry(7)
    assert not isinstance(caught.value, SourceLost)
    assert maker.entry(2)["answer"] == "4"


def test_a_row_without_an_answer_is_a_bad_row(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_process, "ANSWER_S", 0.5)
    maker = RowMaker("reasoning-gym:rows?size=9", where="where")
    with pytest.raises(DataError, match=r"row 4: its process gave no answer within 0.5 s") as caught:
        maker.entry(4)  # Probing the next row raises an error, which counts as an answer.
    assert not isinstance(caught.value, SourceLost)
    process = maker._process
    with pytest.raises(DataError, match="row 4: its process gave no answer"):
        maker.entry(4)
    assert maker._process is process  # The row is known to be bad; a request for it would have ended the process.
    assert not process.ended


def test_a_source_whose_process_cannot_make_rows_is_lost(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_process, "ANSWER_S", 0.5)
    maker = RowMaker("reasoning-gym:rows?size=9", where="where")
    with pytest.raises(SourceLost, match=r"died of SIGKILL at row 3, and gave no answer within 0\.5 s at row 4"):
        maker.entry(3)  # Row 4 gets no answer either.


def test_a_lost_source_does_not_drop_tasks(library: Path, tmp_path: Path) -> None:
    source = "reasoning-gym:rows?size=9&seed=2"
    text = TOPOLOGY.format(model=MODEL).replace("jsonl:rows.jsonl", source)
    (tmp_path / "t.yaml").write_text(text)
    topology = load(tmp_path / "t.yaml")
    sets = TaskSets(topology, PromptBuilder(MODEL, add_generation_prompt=True), context_tokens=512)
    assert [task.row["prompt"] for task in sets.prepare(grant("train", 0, 1)).ready] == ["0+0=", "1+1="]
    (library / "broken").touch()
    kill(source)
    with pytest.raises(RpcError, match=r"does not start: it ended with status 3, 3 times") as caught:
        sets.prepare(grant("train", 0, 1))
    assert caught.value.code == ErrorCode.BAD_REQUEST
    (library / "broken").unlink()
    prepared = sets.prepare(grant("train", 5, 0))
    assert [task.row["prompt"] for task in prepared.ready] == ["0+0="]
    assert "row 5: ValueError: no such row" in prepared.dropped[0].reason
