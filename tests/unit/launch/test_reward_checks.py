"""Tests that reward functions are checked against the rows of the data before a run starts, without any connection."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from launch.checks import rewards
from launch.checks.findings import Findings
from services.rollout.user_code.builtin import REWARDS
from shared.data import open_source
from shared.topology import load
from tests.unit.shared.topology.small_topology import make, write

pytestmark = pytest.mark.slow

MODULE = """
import asyncio, json, os, sys, time, urllib.request

def fits(sample):
    assert sample.completion == str(sample.row["answer"]) == sample.messages[-1]["content"]
    assert sample.messages[0] == {"role": "user", "content": sample.row["prompt"]}
    return {"reward": 0.5, "format": 1.0}

def of_a_group(samples):
    assert [sample.completion for sample in samples[1:]] == [""] * 3
    return [1.0] + [0.0] * (len(samples) - 1)

def lacks(sample):
    return float(sample.completion == sample.row["solution"])

def parses(sample):
    return json.loads("no json")

def nan(sample):
    return float("nan")

def text(sample):
    return "good"

def talks(sample):
    print("x" * 1_000_000)
    print("x" * 1_000_000, file=sys.stderr)
    return 1.0

async def odd(sample):
    raise BaseException("odd")

def hangs(sample):
    time.sleep(60)

def dies(sample):
    os._exit(3)

def asks(sample, *, port):
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as answer:
                return float(answer.read())
        except Exception:
            time.sleep(0.01)

async def asks_later(sample, *, port):
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.open_connection("127.0.0.1", port))

async def asks_by_name(sample):
    await asyncio.open_connection("judge.invalid", 443)

def forgives(sample, *, port):
    try:
        socket_made = asyncio.run(asks_later(sample, port=port))
    except BaseException:
        return 0.0
"""


def line_of(text: str) -> int:
    return MODULE.splitlines().index(text) + 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path)
    (tmp_path / "my_rw.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(folder: Path, functions: list[str | dict[str, Any]], *overrides: str, rows: Any = None) -> Findings:
    """Check reward functions with the rows of the small topology, or with `rows`. Paths are relative to `folder`."""
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    terms = [{"function": each} if isinstance(each, str) else each for each in functions]
    given = ["reward.function=null", f"reward.functions={json.dumps(terms)}", "data.eval={}", *overrides]
    findings = Findings("t.yaml")
    topology = load(write(folder), given)
    findings.opened["data.train.source"] = open_source(topology.data.train.source, where="t.yaml")
    rewards.check_fields(topology, findings)
    rewards.check_calls(topology, findings)
    for lines in (findings.errors, findings.warnings, findings.notes):
        assert all("\n" not in line for line in lines)
        lines[:] = [line.replace(f"{folder}/", "") for line in lines]
    return findings


def test_a_function_that_does_not_fit_is_refused_with_its_line_and_the_row(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["fits", "of_a_group", "lacks", "parses", "nan", "text", "talks", "odd"]
    findings = checked(folder, [f"my_rw:{name}" for name in names])
    called = "data.train.source row 0 (rows.jsonl:1), fields answer, prompt, and the completion '2'"
    assert findings.notes == [
        f"reward         my_rw:{name} gives {value} for {called}"
        for name, value in (("fits", 0.5), ("of_a_group", 1), ("talks", 1))
    ]
    lacks = line_of('    return float(sample.completion == sample.row["solution"])')
    parses = line_of('    return json.loads("no json")')
    odd = line_of('    raise BaseException("odd")')
    failures = {
        2: f"my_rw:lacks: raised KeyError: 'solution' (at my_rw.py:{lacks})",
        3: f"my_rw:parses: raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (at my_rw.py:{parses})",
        4: "my_rw:nan: returned nan, which is not finite in float32 (at most 3.4e+38)",
        5: "my_rw:text: returned 'good', not a number or a dict of numbers (could not convert string to float: 'good')",
        7: f"my_rw:odd: raised BaseException: odd (at my_rw.py:{odd})",
    }
    assert findings.errors == [
        f"t.yaml: reward.functions[{at}].function: {why}, called with {called}; correct "
        f"reward.functions[{at}].function or its params, or add --no-call"
        for at, why in failures.items()
    ]
    assert findings.warnings == []
    assert capfd.readouterr() == ("", "")


def test_a_function_that_hangs_or_dies_does_not_prevent_the_check_of_the_next(folder: Path) -> None:
    findings = checked(folder, ["my_rw:hangs", "my_rw:dies", "my_rw:fits"], "reward.timeout_s=1")
    hangs = line_of("    time.sleep(60)")
    late, died = findings.errors
    assert f"my_rw:hangs: no answer within 1 s (reward.timeout_s) (at my_rw.py:{hangs}), called with" in late
    assert "my_rw:dies: took its process down: it ended with status 3" in died
    assert [line.split()[1:4] for line in findings.notes] == [["my_rw:fits", "gives", "0.5"]]


def test_a_function_that_may_take_longer_than_the_check_waits_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "CALL_LIMIT_S", 0.5)
    findings = checked(folder, ["my_rw:hangs"], "reward.timeout_s=60")
    assert findings.errors == []
    assert findings.warnings == [
        "t.yaml: reward.functions[0].function: my_rw:hangs was not checked: it takes more than 0.5 s"
    ]


def test_no_judge_is_asked(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as judge:
        port = judge.getsockname()[1]
        names = ["asks", "asks_later", "forgives"]
        functions: list[str | dict[str, Any]] = [
            {"function": f"my_rw:{name}", "params": {"port": port}} for name in names
        ]
        findings = checked(folder, [*functions, "my_rw:asks_by_name", "my_rw:fits"], "reward.timeout_s=5")
        judge.setblocking(False)
        with pytest.raises(BlockingIOError):
            judge.accept()
    assert (findings.errors, findings.warnings) == ([], [])
    asked = [f"my_rw:{name}: connects to 127.0.0.1:{port}" for name in names]
    asked.append("my_rw:asks_by_name: connects to judge.invalid:443")
    assert findings.notes[:4] == [f"reward         {each}; no server is asked before the run starts" for each in asked]
    assert findings.notes[4].startswith("reward         my_rw:fits gives 0.5")


def test_a_failure_that_a_workflow_might_prevent_is_a_warning(folder: Path) -> None:
    findings = checked(
        folder, ["my_rw:lacks"], "workflow={function: builtin:calculator}", "services.batch-store.memory=64MiB"
    )
    assert findings.errors == []
    [line] = findings.warnings
    assert "my_rw:lacks: raised KeyError: 'solution'" in line
    assert line.endswith(", without what the workflow would add")


def test_the_first_usable_row_of_each_source_is_used(folder: Path) -> None:
    rows = [{"answer": "lost"}, {"prompt": "1+1=", "solution": ""}]
    findings = checked(folder, ["my_rw:lacks"], rows=rows)
    called = "data.train.source row 1 (rows.jsonl:2), fields prompt, solution, and the completion ''"
    assert findings.notes == [f"reward         my_rw:lacks gives 1 for {called}"]


FIELDS = [
    ("exact_match", {}, [{}], "has no field 'answer' (its fields: prompt)"),
    ("exact_match", {}, [{"answer": None, "id": "a"}], "has null in the field 'answer'"),
    ("numeric", {}, [{"answer": "1,234.5"}, {"answer": "many"}], "has the answer 'many', which is not a number"),
    ("regex", {"pattern": "(?P<answer>.)"}, [{"answer": 1}, {}], "has no field 'answer' (its fields: prompt)"),
    ("reasoning_gym", {}, [{"answer": 1}], "has no field 'reasoning_gym' (its fields: answer, prompt)"),
]


@pytest.mark.parametrize(("name", "params", "rows", "why"), FIELDS)
def test_rows_without_the_fields_of_a_builtin_reward_are_refused(
    folder: Path, name: str, params: dict[str, Any], rows: list[dict[str, Any]], why: str
) -> None:
    function = {"function": f"builtin:{name}", "params": params}
    findings = checked(folder, [function], rows=[{"prompt": "1+1=", **row} for row in rows])
    last = len(rows) - 1
    assert findings.errors == [
        f"t.yaml: reward.functions[0].function: builtin:{name} cannot score 1 of the {len(rows)} rows that were read: "
        f"data.train.source row {last} (rows.jsonl:{last + 1}) {why}; correct the rows, or name another function"
    ]
    assert findings.notes == []


def test_a_pattern_without_an_answer_needs_no_field(folder: Path) -> None:
    findings = checked(folder, [{"function": "builtin:regex", "params": {"pattern": "^$"}}], rows=[{"prompt": "1+1="}])
    assert findings.errors == []
    assert findings.notes == [
        "reward         builtin:regex gives 1 for data.train.source row 0 (rows.jsonl:1), fields prompt, and the "
        "completion ''"
    ]


def test_every_builtin_reward_declares_its_fields() -> None:
    without = [name for name, function in REWARDS.items() if not function.fields]
    assert without == ["none", "reward_model"]  # the latter reads what was sampled
