"""The examples about a critic in the documents do what the text says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from services.policy_trainer.worker.credit import gae
from shared.credit import CreditTask
from shared.topology.monitor import WarningKind
from tests.integration.tiny.harness import ROOT


def test_the_estimator_in_your_code_is_gae_with_lambda_0() -> None:
    section = (ROOT / "docs" / "your_code.md").read_text().split("#### With a critic")[1]
    code: dict[str, Any] = {}
    exec(re.findall("```python\n(.*?)```", section, re.DOTALL)[0], code)  # noqa: S102  # the document is ours
    rng = np.random.default_rng(0)
    lengths, tokens = np.array([7, 1, 12]), 20
    mask = rng.random(tokens) < 0.6
    rewards, values = (np.where(mask, rng.normal(size=tokens), 0.0) for _ in range(2))
    task = CreditTask(
        task_id="train/0/0",
        rewards=np.ones(3),
        token_rewards=rewards,
        kl=None,
        teacher_kl=None,
        mask=mask,
        lengths=lengths,
        sample_index=np.arange(3),
        truncated=np.zeros(3, bool),
        token_ids=np.zeros(tokens, np.int64),
        rollout_logprobs=np.zeros(tokens),
        versions=np.zeros(tokens, np.int64),
        values=values,
    )
    advantages, returns = gae(rewards, values, mask, lengths, gamma=1.0, lam=0.0)
    own_advantages, own_returns = code["one_step"](task)
    np.testing.assert_allclose(own_advantages[mask], advantages[mask], rtol=0, atol=1e-15)
    np.testing.assert_allclose(own_returns[mask], returns[mask], rtol=0, atol=1e-15)


def test_every_kind_of_warning_is_explained() -> None:
    text = (ROOT / "docs" / "reading.md").read_text()
    assert [kind for kind in WarningKind if f"| `{kind}` |" not in text] == []
