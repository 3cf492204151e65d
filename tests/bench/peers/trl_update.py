"""Runs TRL's GRPOTrainer on completions of known lengths, as the peer of `bench_train`. Only its training part is
timed: the loss (log-probs with a gradient, entropies, clipped objective) and the backward pass, as `GRPOTrainer` calls
them.

    .venv-trl/bin/python tests/bench/peers/trl_update.py --model DIR --batch batch.json [--device cuda]

Runs in `.venv-trl` (see trl.txt), so it cannot import the product. Prints one JSON line. On a CPU, times are CPU
seconds, as in `train_parts`, so that other work on the machine does not distort them; on a GPU, they are wall-clock
seconds until the GPU is done, and the first round is left out.
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
    parser.add_argument("--max-tokens", type=int, help="tokens in a micro-batch with padding, instead of --micro-batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    batch = json.loads(args.batch.read_text())
    prompts, completions = batch["prompts"], batch["completions"]
    parts = _parts(prompts, completions, args.micro_batch, args.max_tokens)
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=args.device == "cpu",
            bf16=args.dtype == "bfloat16",
            model_init_kwargs={"dtype": args.dtype, "attn_implementation": "sdpa"},
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
        device, clock = trainer.accelerator.device, time.process_time if args.device == "cpu" else _finished
        times = []
        for _ in range(args.rounds + (args.device == "cuda")):
            began = clock()
            for part in parts:
                loss = trainer.compute_loss(trainer.model, _inputs(prompts[part], completions[part], device))
                loss.backward()
            times.append(clock() - began)
            trainer.model.zero_grad()
        times = times[-args.rounds :]
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    print(json.dumps({"tokens_per_s": tokens / min(times), "seconds": times, "trl": metadata.version("trl")}))


def _finished() -> float:
    """Return the time, in seconds, once the GPU is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


def _parts(
    prompts: list[list[int]], completions: list[list[int]], micro_batch: int, max_tokens: int | None
) -> list[slice]:
    """Return the micro-batches: `micro_batch` samples each, or as many as fit into `max_tokens` with their padding."""
    parts, first = [], 0
    while first < len(prompts):
        last = first + 1 if max_tokens else min(first + micro_batch, len(prompts))
        while max_tokens and last < len(prompts):
            some = slice(first, last + 1)
            width = max(map(len, prompts[some])) + max(map(len, completions[some]))
            if width * (last + 1 - first) > max_tokens:
                break
            last += 1
        parts.append(slice(first, last))
        first = last
    return parts


def _inputs(prompts: list[list[int]], completions: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return prompts padded on the left and completions padded on the right, as the trainer's own generation does."""
    width, longest = max(map(len, prompts)), max(map(len, completions))
    prompt_ids = [[0] * (width - len(each)) + each for each in prompts]
    prompt_mask = [[0] * (width - len(each)) + [1] * len(each) for each in prompts]
    completion_ids = [each + [0] * (longest - len(each)) for each in completions]
    completion_mask = [[1] * len(each) + [0] * (longest - len(each)) for each in completions]
    inputs = {
        "prompt_ids": torch.tensor(prompt_ids),
        "prompt_mask": torch.tensor(prompt_mask),
        "completion_ids": torch.tensor(completion_ids),
        "completion_mask": torch.tensor(completion_mask),
        "advantages": torch.linspace(-1.0, 1.0, len(prompts)),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }
    return {name: each.to(device) for name, each in inputs.items()}


if __name__ == "__main__":
    main()
