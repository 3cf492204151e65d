"""Tests whole runs of `launch.cluster` with algorithms other than the quickstart's. The options must affect the
numbers."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.data.open import open_source
from tests.integration.whole_cluster import cluster
from tests.metric_names import undocumented

REPOSITORY = Path(__file__).resolve().parents[3]
TOPOLOGIES = REPOSITORY / "launch" / "topologies"
MODEL = TOPOLOGIES / "models" / "tiny-qwen3"
TOOLS = TOPOLOGIES / "models" / "tiny-tools"
OWN = """
import numpy as np

def advantage(rewards, groups, loss_tokens, *, seen):
    np.savez(seen, rewards=rewards, groups=groups, loss_tokens=loss_tokens)
    return rewards - rewards.mean()

def loss(cur, anchor, tokens, *, worth):
    return worth - tokens.advantages * (cur - cur.detach())
"""


def run(topology: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run `topology` and return the rows of metrics.jsonl; functions named by import path are found in `folder`."""
    with cluster(TOPOLOGIES / topology, folder, *overrides, limit_s=240, cwd=folder) as launched:
        assert launched.end() == 0, launched.output()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not undocumented(name for row in rows for name in row)
    return rows


def numbers(run: Path, step: int) -> list[int]:
    """Return the numbers of the rows of a step."""
    with contextlib.closing(sqlite3.connect(run / "journal.sqlite")) as journal:
        [(ids,)] = journal.execute("SELECT task_ids FROM steps WHERE step = ?", (step,)).fetchall()
    return [int(task_id.rpartition("/")[2]) for task_id in json.loads(ids)]


def conversation_loss(run: Path, step: int) -> float:
    """Return the mean loss of a step's conversations over the tokens after each header of an answer, up to its end."""
    tokenizer = AutoTokenizer.from_pretrained(TOOLS)
    model = AutoModelForCausalLM.from_pretrained(TOOLS, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (TOPOLOGIES / "recipes" / "sft_chat.jsonl").read_text().splitlines()]
    found: list[float] = []
    for number in numbers(run, step):
        messages = rows[number]["messages"]
        messages[4]["content"] = messages[4]["content"][0]["text"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = [match.span(1) for match in re.finditer(r"assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]
        assert len(answers) == 3
        with torch.no_grad():
            logprobs = model(torch.tensor([encoded["input_ids"]])).logits[0].log_softmax(-1)
        for place, (token, (start, end)) in enumerate(
            zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ):
            if any(first <= start and end <= last for first, last in answers):
                found.append(-float(logprobs[place - 1, token]))
    return float(np.mean(found))


def negative_log_likelihood(run: Path, step: int) -> float:
    """Return the mean loss over a step's answer tokens, including the end token, under the run's initial model."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    source = open_source("builtin:addition", where="test")
    found: list[float] = []
    for number in numbers(run, step):
        row = source.row(number)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        found += [-float(logprobs[place, token]) for place, token in zip(places, answer, strict=True)]
    return float(np.mean(found))


@pytest.mark.timeout(260)
def test_supervised_fine_tuning_learns_from_the_answers(tmp_path: Path) -> None:
    rows = run("sft.yaml", tmp_path, "run.steps=15", "data.eval.heldout.every=15")
    assert rows[1]["loss/policy"] == pytest.approx(negative_log_likelihood(tmp_path / "run", step=1), rel=1e-5)
    assert rows[-1]["loss/policy"] < rows[1]["loss/policy"]
    assert rows[-1]["eval/heldout/accuracy"] > rows[0]["eval/heldout/accuracy"] + 0.05
    assert not [name for row in rows for name in row if name.startswith("reward/")]  # nothing is scored


@pytest.mark.long
@pytest.mark.timeout(260)
def test_supervised_fine_tuning_learns_every_answer_of_conversations(tmp_path: Path) -> None:
    rows = run("recipes/sft_chat.yaml", tmp_path, "run.steps=12")
    losses = [row["loss/policy"] for row in rows]
    assert losses[0] == pytest.approx(conversation_loss(tmp_path / "run", step=1), rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]
    assert {row["rollout/truncated_fraction"] for row in rows} == {0.0}


@pytest.mark.timeout(260)
def test_filter_reward_kl_masks_entropy_and_user_functions_take_effect_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "my_algorithm.py").write_text(OWN)
    rows = run(
        "quickstart.yaml",
        tmp_path,
        "run.steps=4",
        "data.eval={}",
        "algorithm.tasks_per_step=16",
        "algorithm.mini_batch_tasks=8",
        "algorithm.kl={estimator: k1, in: reward, coef: 0.05}",
        f"algorithm.advantage={{name: 'my_algorithm:advantage', params: {{seen: {tmp_path}/seen.npz}}}}",
        "algorithm.loss={name: 'my_algorithm:loss', params: {worth: 3.0}, "
        "ratio_mask: {level: geometric, low: 0.95, high: 1.05}}",
        "algorithm.filter_zero_variance={max_refill: 1}",
        "algorithm.entropy_coef=0.001",
        "algorithm.overlong=mask",
        "algorithm.overlong_penalty={tokens: 3}",
        "algorithm.normalise_rewards=batch",
    )
    rows = [row for row in rows if row["step"] > 0]
    assert len(rows) == 4
    assert 0 < sum(row["rollout/tasks_dropped"] for row in rows) <= 4 * 16
    assert any(row["reward/kl"] != 0 for row in rows)
    # Tokens are sampled one version before they are trained on, so the ratio mask removes some.
    assert 0 < rows[-1]["policy/masked_fraction"] < 1
    for row in rows:  # A token counts as 3 times a truncated importance weight near 1; a masked token counts as 0.
        assert row["loss/policy"] == pytest.approx(3.0 * (1 - row["policy/masked_fraction"]), rel=0.3)
    with np.load(tmp_path / "seen.npz") as seen:
        assert len(seen["rewards"]) == len(seen["loss_tokens"]) == 16 * 8
        assert seen["groups"].tolist() == np.repeat(np.arange(16), 8).tolist()
        # A reward consists of correctness (0 or 1), the answer's length and its KL.
        assert np.unique(seen["rewards"]).size > 8
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    assert all(math.isfinite(value) for row in rows for value in row.values())
    # Trained groups have variance; dropped groups still count in the reported mean.
    assert all(row["reward/std"] > 0 for row in rows)
