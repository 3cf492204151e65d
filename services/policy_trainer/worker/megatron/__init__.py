"""The megatron backend: a model of `shared.megatron` in training."""
