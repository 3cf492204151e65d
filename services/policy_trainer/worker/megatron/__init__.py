"""The megatron backend, which trains a model of `shared.megatron`."""
