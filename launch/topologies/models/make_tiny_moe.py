"""Makes the model of the recipe `moe.yaml`: a Qwen3-MoE with eight experts per layer that adds two-digit numbers badly.

    python -m launch.topologies.models.make_tiny_moe --out launch/topologies/models/tiny-moe

It is made like the quickstart's model (`make_tiny_qwen3`), whose tokenizer, warm start and bounds it has. The load of
the experts is not balanced while it learns.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from launch.topologies.models.make_tiny_qwen3 import VOCAB_SIZE, run

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


if __name__ == "__main__":
    run("Makes the model of the recipe for mixtures of experts.", make_model)
