"""Tests the contract of a dataset source: stable indices, rows read one at a time, errors that name the place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.data import DataError, Source, open_source

WHERE = "t.yaml:7: data.train.source"
WriteJsonl = Callable[..., Path]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    def write(*lines: str | bytes, end: bytes = b"\n") -> Path:
        path = tmp_path / "rows.jsonl"
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + end)
        return path

    return write


def open_jsonl(path: Path) -> Source:
    return open_source(f"jsonl:{path}", where=WHERE)


def error_of(path: Path, index: int = 0) -> str:
    with pytest.raises(DataError) as caught:
        open_jsonl(path).row(index)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_addition_answers_are_the_sums_of_two_digit_numbers() -> None:
    for source in (
        open_source("builtin:addition", where=WHERE),
        open_source("builtin:addition?split=test", where=WHERE),
    ):
        for index in range(len(source)):
            row = source.row(index)
            a, b = (int(number) for number in row["prompt"].removesuffix("=").split("+"))
            assert 10 <= a <= 99
            assert 10 <= b <= 99
            assert row["answer"] == str(a + b)


def test_addition_splits_are_disjoint_and_complete() -> None:
    train = open_source("builtin:addition?split=train", where=WHERE)
    test = open_source("builtin:addition?split=test", where=WHERE)
    train_prompts = {train.row(index)["prompt"] for index in range(len(train))}
    test_prompts = {test.row(index)["prompt"] for index in range(len(test))}
    assert len(test_prompts) == len(test) == 256
    assert not train_prompts & test_prompts
    assert len(train_prompts | test_prompts) == 90 * 90


def test_addition_order_never_changes() -> None:
    # A task id names its row by index, so a different order would make a resumed run train on different rows.
    train = open_source("builtin:addition", where=WHERE)
    test = open_source("builtin:addition?split=test", where=WHERE)
    assert [train.row(index)["prompt"] for index in (0, 1, 7843)] == ["37+66=", "45+43=", "71+72="]
    assert [test.row(index)["prompt"] for index in (0, 5, 255)] == ["32+28=", "14+55=", "26+86="]


def test_default_split_of_addition_is_train() -> None:
    default = open_source("builtin:addition", where=WHERE)
    train = open_source("builtin:addition?split=train", where=WHERE)
    assert len(default) == len(train)
    assert default.row(17) == train.row(17)


def test_ids_of_addition_rows_are_unique_across_both_splits() -> None:
    sources = [open_source(f"builtin:addition?split={split}", where=WHERE) for split in ("train", "test")]
    ids = [source.row(index)["id"] for source in sources for index in range(len(source))]
    assert len(set(ids)) == len(ids)


def test_changing_a_returned_row_does_not_change_the_source(write_jsonl: WriteJsonl) -> None:
    for source in (open_source("builtin:addition", where=WHERE), open_jsonl(write_jsonl('{"prompt": "p"}'))):
        before = dict(source.row(0))
        source.row(0)["prompt"] = "changed"
        assert source.row(0) == before


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_the_source_is_an_index_error(write_jsonl: WriteJsonl, index: int) -> None:
    source = open_jsonl(write_jsonl('{"prompt": "a"}', '{"prompt": "b"}'))
    with pytest.raises(IndexError, match="rows 0 to 1"):
        source.row(index)


def test_source_keeps_the_name_that_the_topology_gives_it(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl('{"prompt": "a"}')
    assert open_jsonl(path).name == f"jsonl:{path}"
    assert open_source("builtin:addition?split=test", where=WHERE).name == "builtin:addition?split=test"


def test_jsonl_rows_are_read_in_any_order_with_every_field(write_jsonl: WriteJsonl) -> None:
    rows = [
        {
            "prompt": f"question {number} \u00e4\U0001f600",
            "answer": {"value": number},
            "id": number,
            "level": [1.5],
        }
        for number in range(500)
    ]
    source = open_jsonl(
        write_jsonl(*(json.dumps(row, ensure_ascii=number % 2 == 0) for number, row in enumerate(rows)))
    )
    assert len(source) == 500
    assert [source.row(index) for index in (499, 0, 250, 7)] == [rows[index] for index in (499, 0, 250, 7)]


def test_jsonl_accepts_a_list_of_messages_and_tools(write_jsonl: WriteJsonl) -> None:
    row = {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "tools": [{"type": "function"}],
    }
    source = open_jsonl(write_jsonl(json.dumps(row)))
    assert source.row(0) == row
    assert source.validate() == []


def test_blank_lines_are_not_rows_but_count_in_line_numbers(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl("", '{"prompt": "a"}', "  \t", "oops", '{"prompt": "b"}', "")
    source = open_jsonl(path)
    assert len(source) == 3
    assert source.row(2) == {"prompt": "b"}
    assert f"{path}:4: " in error_of(path, 1)


def test_last_line_needs_no_newline_and_lines_may_end_in_crlf(write_jsonl: WriteJsonl) -> None:
    source = open_jsonl(write_jsonl(b'{"prompt": "a"}\r', b'{"prompt": "b"}', end=b""))
    assert [source.row(0), source.row(1)] == [{"prompt": "a"}, {"prompt": "b"}]


def test_byte_order_mark_is_skipped(write_jsonl: WriteJsonl) -> None:
    source = open_jsonl(write_jsonl(b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "b"}'))
    assert [source.row(0), source.row(1)] == [{"prompt": "a"}, {"prompt": "b"}]


def test_row_longer_than_a_read_buffer_is_read_completely(write_jsonl: WriteJsonl) -> None:
    long = "x" * (3 << 20)
    source = open_jsonl(write_jsonl(json.dumps({"prompt": long}), '{"prompt": "b"}'))
    assert source.row(0)["prompt"] == long
    assert source.row(1) == {"prompt": "b"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "1+1"}', "row has no prompt (its keys: question); add a prompt"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": []}', "prompt is an empty list"),
        ('{"prompt": 7}', "prompt must be text or a list of messages, not a number"),
        ('{"prompt": null}', "prompt must be text or a list of messages, not null"),
        ('{"prompt": [{"content": "hi"}]}', "prompt message 0 has no role"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}',
            "prompt message 1 has no content",
        ),
        ('{"prompt": ["hi"]}', "prompt message 0 has no role"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}',
            "prompt message 0: part 1 of its content is no text but image_url; a policy is trained on text only",
        ),
        ('{"prompt": [{"role": "user", "content": [7]}]}', "part 0 of its content is no text but a number"),
        ('{"prompt": "a", "tools": {}}', "tools must be a list of tool definitions, not an object"),
        ('{"prompt": "a", "id": []}', "id must be text or a whole number, not a list"),
        ('["prompt"]', "a row must be a JSON object with a prompt, not a list"),
        ('"prompt"', "a row must be a JSON object with a prompt, not text"),
        ('{"prompt": "a"', "invalid JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "invalid JSON"),
        (b'{"prompt": "\xff"}', "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_error_for_a_bad_row_names_its_line_its_problem_and_its_text(
    write_jsonl: WriteJsonl, line: str | bytes, problem: str
) -> None:
    path = write_jsonl('{"prompt": "good"}', line)
    message = error_of(path, 1)
    assert message.startswith(f"{path}:2: ")
    assert problem in message
    text = line.decode("utf-8", errors="backslashreplace") if isinstance(line, bytes) else line
    assert text[:60] in message
    assert len(message) < len(str(path)) + 300


def test_validate_lists_exactly_the_rows_that_row_refuses(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl('{"prompt": "a"}', "oops", "", '{"prompt": "b"}', '{"x": 1}')
    source = open_jsonl(path)
    errors = source.validate()
    assert [(error.index, error.line) for error in errors] == [(1, 2), (3, 5)]
    for error in errors:
        assert error_of(path, error.index) == error.message
    assert source.row(2) == {"prompt": "b"}


def test_validate_finds_no_bad_row_in_builtin_addition() -> None:
    assert open_source("builtin:addition", where=WHERE).validate() == []


@pytest.mark.parametrize("change", ['{"prompt": "c"}', '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n', ""])
def test_file_changed_while_open_is_refused(write_jsonl: WriteJsonl, change: str) -> None:
    path = write_jsonl('{"prompt": "a"}', '{"prompt": "b"}')
    source = open_jsonl(path)
    path.write_text(change)
    with pytest.raises(DataError, match="changed while it was in use"):
        source.row(1)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("builtin:adition", "names no builtin; did you mean 'addition'?"),
        ("builtin:", "names no builtin; known: addition"),
        ("builtin:addition?splt=test", "has unknown parameter 'splt'; did you mean 'split'?"),
        ("builtin:addition?split=dev", "has split 'dev'; the splits are train and test"),
        ("builtin:addition?split=", "has split ''; the splits are train and test"),
        ("addition", "has an unknown kind; write builtin:<name>, jsonl:<path>"),
        ("hf:gsm8k", "has an unknown kind; write builtin:<name>, jsonl:<path>"),
        ("jsonl:/nowhere/rows.jsonl", "cannot be read: No such file or directory (/nowhere/rows.jsonl)"),
        ("jsonl:/", "cannot be read: Is a directory"),
    ],
)
def test_error_for_a_source_that_cannot_be_opened_names_its_place_in_the_topology(source: str, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        open_source(source, where=WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: source {source!r} ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize("text", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
def test_file_without_rows_is_refused_when_it_is_opened(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=rf"has no rows \({len(text)} bytes\)"):
        open_jsonl(path)


def test_reading_data_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from shared.data import open_source\n"
        "open_source('builtin:addition', where='w').row(0)\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
