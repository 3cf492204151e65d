"""The megatron backend, which trains a model from `shared.megatron`."""
