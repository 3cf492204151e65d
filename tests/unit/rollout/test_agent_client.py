"""Tests the client of the OpenAI API that a workflow's context provides."""

from __future__ import annotations

import sys

import pytest

from services.rollout.user_code import user_side
from shared.workflow import WorkflowError
from tests.unit.rollout import agent_flow, flows
from tests.unit.rollout.workflow_rig import VERSION, run


def test_an_agent_calls_the_policy_with_the_context_s_client() -> None:
    pytest.importorskip("openai")
    made, _, _ = run("tests.unit.rollout.agent_flow:agent", tasks=2, samples=2, timeout_s=60.0)
    for group in made:
        for sample in group:
            assert sample.score is None
            [sequence] = sample.sequences
            assert set(sequence.versions[sequence.loss_mask == 1]) == {VERSION}
            assert sample.sample.state["text"] == sample.sample.completion


def test_the_client_is_made_before_the_first_sample_only_for_workflows_that_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "openai", raising=False)
    assert user_side.uses_openai(agent_flow.agent)
    assert not user_side.uses_openai(flows.two_turns)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    user_side.openai_client.cache_clear()
    with pytest.raises(WorkflowError, match=r"ctx\.openai needs the package openai; run `make setup-agents`"):
        user_side.openai_client()
