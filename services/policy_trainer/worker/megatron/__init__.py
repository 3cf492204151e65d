"""The megatron backend: megatron-core's GPTModel with tensor, pipeline, context and data parallelism."""
