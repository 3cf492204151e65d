"""Tests the topology's keys for rewards, workflows and sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.topology import Topology, TopologyError, load, task_bytes
from tests.unit.rollout.rollout_engine import MODEL

TOPOLOGY = f"""\
run: {{name: keys, steps: 3}}
policy: {{model: {MODEL}}}
data: {{train: {{source: "builtin:addition"}}}}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: 8}}
algorithm: {{tasks_per_step: 4, group_size: 4}}
optimizer: {{lr: 1.0e-4}}
"""


def loaded(folder: Path, *overrides: str) -> Topology:
    (folder / "t.yaml").write_text(TOPOLOGY)
    return load(folder / "t.yaml", overrides)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(TopologyError) as caught:
        loaded(folder, *overrides)
    (problem,) = caught.value.problems
    return str(problem)


def test_a_length_penalty_for_single_answers_is_refused_with_a_workflow(tmp_path: Path) -> None:
    overrides = ("algorithm.overlong_penalty={tokens: 4}", "workflow={function: 'my.module:fn'}")
    assert "which limits one answer" in refusal(tmp_path, *overrides)


def test_a_workflow_is_optional_and_the_size_of_its_tasks_includes_all_its_tokens(tmp_path: Path) -> None:
    plain = loaded(tmp_path)
    assert plain.workflow is None
    flow = loaded(tmp_path, "workflow={function: 'my.module:fn', params: {a: 1}, max_tokens: 900}")
    assert flow.workflow is not None
    assert (flow.workflow.params, flow.workflow.timeout_s, flow.workflow.max_tokens) == ({"a": 1}, 120.0, 900)
    assert task_bytes(flow, 100) == task_bytes(plain, 892)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("workflow={function: fn}", "builtin:<name> or <module>:<function>"),
        ("workflow={function: 'a:b', max_token: 3}", "nearest valid key 'max_tokens'"),
        ("workflow={function: 'a:b', max_tokens: 20000}", "20000 tokens (workflow.max_tokens); use at least 20000"),
        ("workflow={function: 'a:b', timeout_s: 0}", "above 0"),
        ("reward.memory=lots", "'lots' is not a size"),
        ("reward.processes=0", "1 or more"),
        ("data.train.source=parquet:rows.parquet", "no file"),
        ("data.train.source=datasets:saved?split=train", "no folder"),
        ("data.train.source=gym:chain_sum", "is not a source"),
    ],
)
def test_impossible_settings_give_one_line_errors(tmp_path: Path, override: str, says: str) -> None:
    assert says in refusal(tmp_path, override)


def test_a_workflow_is_refused_in_deterministic_mode(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TOPOLOGY)
    with pytest.raises(TopologyError, match="calls of a workflow have no fixed order"):
        load(tmp_path / "t.yaml", ["workflow={function: 'a:b'}", "run.deterministic=true"])


def test_source_paths_are_relative_to_the_topologys_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    (tmp_path / "saved" / "train").mkdir(parents=True)
    parquet = loaded(tmp_path, "data.train.source=parquet:rows.parquet")
    assert parquet.data.train.source == f"parquet:{tmp_path}/rows.parquet"
    saved = loaded(tmp_path, "data.train.source=datasets:saved?split=train")
    assert saved.data.train.source == f"datasets:{tmp_path}/saved?split=train"
    gym = loaded(tmp_path, "data.train.source=reasoning-gym:chain_sum?size=10&seed=1")
    assert gym.data.train.source == "reasoning-gym:chain_sum?size=10&seed=1"


def test_a_sum_of_reward_functions_is_accepted(tmp_path: Path) -> None:
    functions = "[{function: 'builtin:exact_match', weight: 2}, {function: 'builtin:regex', params: {pattern: x}}]"
    topology = loaded(tmp_path, f"reward={{functions: {functions}}}")
    assert [(term.function, term.weight) for term in topology.reward.terms] == [
        ("builtin:exact_match", 2.0),
        ("builtin:regex", 1.0),
    ]
