"""Imports modules into the server from which ranks are forked. These modules must not start threads."""

import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import services.policy_trainer.worker.backend_torch
import services.policy_trainer.worker.megatron.backend
import services.policy_trainer.worker.mesh  # noqa: F401
