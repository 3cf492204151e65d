"""The topologies, rewards and defaults in docs/coming_from.md are accepted by the product, or equal to its own."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from shared.data import open_source
from shared.sample import Sample
from shared.topology import load

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
BLOCKS = dict(re.findall(r"^```(?:yaml|python)\n# (\w+\.(?:yaml|py))\n(.*?)^```$", PAGE, re.M | re.S))
SMALLER = [f"policy.model={MODEL}", "sampling.max_new_tokens=64"]
"""The shipped model has a context of 512 tokens."""
LEAST = f"""\
run: {{name: least, steps: 1}}
policy: {{model: {MODEL}}}
data: {{train: {{source: "builtin:addition"}}, eval: {{}}}}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: 8}}
algorithm: {{tasks_per_step: 4, group_size: 4}}
optimizer: {{lr: 1.0e-4}}
services: {{policy-trainer: {{}}, rollout: {{}}, batch-store: {{}}}}
"""
"""A topology that leaves everything to defaults that can be left."""


def function(folder: Path, path: str) -> Callable[[Sample], float]:
    """Return the function `module:name` of a block."""
    module, _, name = path.partition(":")
    file = folder / f"{module}.py"
    file.write_text(BLOCKS[file.name])
    found: Callable[[Sample], float] = runpy.run_path(str(file))[name]
    return found


def sample(completion: str, **row: Any) -> Sample:
    return Sample("train/0/0", {"prompt": "p", **row}, [], completion, [1], "stop")


def shipped(folder: Path, name: str, *overrides: str) -> Any:
    """Load a topology of the page with the shipped model and a small data set instead of those that it names."""
    path = folder / name
    path.write_text(BLOCKS[name])
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = ["data.train.source=jsonl:./rows.jsonl", "data.train.max_prompt_tokens=64"]
    return load(path, [*SMALLER, *data, *overrides])


@pytest.mark.parametrize("name", ["trl.yaml", "gspo.yaml", "prime.yaml"])
def test_a_translated_topology_is_accepted_with_the_shipped_model(tmp_path: Path, name: str) -> None:
    assert shipped(tmp_path, name).policy.model == str(MODEL)


def test_the_topology_translated_from_verl_is_accepted_with_the_shipped_model(tmp_path: Path) -> None:
    topology = shipped(tmp_path, "verl.yaml", "data.eval.test.source=jsonl:./rows.jsonl")
    assert topology.policy.model == str(MODEL)
    assert topology.algorithm.tasks_per_step * topology.algorithm.group_size == 1024 * 5


def test_every_topology_and_module_of_the_page_is_tested() -> None:
    rewards = {"gsm8k_rewards.py", "deepmath_rewards.py", "think_rewards.py", "reverse_rewards.py"}
    assert set(BLOCKS) == {"verl.yaml", "trl.yaml", "gspo.yaml", "prime.yaml"} | rewards


def verl_row(index: int, split: str) -> dict[str, Any]:
    """Return a row as verl's examples/data_preprocess/gsm8k.py writes it."""
    question, answer = f"What is {index} + 1200?", f"{index} + 1200 = {index + 1200}\n#### {index + 1200}"
    ask = f'{question} Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": ask}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1200)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def test_the_verl_example_reads_files_of_verls_preprocessing_as_they_are(tmp_path: Path) -> None:
    score = function(tmp_path, "gsm8k_rewards:score")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [verl_row(index, split) for index in range(3)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "gsm8k" / f"{split}.parquet")
    path = tmp_path / "verl.yaml"
    path.write_text(BLOCKS["verl.yaml"])
    data = load(path, [*SMALLER, "data.train.max_prompt_tokens=64"]).data
    for split, named in (("train", data.train.source), ("test", data.eval["test"].source)):
        source = open_source(named, where="verl.yaml")
        assert source.validate() == []
        row = source.row(1)
        assert row == {**verl_row(1, split), "answer": "1201"}
        sums = [Sample("train/0/1", row, [], text, [1], "stop") for text in ("so\n#### 1,201", "#### 1202", "1201")]
        assert [score(each) for each in sums] == [1.0, 0.0, 0.0]


def test_the_sources_in_the_table_of_data_sets_take_the_fields_that_it_says(tmp_path: Path) -> None:
    table = PAGE.split("## Data sets")[1].split("## Whole examples")[0]
    queries = [source.partition("?")[2] for source in re.findall(r"\| `(\w+:[^`]+)` \|$", table, re.M)]
    trl = {"prompt": "1+1=", "solution": "2"}
    prime = {"question": "1+1=", "answer": "2", "info": '{"level": 1}', "task": "sums"}
    for query, row in zip(queries, (verl_row(0, "train"), verl_row(0, "train"), trl, prime), strict=True):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        found = open_source(f"jsonl:{tmp_path}/rows.jsonl?{query}", where="t").row(0)
        assert found["answer"] in ("1200", "2")
        assert {**found, **row} == found


def test_the_reward_of_the_trl_quick_start_compares_with_the_solution(tmp_path: Path) -> None:
    accuracy = function(tmp_path, "deepmath_rewards:accuracy")
    assert [accuracy(sample(text, solution="$\\\\frac{1}{2}$")) for text in ("it is $0.5$", "it is $2$")] == [1.0, 0.0]


def test_the_format_reward_of_the_gspo_example_wants_one_thought_first(tmp_path: Path) -> None:
    score = function(tmp_path, "think_rewards:think_format")
    texts = ("<think>\na\n</think>\nb", "b", "<think>a<think>b</think></think>c")
    assert [score(sample(text)) for text in texts] == [1.0, 0.0, 0.0]


def test_the_reward_of_the_prime_rl_example_is_a_similarity(tmp_path: Path) -> None:
    score = function(tmp_path, "reverse_rewards:score")
    texts = ("<reversed_text>cba</reversed_text>", "<reversed_text>xyz</reversed_text>", "cba")
    assert [score(sample(text, answer="cba")) for text in texts] == [1.0, 0.0, 0.0]


def test_the_table_of_defaults_states_those_of_the_product(tmp_path: Path) -> None:
    path = tmp_path / "least.yaml"
    path.write_text(LEAST)
    document = load(path).document()
    table = PAGE.split("Defaults that differ:")[1].split("Evaluation sets")[0]
    stated = dict(re.findall(r"^\| `([\w.-]+)` \| `([^`]+)` \|", table, re.M))
    assert len(stated) > 10
    for key, value in stated.items():
        found: Any = document
        for part in key.split("."):
            found = None if found is None else found[part]
        assert found == yaml.safe_load(value), key
