"""Which files and which fields a source names: `*` in a path, and `?prompt=...&answer=...` after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shared.data import DataError, Source, open_source
from shared.data.source import FIELDS, value_at
from shared.topology import distribution, load
from tests.unit.shared.topology.small_topology import BASE, make, problems, write

ROWS: list[dict[str, Any]] = [
    {"question": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra": {"id": 7}},
    {"question": "2+2=", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra": {"id": 8}},
]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return f"parquet:{path}"


def opened(source: str) -> Source:
    return open_source(source, where="t.yaml:6: data.train.source")


def prompts(source: Source) -> list[Any]:
    return [source.row(index)["prompt"] for index in range(len(source))]


@pytest.mark.parametrize("put", [jsonl, parquet])
def test_the_answer_is_taken_from_a_nested_field(tmp_path: Path, put: Any) -> None:
    source = opened(put(tmp_path / "rows", ROWS) + "?prompt=question&answer=reward_model.ground_truth&id=extra.id")
    assert source.row(1) == {**ROWS[1], "prompt": "2+2=", "answer": "4", "id": 8}
    assert source.validate() == []


@pytest.mark.parametrize("put", [jsonl, parquet])
def test_a_row_without_the_field_is_unusable_and_the_message_names_the_fields_that_exist(
    tmp_path: Path, put: Any
) -> None:
    rows = [*ROWS, {"question": "3+3=", "reward_model": {"style": "rule"}, "extra": {"id": 9}}]
    source = opened(put(tmp_path / "rows", rows) + "?prompt=question&answer=reward_model.ground_truth")
    (bad,) = source.validate()
    assert bad.index == 2
    assert bad.message.startswith(
        f"{source.place(2)}: row has no field 'reward_model.ground_truth' (keys of reward_model: style): {{"
    )
    with pytest.raises(DataError, match=r"row has no field 'reward_model\.ground_truth'"):
        source.row(2)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("b", "row has no field 'b' (keys of the row: a, a.b, t)"),
        ("a.x", "row has no field 'a.x' (keys of a: b, c.d)"),
        ("t.x", "row has no field 't.x': t is text, not an object"),
        ("t.x.y", "row has no field 't.x.y': t is text, not an object"),
        (".", "row has no field '.' (keys of the row: a, a.b, t)"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, why: str) -> None:
    with pytest.raises(LookupError) as caught:
        value_at({"a": {"b": 1, "c.d": {"e": 2}}, "a.b": 3, "t": "x"}, path)
    assert caught.value.args[0] == why


def test_a_key_that_contains_the_dots_precedes_nested_objects() -> None:
    row = {"a": {"b": 1, "c.d": {"e": 2}}, "a.b": 3, "t": "x"}
    assert [value_at(row, path) for path in ("a.b", "a.c.d.e", "t")] == [3, 2, "x"]
    assert value_at({"a": {"b": 1}}, "a.b") == 1


def test_an_unknown_field_of_a_row_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    known = "answer, chosen, id, messages, prompt, rejected, tools"
    with pytest.raises(DataError, match=f"unknown parameter 'reward'; known: {known}"):
        opened(jsonl(tmp_path / "rows", ROWS) + "?reward=answer")
    assert ", ".join(sorted(FIELDS)) == known


@pytest.mark.parametrize("put", [jsonl, parquet])
def test_files_in_several_folders_are_joined_in_the_order_of_their_paths(tmp_path: Path, put: Any) -> None:
    for number, name in enumerate(("b/train", "a/train", "a/test", "c/d/train", "c.train")):
        put(tmp_path / "pq" / name, [{"prompt": f"{name}{at}"} for at in range(number + 1)])
    kind = put.__name__
    assert prompts(opened(f"{kind}:{tmp_path}/pq/*/train")) == ["a/train0", "a/train1", "b/train0"]
    every = prompts(opened(f"{kind}:{tmp_path}/pq/**/train"))
    assert list(dict.fromkeys(prompt[:-1] for prompt in every)) == ["a/train", "b/train", "c/d/train"]
    assert prompts(opened(f"{kind}:{tmp_path}/p*/a/*")) == ["a/test0", "a/test1", "a/test2", "a/train0", "a/train1"]


def test_a_folder_that_matches_is_no_file_of_the_source(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows" / "part-0", ROWS)
    (tmp_path / "rows" / "part-1").mkdir()
    assert len(opened(f"jsonl:{tmp_path}/rows/part-*?prompt=question")) == 2


def test_a_pattern_without_a_match_is_refused_with_the_pattern_and_the_folder(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "pq").mkdir()
    path = write(folder, BASE.replace('"jsonl:rows.jsonl"', '"parquet:./pq/*/train.parquet"'))
    expected = f"no file matches */train.parquet in {folder}/pq"
    assert problems(path) == [
        f"t.yaml:6: data.train.source: {expected}; relative paths start at the topology's folder; put it there"
    ]
    with pytest.raises(DataError) as caught:
        opened(f"parquet:{folder}/pq/*/train.parquet")
    assert str(caught.value).endswith(f"'parquet:{folder}/pq/*/train.parquet': {expected}")
    with pytest.raises(DataError, match=r"no file matches .* in .*/nowhere, which is not a folder"):
        opened(f"parquet:{folder}/nowhere/*/train.parquet")


def test_files_in_several_folders_keep_their_folders_on_other_hosts(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for name in ("a", "b"):
        jsonl(folder / "mixed" / name / "rows.jsonl", [{"prompt": name}])
    text = BASE.replace('"jsonl:rows.jsonl"', '"jsonl:./mixed/*/rows.jsonl?prompt=prompt"')
    data = load(write(folder, text)).document()
    fetched = tmp_path / "fetched"
    for file, path in distribution.files(data):
        target = distribution.inside(fetched, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    source = distribution.relocated(data, fetched)["data"]["train"]["source"]
    assert source == f"jsonl:{fetched}/1/*/rows.jsonl?prompt=prompt"
    assert prompts(opened(source)) == ["a", "b"]
