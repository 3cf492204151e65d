"""How many bytes a topology needs in the batch-store at worst; it never looks at a running store.

One place for the arithmetic: the check at start, the reservation at admission and the error message agree.
"""

from __future__ import annotations

import math

from shared.topology.model_files import weight_shapes
from shared.topology.schema import Topology

# Of a token, by key. Proximal and reference log-probs are counted only where the topology makes them.
_ROLLOUT_TOKEN_BYTES = {"token_ids": 4, "loss_mask": 1, "rollout_logprobs": 4, "versions": 4}
_REF_TOKEN_BYTES = {"ref_logprobs": 4}
_PROX = 4
_PROX_TOKEN_BYTES = {"prox_logprobs": _PROX}
# A ragged shard is values and lengths; a length is int64, one a sample and key.
_LENGTH_BYTES = 8
# What the store adds, at most: a put's last page and header, a task's row of the table, a shard's row and alignment.
# Every task may come in puts of its own, one for each stage.
_PUT_BYTES = 4096 + 64
_NAME_BYTES = 64
_SHARD_BYTES = 32 + 8 + 63 + _NAME_BYTES
# `lengths` and `sample_index` are shards too; what they hold is in _LENGTH_BYTES.
_RAGGED_KEYS = 2
# Named by none of the leases that count: of an evaluation that they left behind, or of the lineage before a reload.
_SPARE_VERSIONS = 1
# Deterministic mode: beside the version being written, those of all steps that may still be sampled, and one that a
# reloaded trainer publishes again.
_EXACT_VERSIONS = 3
# With algorithm.kl.refresh_every: the reference's, and its next one while the last tasks of before are being scored.
_REFERENCE_VERSIONS = 2
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    tokens = _longest(topology, max_prompt_tokens)
    data = topology.algorithm.group_size * (tokens * sum(keys.values()) + len(keys) * _LENGTH_BYTES)
    return data + overhead_bytes(topology)


def _longest(topology: Topology, max_prompt_tokens: int) -> int:
    """Tokens of a sample, at most."""
    if topology.workflow is not None:
        return topology.workflow.max_tokens
    return max_prompt_tokens + topology.sampling.max_new_tokens


def overhead_bytes(topology: Topology) -> int:
    """What the store adds to the shards of one training task, at most."""
    puts = 1 + topology.needs_reference + topology.needs_proximal
    return puts * (_PUT_BYTES + 12 + _NAME_BYTES) + (len(token_bytes(topology)) + _RAGGED_KEYS) * _SHARD_BYTES


def replay_bytes(topology: Topology, max_prompt_tokens: int) -> int:
    """What a step that is replayed holds besides: its proximal log-probs once more, until the former ones go."""
    if not topology.needs_proximal:
        return 0
    data = topology.algorithm.group_size * (_longest(topology, max_prompt_tokens) * _PROX + _LENGTH_BYTES)
    return topology.algorithm.tasks_per_step * (data + _PUT_BYTES + 12 + _NAME_BYTES + _SHARD_BYTES)


def unleased_token_bytes(topology: Topology) -> int:
    """Bytes of a token that no leased stage makes: the trainer puts them itself."""
    return _PROX if topology.needs_proximal else 0


def held_tasks(topology: Topology) -> int:
    """Tasks whose shards may be in the store at once, however the run goes.

    The live ones (admission); the step that was trained last, until its checkpoint is saved (a store that is nearly
    full orders one a step); and a lease block an engine, of evaluations and of attempts that are about to be cleared.
    """
    steps = topology.staleness + 1 + (topology.gc.after == "checkpoint")
    rollout = topology.services.rollout
    return steps * topology.algorithm.tasks_per_step + rollout.instances * rollout.block_tasks


def live_versions(staleness: int) -> int:
    """Versions that train leases name, the newest and the one that is being written, at most.

    A lease of step s names version s - 1 - staleness or a later one, and while it lives the run does not get past step
    s - 1 (by completion it does, and then the scheduler lets the version go). So all of them are within `staleness` of
    the one being written; beside that there is always the newest.
    """
    return max(staleness, 1) + 1


def weight_versions(topology: Topology) -> int:
    """Weight versions that the batch-store may have to hold at once.

    A transformers engine on a CPU of the trainer's host computes with the mapped version itself, which counts until it
    takes another: all but the one that was given a lease last may hold older ones than any lease names.
    """
    rollout, kl = topology.services.rollout, topology.algorithm.kl
    reference = _REFERENCE_VERSIONS if kl is not None and kl.refresh_every else 0
    if topology.run.deterministic:  # copies them
        return topology.staleness + _EXACT_VERSIONS + reference
    maps = rollout.engine == "transformers" and rollout.device == "cpu"
    mapped = rollout.instances - 1 if maps and rollout.host == topology.store_hosts()[0] else 0
    return live_versions(topology.staleness) + _SPARE_VERSIONS + mapped + reference


def worst_case_bytes(topology: Topology, max_prompt_tokens: int, weight_bytes: int) -> int:
    """Bytes each batch-store must be able to hold for the run never to wait for room that cannot come: all tasks may
    be leased to the services of one host, which put into its store.

    `held_tasks`, each of `task_bytes`, beside `weight_versions` of `weight_bytes` and `replay_bytes`. More trained
    tasks that wait for a checkpoint are not counted: lack of room orders an early checkpoint. `max_prompt_tokens` is
    the longest prompt of the training set.
    """
    tasks = held_tasks(topology) * task_bytes(topology, max_prompt_tokens)
    return tasks + replay_bytes(topology, max_prompt_tokens) + weight_versions(topology) * weight_bytes


def limit_bytes(topology: Topology) -> int:
    """What each batch-store of the run can hold, in memory and spilled."""
    store = topology.services.batch_store
    return store.memory + (store.spill_limit or 0)


def weight_bytes(model: str, dtype: str) -> int:
    """Bytes of one weight version in the store: every parameter in the model's safetensors files, in `dtype`.

    Raises ValueError naming the file that is missing, cut off or no safetensors file, and OSError.
    """
    shapes = weight_shapes(model)
    return sum(map(math.prod, shapes)) * _DTYPE_BYTES[dtype] + len(shapes) * _SHARD_BYTES + _PUT_BYTES
