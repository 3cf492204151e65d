"""What `bench_train` measures in processes of their own: `speed BATCH MODEL` and `memory chunked|whole`."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proto.messages import LossSpec
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.batch_loss import BatchLoss
from shared.model import logprobs
from shared.ranks.layout import Layout
from shared.topology.algorithm import Optimizer

ROUNDS = 3
VOCABULARY, HIDDEN, TOKENS = 150_000, 64, 2048


def speed(batch: Path, model: Path) -> dict[str, Any]:
    """Tokens (prompts included) a CPU second, on one thread: the best of ROUNDS rounds."""
    data = json.loads(batch.read_text())
    pairs = list(zip(data["prompts"], data["completions"], strict=True))
    ids = np.concatenate([np.array(prompt + answer, np.int32) for prompt, answer in pairs])
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs], np.int32)
    mask = np.concatenate([np.array([0] * len(prompt) + [1] * len(answer), np.uint8) for prompt, answer in pairs])
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
        "versions": np.zeros(len(ids), np.int32),
    }
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
    advantages = np.repeat(np.linspace(-1, 1, len(lengths)), lengths).astype(np.float32)
    weights = np.full(len(ids), 1 / mask.sum(), np.float32)
    options = BackendOptions(max_tokens=4096, threads=1, device="cpu", scratch=batch.parent / "offloaded")
    backend = TorchBackend(model, "float32", Optimizer(lr=1e-4), options, Layout(1).place(0))
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        loss = BatchLoss(spec, flat, advantages, weights, "cpu")
        backend.forward_backward(Sequences(ids, lengths, mask), 1.0, loss, entropy=loss.entropy)
        times.append(time.process_time() - began)
        backend.drop_gradients()
    return {"tokens_per_s": len(ids) / min(times), "seconds": times}


def memory(how: str) -> dict[str, Any]:
    """Peak resident bytes above those before, of one forward and backward over TOKENS tokens, all of them scored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    if how == "whole":
        logprobs.MAX_LOGITS = TOKENS * VOCABULARY
    rng = np.random.default_rng(0)
    lengths = np.full(8, TOKENS // 8)
    mask = np.ones(TOKENS, np.uint8)
    mask[:: TOKENS // 8] = 0
    ids = rng.integers(0, VOCABULARY, TOKENS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for part in logprobs.score(model, ids, lengths, mask, 1.0, TOKENS, entropy="value"):
        part.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": (peak - before) * 1024}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(speed(Path(sys.argv[2]), Path(sys.argv[3])) if sys.argv[1] == "speed" else memory(sys.argv[2])))
