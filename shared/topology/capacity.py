"""How many bytes a topology needs in the batch-store at worst; it never looks at a running store.

One place for the arithmetic: the check at start, the reservation at admission and the error message agree.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from shared.topology.schema import Topology

# Of a token, by key. Proximal and reference log-probs are counted only where the topology makes them.
_ROLLOUT_TOKEN_BYTES = {"token_ids": 4, "loss_mask": 1, "rollout_logprobs": 4, "versions": 4}
_REF_TOKEN_BYTES = {"ref_logprobs": 4}
_PROX_TOKEN_BYTES = {"prox_logprobs": 4}
# A ragged shard is values and lengths; a length is int64, one a sample and key.
_LENGTH_BYTES = 8
# The version in use, the one being written, and the one a live task or a slow engine still names.
WEIGHT_VERSIONS = 3
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEADER_LIMIT_BYTES = 100 * 1024**2


def token_bytes(topology: Topology) -> dict[str, int]:
    """Bytes of one token under each key that a training task of this topology makes."""
    keys = dict(_ROLLOUT_TOKEN_BYTES)
    if topology.needs_reference:
        keys |= _REF_TOKEN_BYTES
    if topology.needs_proximal:
        keys |= _PROX_TOKEN_BYTES
    return keys


def task_bytes(topology: Topology, max_prompt_tokens: int) -> int:
    """Bytes of all keys of one training task whose samples are all as long as they can be."""
    keys = token_bytes(topology)
    tokens = max_prompt_tokens + topology.sampling.max_new_tokens
    return topology.algorithm.group_size * (tokens * sum(keys.values()) + len(keys) * _LENGTH_BYTES)


def worst_case_bytes(topology: Topology, max_prompt_tokens: int, weight_bytes: int) -> int:
    """Bytes the batch-store must be able to hold for the run never to wait for room that cannot come.

    `(staleness + 1) * tasks_per_step` tasks may be live (admission), each of `task_bytes`, beside
    `WEIGHT_VERSIONS` versions of `weight_bytes`. Trained tasks that wait for a checkpoint are not counted:
    lack of room orders an early checkpoint. `max_prompt_tokens` is the longest prompt of the training set.
    """
    live_tasks = (topology.staleness + 1) * topology.algorithm.tasks_per_step
    return live_tasks * task_bytes(topology, max_prompt_tokens) + WEIGHT_VERSIONS * weight_bytes


def weight_bytes(model: str, dtype: str) -> int:
    """Bytes of one weight version: every parameter in the model's safetensors files, in `dtype`.

    Raises ValueError naming the file whose header is not a safetensors header, and OSError.
    """
    elements = sum(_elements(file) for file in sorted(Path(model).glob("*.safetensors")))
    return elements * _DTYPE_BYTES[dtype]


def _elements(file: Path) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{file} is not a safetensors file: header of {length} bytes, limit {_HEADER_LIMIT_BYTES}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file: unreadable header") from error
