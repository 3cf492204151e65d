"""Runs TRL's GRPOTrainer on the quickstart's task, as the peer in `tests.bench.against_trl`. It runs in `.venv-trl`
(see trl.txt), so it cannot import the product.

    .venv-trl/bin/python tests/bench/peers/trl_grpo.py --rows train.jsonl --model launch/topologies/models/tiny-qwen3

Prints one JSON line: `samples_per_s` over the steps after warm-up, the values from which it was computed, and the
reward and completion length of every step.

The work is the quickstart's: 64 tasks x 8 samples and one AdamW update per step (512 samples, constant learning rate,
no weight decay, gradient norm clipped to 1); at most 8 new tokens at temperature 1, no top-k or top-p; exact-match
reward; advantages divided by the group's standard deviation; ratio clipped at 0.2; loss averaged over all tokens of the
step (`dapo`); k3 KL of 0.001 to a frozen copy, not multiplied by the ratio (`use_bias_correction_kl=False`); float32.

The differences: one process whose generation, reference pass and update take turns on all threads; an epsilon of 1e-4
(instead of 1e-6) added to the standard deviation; no evaluation, checkpoint or metrics file; the quickstart writes
checkpoints and metrics.

The settings for speed: no gradient checkpointing (TRL's default is on), fused AdamW, no logging. `--threads`,
`--micro-batch` and `--generation-batch` come from a recorded sweep (trl_sweep.json). A generation batch of up to one
step's samples is on policy, and TRL then computes no log-probs of the old policy. A batch of two steps' samples is
TRL's form of staleness 1: every second update learns from samples that were drawn before the previous update, and TRL
scores these samples again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

GROUP_SIZE = 8
TEMPERATURE = 1.0
CLIP, KL_COEF = 0.2, 0.001
LEARNING_RATE, CLIP_NORM = 3e-4, 1.0


class Clock(TrainerCallback):
    """A callback that records the end of each step, in seconds of `time.perf_counter`. Entry 0 is the beginning of
    training."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends_s.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends_s.append(time.perf_counter())


class ExactMatch:
    """Reward function that returns 1.0 if the completion is exactly the answer, and otherwise 0.0. It records the means
    of each call, which covers one generation batch."""

    __name__ = "exact_match"

    def __init__(self) -> None:
        self.reward_mean: list[float] = []
        self.length_mean: list[float] = []

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        rewards = [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]
        self.reward_mean.append(sum(rewards) / len(rewards))
        self.length_mean.append(sum(map(len, completion_ids)) / len(completion_ids))
        return rewards


def config(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        seed=args.seed,
        use_cpu=args.device == "cpu",
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": args.dtype, "attn_implementation": args.attention},
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.samples // args.micro_batch,
        steps_per_generation=args.generation_batch // args.micro_batch,
        num_iterations=1,
        num_generations=GROUP_SIZE,
        max_completion_length=args.max_new_tokens,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=CLIP,
        beta=KL_COEF,
        use_bias_correction_kl=False,
        scale_rewards="group",
        optim="adamw_torch_fused",
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP_NORM,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures TRL's GRPOTrainer and prints one JSON line.")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with prompt and answer")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5, help="steps left out of samples_per_s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=512, help="samples per step, in groups of 8")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument(
        "--micro-batch", type=int, default=512, help="samples per forward and backward pass; must divide --samples"
    )
    parser.add_argument(
        "--generation-batch",
        type=int,
        default=512,
        help="samples generated together; a multiple of --micro-batch",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    args = parser.parse_args()
    if args.samples % args.micro_batch or args.samples % GROUP_SIZE:
        parser.error(
            f"--micro-batch {args.micro_batch} and {GROUP_SIZE} must divide the {args.samples} samples of a step"
        )
    if args.generation_batch % args.micro_batch or args.steps * args.samples % args.generation_batch:
        parser.error(
            f"--generation-batch {args.generation_batch} must be a multiple of --micro-batch {args.micro_batch} and "
            f"divide the {args.steps * args.samples} samples of the run"
        )
    if not 0 <= args.warm_up < args.steps:
        parser.error(f"--warm-up {args.warm_up} leaves none of the {args.steps} steps to measure")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()

    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])
    clock, reward = Clock(), ExactMatch()
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=[reward],
            args=config(args, folder),
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()

    ends_s = clock.ends_s
    generations = args.steps * args.samples // args.generation_batch
    if len(ends_s) != args.steps + 1 or len(reward.reward_mean) != generations:
        raise SystemExit(
            f"trl_grpo: {len(ends_s) - 1} steps completed and {len(reward.reward_mean)} batches of "
            f"{args.generation_batch} were scored, not {args.steps} and {generations}; this TRL splits a step "
            "differently, so the figures would be wrong"
        )
    measured_s = ends_s[-1] - ends_s[args.warm_up]
    print(
        json.dumps(
            {
                "samples_per_s": args.samples * (args.steps - args.warm_up) / measured_s,
                "measured_steps": args.steps - args.warm_up,
                "measured_s": measured_s,
                "step_s": [round(end - begin, 4) for begin, end in itertools.pairwise(ends_s)],
                "reward_mean": [round(value, 4) for value in reward.reward_mean],
                "length_mean": [round(value, 3) for value in reward.length_mean],
                "trl": metadata.version("trl"),
                "threads": torch.get_num_threads(),
                "micro_batch": args.micro_batch,
                "generation_batch": args.generation_batch,
                "attention": args.attention,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
