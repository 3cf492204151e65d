"""Makes the model of the recipe `moe.yaml`: a Qwen3-MoE with eight experts per layer that adds two-digit numbers badly.

    python -m launch.topologies.models.make_tiny_moe --out launch/topologies/models/tiny-moe

It is made like the quickstart's model (`make_tiny_qwen3`), whose tokenizer and warm start it has. The load of the
experts is not balanced while it learns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from launch.topologies.models.make_tiny_qwen3 import VOCAB_SIZE, greedy_accuracy, make_tokenizer, save, warm_start
from shared.data import open_source

HIDDEN, LAYERS, EXPERTS, CHOSEN = 64, 2, 8, 2


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """Return a model with fresh weights, drawn from torch's global generator."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        use_sliding_window=False,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the model of the recipe for mixtures of experts.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accuracy", type=float, default=0.4, help="accuracy at which the warm start stops")
    args = parser.parse_args()

    torch.set_num_threads(1)  # A different thread count changes the order of additions and thus the bits.
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train = open_source("builtin:addition", where="make_tiny_moe")
    test = open_source("builtin:addition?split=test", where="make_tiny_moe")
    steps = warm_start(model, tokenizer, train, accuracy=args.accuracy, seed=args.seed)
    held_out = greedy_accuracy(model, tokenizer, [test.row(index) for index in range(len(test))])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, {steps} steps, greedy held-out accuracy {held_out:.3f}")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
