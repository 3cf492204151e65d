"""Tests the rewards that are part of the package, and their errors when they cannot score."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout.user_code import builtin
from shared.data import open_source
from shared.rpc.errors import RpcError
from shared.sample import Sample
from tests.unit.rollout.reward_rig import Line, sample, score, values

pytestmark = pytest.mark.slow


def test_exact_match_strips_and_compares_as_text() -> None:
    group = [sample(" 132 \n", answer=132), sample("132", answer=" 132"), sample("13", answer="132")]
    assert values(score([group], Line("builtin:exact_match"))) == [[1.0, 1.0, 0.0]]


def test_exact_match_without_an_answer_fails_the_sample() -> None:
    ((only,),) = score([[sample("132")]], Line("builtin:exact_match"))
    assert only.value is None
    assert "KeyError: 'answer'" in only.failure


@pytest.mark.parametrize(
    ("completion", "params", "value"),
    [
        ("it is 1,234.5 or so", {}, 1.0),
        ("first 7, then 1,234.50", {}, 1.0),
        ("1235", {"relative": 0.001}, 1.0),
        ("1235", {"tolerance": 0.4}, 0.0),
        ("-1.2345e3", {}, 0.0),
        ("none at all", {}, 0.0),
    ],
)
def test_numeric_compares_the_last_number_within_the_tolerance(
    completion: str, params: dict[str, float], value: float
) -> None:
    assert values(score([[sample(completion, answer="1234.5")]], Line("builtin:numeric", params=params))) == [[value]]


@pytest.mark.parametrize(
    ("pattern", "completion", "value"),
    [
        (r"<answer>.*</answer>", "well, <answer>7</answer>", 1.0),
        (r"<answer>.*</answer>", "7", 0.0),
        (r"<answer>(?P<answer>.*?)</answer>", "<answer>3</answer> no: <answer> 7 </answer>", 1.0),
        (r"<answer>(?P<answer>.*?)</answer>", "<answer>3</answer>", 0.0),
    ],
)
def test_regex_checks_the_form_or_compares_the_captured_answer(pattern: str, completion: str, value: float) -> None:
    line = Line("builtin:regex", params={"pattern": pattern})
    assert values(score([[sample(completion, answer=7)]], line)) == [[value]]


def test_the_sample_of_a_regex_that_never_ends_is_lost() -> None:
    line = Line("builtin:regex", params={"pattern": "(a+)+$"})
    ((hung, good),) = score([[sample("a" * 64 + "!"), sample("aa")]], line, timeout_s=0.5)
    assert (hung.kind, good.value) == ("timeout", 1.0)


def test_an_invalid_pattern_prevents_the_start() -> None:
    with pytest.raises(RpcError, match=r"cannot work \(\w*[Ee]rror: unterminated"):
        score([], Line("builtin:regex", params={"pattern": "[a"}))


def test_math_verify_compares_mathematical_meaning() -> None:
    pytest.importorskip("math_verify")
    line = Line("builtin:math_verify")
    completions = [r"so \boxed{\frac{1}{2}}", "the answer is 0.5", r"$\frac{2}{3}$", "no idea"]
    assert values(score([[sample(each, answer=r"\frac{1}{2}") for each in completions]], line, timeout_s=20)) == [
        [1.0, 1.0, 0.0, 0.0]
    ]


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        (r"\$18.90", r"\boxed{\$18.90}", 1.0),
        (r"\$36", r"\boxed{36}", 1.0),
        (r"\$32,\!348", r"\boxed{32348}", 1.0),
        ("US$5", r"\boxed{5}", 1.0),
        ("$5$", r"\boxed{5}", 1.0),
        ("5", "\\boxed{4}\n\nWait, that is wrong.\n\n\\boxed{5}", 1.0),
        ("4", "\\boxed{4}\n\nWait, that is wrong.\n\n\\boxed{5}", 0.0),
        (r"\emptyset", r"\boxed{\varnothing}", 1.0),
    ],
)
def test_math_verify_reads_answers_as_people_write_them(answer: str, completion: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert builtin.math_verify(sample(completion, answer=answer)) == value


def test_an_extra_that_is_not_installed_is_reported_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text(
        "import importlib.util as u\nfound = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'math_verify' else found(name, package)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RpcError, match=r"needs the package math_verify; run `make setup-rewards`"):
        score([], Line("builtin:math_verify"))


@pytest.mark.parametrize("dataset", ["chain_sum", "ransom_note"])  # The second data set depends on the hash seed.
def test_reasoning_gym_scores_with_the_rows_data_set(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    source = open_source(f"reasoning-gym:{dataset}?size=8&seed=5", where="test")
    rows = [source.row(index) for index in range(8)]
    right = [[Sample(f"train/0/{at}", row, [], f" {row['answer']}\n", [1], "stop")] for at, row in enumerate(rows)]
    wrong = [[Sample(f"train/0/{at}", row, [], "no idea", [1], "stop")] for at, row in enumerate(rows)]
    scores = score([*right, *wrong], Line("builtin:reasoning_gym"), timeout_s=20)
    assert values(scores) == [[1.0]] * 8 + [[0.0]] * 8


def test_reasoning_gym_refuses_a_row_that_it_cannot_reproduce() -> None:
    pytest.importorskip("reasoning_gym")
    row = open_source("reasoning-gym:chain_sum?size=8&seed=5", where="test").row(0)
    ((only,),) = score(
        [[Sample("train/0/0", {**row, "prompt": "another"}, [], "1", [1], "stop")]], Line("builtin:reasoning_gym")
    )
    assert "generates a different question 0 here" in only.failure
