"""Runs GRPO in one process and one file. The cluster's curve and speed are compared with those of this run. This module
must never import the product's trainer, rollout or losses: only an independent implementation can reveal their
mistakes.

    python -m tests.reference.plain_grpo --steps 200 --threads 1

Prints one JSON object per step. A step has 64 tasks x 8 samples and one update; the model, the data, the reward and the
numbers are those of the quickstart topology. With `--staleness 1` an update learns from samples drawn with the weights
from before the last update (the first two updates both learn from samples drawn with the initial weights).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.data import Source, open_source

MODEL = Path(__file__).parents[2] / "launch" / "topologies" / "models" / "tiny-qwen3"
TASKS_PER_STEP, GROUP_SIZE = 64, 8
MAX_NEW_TOKENS, TEMPERATURE = 8, 1.0
CLIP, KL_COEF, STD_EPSILON = 0.2, 0.001, 1e-6
LEARNING_RATE, CLIP_NORM = 3e-4, 1.0


@dataclass(frozen=True)
class Samples:
    """B sampled completions of T positions: token ids int64, log-probs float32 and a mask that is 1 up to and
    including the end-of-sequence token."""

    prompt_BP: torch.Tensor
    ids_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    mask_BT: torch.Tensor


@torch.no_grad()
def sample(model: Any, prompt_BP: torch.Tensor, *, temperature: float, eos: int) -> Samples:
    """Continue equally long prompts by up to MAX_NEW_TOKENS tokens. Temperature 0 chooses the likeliest token."""
    output = model(input_ids=prompt_BP, use_cache=True, logits_to_keep=1)
    running_B1 = torch.ones(len(prompt_BP), 1)
    ids, logprobs, mask = [], [], []
    for position in range(MAX_NEW_TOKENS):
        logits_BV = output.logits[:, -1].float() / (temperature or 1.0)
        logprobs_BV = logits_BV.log_softmax(-1)
        id_B1 = torch.multinomial(logprobs_BV.exp(), 1) if temperature else logits_BV.argmax(-1, keepdim=True)
        ids.append(id_B1)
        logprobs.append(logprobs_BV.gather(1, id_B1))
        mask.append(running_B1)
        running_B1 = running_B1 * (id_B1 != eos)
        if not running_B1.any() or position == MAX_NEW_TOKENS - 1:
            break
        output = model(input_ids=id_B1, past_key_values=output.past_key_values, use_cache=True)
    return Samples(prompt_BP.clone(), torch.cat(ids, 1), torch.cat(logprobs, 1), torch.cat(mask, 1))


def score(model: Any, samples: Samples) -> torch.Tensor:
    """Return log-probs [B, T] of the sampled tokens at logits / temperature; undefined where the mask is 0."""
    tokens = samples.ids_BT.shape[1]
    # No attention mask is needed: causal attention does not see the tokens after the end of a sequence.
    ids = torch.cat([samples.prompt_BP, samples.ids_BT], dim=1)[:, :-1]
    logits_BTV = model(input_ids=ids, logits_to_keep=tokens, use_cache=False).logits.float() / TEMPERATURE
    return logits_BTV.log_softmax(-1).gather(2, samples.ids_BT[:, :, None]).squeeze(2)


def grpo_advantages(reward_B: torch.Tensor) -> torch.Tensor:
    """Return (reward - group mean) / (group std + epsilon): DeepSeekMath (arXiv 2402.03300), section 4.1.2."""
    reward_NG = reward_B.view(-1, GROUP_SIZE)
    deviation_NG = reward_NG - reward_NG.mean(1, keepdim=True)
    return (deviation_NG / (reward_NG.std(1, keepdim=True) + STD_EPSILON)).flatten()


def grpo_loss(
    cur_BT: torch.Tensor, samples: Samples, reference_BT: torch.Tensor, advantage_B: torch.Tensor
) -> torch.Tensor:
    """Return the mean over all tokens of the clipped objective (against the rollout's log-probs) plus k3 (against the
    reference)."""
    ratio_BT = (cur_BT - samples.logprobs_BT).exp()
    advantage_B1 = advantage_B[:, None]
    gain_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    delta_BT = reference_BT - cur_BT
    k3_BT = delta_BT.exp() - delta_BT - 1
    return ((KL_COEF * k3_BT - gain_BT) * samples.mask_BT).sum() / samples.mask_BT.sum()


def rewards(samples: Samples, answers: list[str], tokenizer: Any) -> torch.Tensor:
    """Return 1 where the text before the end-of-sequence token is exactly the answer, else 0."""
    ids = [
        [i for i, kept in zip(row, mask, strict=True) if kept]
        for row, mask in zip(samples.ids_BT.tolist(), samples.mask_BT.tolist(), strict=True)
    ]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return torch.tensor([float(text == answer) for text, answer in zip(texts, answers, strict=True)])


def prompts(tokenizer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])


def evaluate(model: Any, tokenizer: Any, source: Source) -> float:
    rows = [source.row(index) for index in range(len(source))]
    samples = sample(model, prompts(tokenizer, rows), temperature=0.0, eos=tokenizer.eos_token_id)
    return rewards(samples, [row["answer"] for row in rows], tokenizer).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs GRPO in one process and prints one JSON line per step.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reference, engine = copy.deepcopy(policy).eval(), copy.deepcopy(policy).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    train = open_source("builtin:addition", where="plain_grpo")
    test = open_source("builtin:addition?split=test", where="plain_grpo")
    print(json.dumps({"step": 0, "eval": evaluate(policy, tokenizer, test)}), flush=True)

    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        first = (step - 1) * TASKS_PER_STEP  # The source is already shuffled.
        rows = [train.row(index % len(train)) for index in range(first, first + TASKS_PER_STEP)]
        prompt_BP = prompts(tokenizer, rows).repeat_interleave(GROUP_SIZE, 0)
        samples = sample(engine, prompt_BP, temperature=TEMPERATURE, eos=tokenizer.eos_token_id)
        reward_B = rewards(samples, [row["answer"] for row in rows for _ in range(GROUP_SIZE)], tokenizer)
        generated = time.perf_counter()
        with torch.no_grad():
            reference_BT = score(reference, samples)
        referenced = time.perf_counter()
        if args.staleness == 1:
            engine.load_state_dict(policy.state_dict())  # The next step samples with the weights before this update.
        loss = grpo_loss(score(policy, samples), samples, reference_BT, grpo_advantages(reward_B))
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP_NORM).item()
        optimizer.step()
        if args.staleness == 0:
            engine.load_state_dict(policy.state_dict())
        ended = time.perf_counter()
        record = {
            "step": step,
            "reward": round(reward_B.mean().item(), 4),
            "loss": round(loss.item(), 6),
            "grad_norm": round(grad_norm, 4),
            "length": round(samples.mask_BT.sum(1).mean().item(), 3),
            "generate_s": round(generated - started, 3),
            "reference_s": round(referenced - generated, 3),
            "train_s": round(ended - referenced, 3),
            "samples_per_s": round(len(reward_B) / (ended - started), 1),
        }
        if step % args.eval_every == 0:
            record["eval"] = evaluate(policy, tokenizer, test)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
