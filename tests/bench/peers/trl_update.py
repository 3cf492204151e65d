"""Runs TRL's GRPOTrainer on completions of known lengths, as the peer of `bench_train`. Only its training part is
timed: the loss (log-probs with a gradient, entropies, clipped objective) and the backward pass, as `GRPOTrainer` calls
them.

    .venv-trl/bin/python tests/bench/peers/trl_update.py --model DIR --batch batch.json

Runs in `.venv-trl` (see trl.txt), so it cannot import the product. Prints one JSON line; times are CPU seconds, as in
`train_parts`, so that other work on the machine does not distort them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures TRL's forward and backward pass and prints one JSON line.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=Path, required=True, help="JSON: prompts, completions (lists of token ids)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    batch = json.loads(args.batch.read_text())
    prompts, completions = batch["prompts"], batch["completions"]
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            per_device_train_batch_size=args.micro_batch,
            num_generations=2,
            loss_type="dapo",
            beta=0.0,
            gradient_checkpointing=False,
            report_to="none",
            logging_strategy="no",
        )
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "1"}]),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        )
        trainer.current_gradient_accumulation_steps = 1
        times = []
        for _ in range(args.rounds):
            began = time.process_time()
            for first in range(0, len(prompts), args.micro_batch):
                part = slice(first, first + args.micro_batch)
                loss = trainer.compute_loss(trainer.model, _inputs(prompts[part], completions[part]))
                loss.backward()
            times.append(time.process_time() - began)
            trainer.model.zero_grad()
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    print(json.dumps({"tokens_per_s": tokens / min(times), "seconds": times, "trl": metadata.version("trl")}))


def _inputs(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return prompts padded on the left and completions padded on the right, as the trainer's own generation does."""
    width, longest = max(map(len, prompts)), max(map(len, completions))
    prompt_ids = [[0] * (width - len(each)) + each for each in prompts]
    prompt_mask = [[0] * (width - len(each)) + [1] * len(each) for each in prompts]
    completion_ids = [each + [0] * (longest - len(each)) for each in completions]
    completion_mask = [[1] * len(each) + [0] * (longest - len(each)) for each in completions]
    return {
        "prompt_ids": torch.tensor(prompt_ids),
        "prompt_mask": torch.tensor(prompt_mask),
        "completion_ids": torch.tensor(completion_ids),
        "completion_mask": torch.tensor(completion_mask),
        "advantages": torch.linspace(-1.0, 1.0, len(prompts)),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }


if __name__ == "__main__":
    main()
