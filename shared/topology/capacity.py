"""Computes how many bytes a topology needs in the batch-store in the worst case. It does not inspect running stores.

The check at start, the reservation at admission and the error message all use this arithmetic. `stop_limit_s` tells the
launcher, the guard and the services how long a stopping run may take to save its state.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from shared.stages import RECORD, Per, Stage, task_stages, text_limit_bytes, with_keys_of
from shared.topology.fields import format_size
from shared.topology.model_files import largest_layer, named_shapes, parameter_count, read_config, version_shapes
from shared.topology.models import POLICY, TrainedModel
from shared.topology.schema import Topology

# Number of sequences per sample for whose keys room is reserved. A workflow can begin more contexts than that, but each
# of them costs at least a prompt.
_SEQUENCES = 6
# Maximum overhead of the store: a put's last page and header, a task's row of the table, a shard's row and alignment.
# Each task can be put in several parts, one for each stage.
_PUT_BYTES = 4096 + 64
_NAME_BYTES = 64
_SHARD_BYTES = 32 + 8 + 63 + _NAME_BYTES
# Number of versions that no counted lease names, such as the version of an unfinished evaluation or a version of the
# lineage before a reload.
_SPARE_VERSIONS = 1
# In deterministic mode, besides `staleness` versions: the version being written, one more with which a step may be
# sampled, and one that a reloaded trainer publishes again.
_EXACT_VERSIONS = 3
_TEMPLATE_TOKENS = 256
"""Assumed maximum number of tokens that a chat template adds to a prompt."""
# With algorithm.kl.refresh_every: the reference's version, and its next one while the last tasks from before a refresh
# are still being scored.
_REFERENCE_VERSIONS = 2
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STEP_S = 60.0
"""Seconds for work that does not grow with the checkpoint: the open step, and calls between services."""
_SAVED_BYTES_PER_S = 32 << 20
"""Minimum rate, that of a slow disk, at which a checkpoint is written, synced and read back."""
_FLOAT = 4
"""Size of a float32 in bytes."""
_SNAPSHOT_BYTES = 64 << 10
"""Maximum number of bytes of a rank's snapshot in addition to its tensors: header, states of random generators,
canaries."""
_MOMENTS = 2
"""Number of float32 values that the optimizer keeps per parameter, besides the parameter itself (AdamW)."""


def task_bytes(topology: Topology, max_prompt_tokens: int) -> int:
    """Return the number of bytes that a training task takes up in the store if all its samples have the maximum
    length."""
    return sum(_stage_bytes(stage, topology, max_prompt_tokens) for stage in task_stages(topology))


def _stage_bytes(stage: Stage, topology: Topology, max_prompt_tokens: int) -> int:
    """Return the number of bytes that the shards of one stage take up for one task, which are one put."""
    most = {
        Per.TOKEN: max_sample_tokens(topology, max_prompt_tokens),
        Per.TRAINED: max_sample_tokens(topology, 0),
        Per.SEQUENCE: _SEQUENCES,
        Per.SAMPLE: 1,
        Per.READ: topology.read_tokens,
    }
    data = topology.algorithm.group_size * sum(most[key.per] * key.nbytes for key in stage.keys)
    return data + _stage_overhead(stage)


def _stage_overhead(stage: Stage) -> int:
    return _PUT_BYTES + 12 + _NAME_BYTES + len(stage.keys) * _SHARD_BYTES


def max_sample_tokens(topology: Topology, max_prompt_tokens: int) -> int:
    """Return the maximum number of tokens in a sample."""
    if topology.workflow is not None:
        return topology.workflow.max_tokens
    return max_prompt_tokens + topology.sampling.max_new_tokens


def overhead_bytes(topology: Topology) -> int:
    """Return the maximum number of bytes that the store adds to the shards of one training task."""
    return sum(map(_stage_overhead, task_stages(topology)))


def replay_bytes(topology: Topology, max_prompt_tokens: int) -> int:
    """Return the number of extra bytes for a replayed step: a second copy of what the trainer puts itself.

    It is needed until the first copy is collected.
    """
    again = sum(_stage_bytes(stage, topology, max_prompt_tokens) for stage in _unleased(topology))
    return topology.algorithm.tasks_per_step * again


def record_bytes(topology: Topology, max_prompt_tokens: int) -> int:
    """Return the number of extra bytes for recording samples: data that is put for the recorder, and data that is not
    collected before the recorder has read it.

    Rollouts store the text of chosen tasks, and the trainer stores their advantages and log-probs. Each training task
    is chosen with the same probability, so the number of chosen tasks is taken as its mean plus six standard
    deviations. At most `hold_tasks` tasks of maximum size that have ended wait for the recorder.
    """
    samples = topology.monitor.samples
    if samples is None:
        return 0
    group, tokens = topology.algorithm.group_size, max_sample_tokens(topology, max_prompt_tokens)
    trained = _stage_bytes(with_keys_of(RECORD, topology), topology, max_prompt_tokens)
    one = text_limit_bytes(group * tokens, group) + _SHARD_BYTES + trained
    in_stores, waiting = held_tasks(topology), hold_tasks(topology)
    mean = in_stores * min(samples.per_step / topology.algorithm.tasks_per_step, 1.0)
    chosen = min(math.ceil(mean + 6 * math.sqrt(mean)), in_stores)
    return (chosen + waiting) * one + waiting * task_bytes(topology, max_prompt_tokens)


def hold_tasks(topology: Topology) -> int:
    """Return how many tasks of maximum size can have ended and be waiting for the recorder: one lease block per
    engine."""
    return topology.services.rollout.instances * topology.services.rollout.block_tasks


def unleased_token_bytes(topology: Topology) -> int:
    """Return the number of bytes per token that the trainer itself puts, outside the leased stages."""
    return sum(key.nbytes for stage in _unleased(topology) for key in stage.keys if key.per == Per.TOKEN)


def _unleased(topology: Topology) -> list[Stage]:
    return [stage for stage in task_stages(topology) if not stage.leased]


ADAPTERS_KEPT, ALL_WEIGHTS_KEPT = 4, 1
"""Number of newest versions without a name that a server keeps of each client's model."""


def held_tasks(topology: Topology) -> int:
    """Return the maximum number of tasks whose shards are in the store at once, however the run proceeds.

    These are the live tasks (admission); the tasks of the step trained last, until its checkpoint is saved (a store
    that is nearly full asks for a checkpoint per step); and one lease block per engine, for evaluations and attempts
    about to be cleared.
    """
    steps = topology.staleness + 1 + (topology.gc.after == "checkpoint")
    rollout = topology.services.rollout
    return steps * topology.algorithm.tasks_per_step + rollout.instances * rollout.block_tasks


def live_versions(staleness: int) -> int:
    """Return the maximum number of versions that train leases name, plus the newest and the one being written.

    A lease of step s names version s - 1 - staleness or a later one, and while that lease lives, the run does not get
    past step s - 1 (with consume completion the run does, but then the scheduler frees the version). Thus all named
    versions are within `staleness` of the version being written, and the newest version is counted in addition.
    """
    return max(staleness, 1) + 1


def weight_versions(topology: Topology) -> int:
    """Return the number of weight versions that a batch-store might have to hold at once.

    A transformers engine on a CPU computes with the version that it has mapped from its host's store, which counts
    until the engine switches to another one. Except for the engine that most recently got a lease, engines may hold
    older versions than any lease.
    """
    rollout, kl, serve = topology.services.rollout, topology.algorithm.kl, topology.serve
    reference = _REFERENCE_VERSIONS if kl is not None and kl.refresh_every else 0
    maps = rollout.engine == "transformers" and rollout.device == "cpu"
    if serve is not None:
        # The base, those that every model keeps (what clients save by name comes on top), and the one being written.
        return 2 + serve.max_models * (ALL_WEIGHTS_KEPT if serve.full_training else ADAPTERS_KEPT) + maps
    if topology.run.deterministic:  # engines copy the versions
        return topology.staleness + _EXACT_VERSIONS + reference
    engines = Counter(topology.hosts_of(rollout, rollout.instances))
    mapped = max(engines.values()) - 1 if maps else 0
    return live_versions(topology.staleness) + _SPARE_VERSIONS + mapped + reference


def worst_case_bytes(topology: Topology, max_prompt_tokens: int, weight_bytes: int) -> int:
    """Return the number of bytes that each batch-store must be able to hold, so that the run never waits for space that
    cannot be freed. In the worst case, all tasks are leased to the services on one host, which put all shards into that
    host's store.

    The sum is `held_tasks` times `task_bytes`, `weight_versions` times `weight_bytes`, `replay_bytes` and
    `record_bytes`. Further trained tasks that wait for a checkpoint are not counted, because a lack of room triggers an
    early checkpoint. `max_prompt_tokens` is the length of the longest prompt in the training set.
    """
    tasks = held_tasks(topology) * task_bytes(topology, max_prompt_tokens)
    extra = replay_bytes(topology, max_prompt_tokens) + record_bytes(topology, max_prompt_tokens)
    return tasks + extra + weight_versions(topology) * weight_bytes


def longest_prompt(topology: Topology, prompt_bytes: int) -> int:
    """Return an upper bound on the number of tokens in a prompt that is sampled without `max_prompt_tokens`, if the
    longest prompt of the training set has `prompt_bytes` bytes.

    One token per byte is assumed, but no more than the model's context has room for, because a longer prompt is
    dropped.
    """
    prompt, context = prompt_bytes + _TEMPLATE_TOKENS, context_tokens(topology)
    return prompt if context is None else min(prompt, max(context - topology.sampling.max_new_tokens, 1))


def context_tokens(topology: Topology) -> int | None:
    """Return the maximum number of tokens that the engine can process in a sequence, or None if no file says it."""
    rollout, config = topology.services.rollout, read_config(topology.policy.model)
    limit = rollout.engine_args.get("max_model_len") if rollout.engine == "vllm" else None
    scaled = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    if limit is None and (rollout.engine == "transformers" or not scaled):  # servers extend a scaled context
        limit = config.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def rows_problem(topology: Topology, prompt_bytes: int, place: str) -> str:
    """Return why the stores cannot hold all tasks that may be live, which would stall the run later, or an empty
    string. `prompt_bytes` is the size of the longest prompt of the training set, which is at `place`.

    Raises the errors of `weight_bytes`.
    """
    prompt, limit = longest_prompt(topology, prompt_bytes), limit_bytes(topology)
    needed = worst_case_bytes(topology, prompt, version_bytes(topology.policy_model))
    if limit >= needed:
        return ""
    return (
        f"services.batch-store.memory: {limit} bytes ({format_size(limit)}) cannot hold what this run might need: "
        f"prompts have up to {prompt} tokens (the longest is {place}; one token per byte, plus the chat template, "
        f"within the model's context); set at least {needed} ({format_size(needed)}), or set "
        "data.train.max_prompt_tokens"
    )


def limit_bytes(topology: Topology) -> int:
    """Return the number of bytes that each batch-store of the run can hold, in memory and spilled."""
    store = topology.services.batch_store
    return store.memory + (store.spill_limit or 0)


def weight_bytes(model: TrainedModel, dtype: str | None = None) -> int:
    """Return the number of bytes of one version of the model in the store, in `dtype`, or else the model's.

    Raises OSError, or ValueError naming the file that is missing, truncated or not a safetensors file.
    """
    shapes = version_shapes(model).values()
    return sum(map(math.prod, shapes)) * DTYPE_BYTES[dtype or model.dtype] + len(shapes) * _SHARD_BYTES + _PUT_BYTES


def version_bytes(model: TrainedModel) -> int:
    """Return the number of bytes of one version of the model that is published. Raises the errors of `weight_bytes`."""
    if model.publishes is not None and not model.publishes.sampled:
        return _SHARD_BYTES + _PUT_BYTES
    return weight_bytes(model)


class Parameters(NamedTuple):
    """How many parameters of a model are trained, how many are the base, which never changes, how many of the trained
    ones belong to experts, and how many of all are in the largest layer."""

    trained: int
    base: int = 0
    experts: int = 0
    layer: int = 0

    @property
    def whole(self) -> int:
        """The number of parameters of the model in the files, without adapters."""
        return self.base or self.trained


def parameter_counts(topology: Topology) -> dict[str, Parameters]:
    """Return the number of parameters of each model, by its section. Raises the errors of `parameter_count`."""
    counts: dict[str, Parameters] = {}
    for model in topology.trained:
        folder = str(model.folder)
        whole, layer = parameter_count(folder, model.head), largest_layer(folder)
        if model.lora is not None:
            adapters = sum(map(math.prod, version_shapes(model).values()))
            counts[model.name] = Parameters(adapters, whole, layer=layer)
        else:
            shapes = named_shapes(folder, model.head)
            inside = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
            counts[model.name] = Parameters(whole, experts=inside, layer=layer)
    for frozen in topology.frozen:
        if frozen.section != POLICY:
            counts[frozen.section] = Parameters(parameter_count(str(frozen.folder), frozen.head))
    return counts


def snapshot_bytes(topology: Topology) -> int:
    """Return the maximum total size, in bytes, of the snapshots that the ranks of all trained models keep in shared
    memory, two for each rank, and for each model of a server's clients.

    A model without snapshots counts as 0, and so does one that cannot be measured, which the topology check reports.
    """
    # A server publishes its base from a model of its own, at its start.
    models = 1 if topology.serve is None else topology.serve.max_models + 1
    return models * sum(map(_model_snapshot_bytes, topology.trained))


def _model_snapshot_bytes(model: TrainedModel) -> int:
    if not model.snapshots:
        return 0
    try:
        shapes = version_shapes(model).values()
    except (OSError, ValueError):
        return 0
    trainer, width = model.settings, DTYPE_BYTES[model.dtype]
    elements = sum(map(math.prod, shapes))
    # A single rank of backend torch has float32 masters alongside 16-bit weights, and so have the ranks of megatron.
    megatron = trainer.backend == "megatron"
    low = width < _FLOAT and (megatron or trainer.world_size == 1)
    weights = width if low else _FLOAT
    copies = trainer.dp * trainer.parallel.cp if megatron else 1  # copies of the weights, not of masters and moments
    data = elements * (copies * weights + low * _FLOAT + _MOMENTS * _FLOAT + model.earlier * width)
    rows = trainer.world_size * len(shapes) * (3 + _MOMENTS + model.earlier)
    padding = data // 50 if megatron else 0  # padding of a vocabulary that tp does not divide, and copied norms
    return 2 * (data + padding + rows * (_SHARD_BYTES + _NAME_BYTES) + trainer.world_size * _SNAPSHOT_BYTES)


def stop_limit_s(topology: Topology) -> float:
    """Return the time in seconds after which a trainer that is told to stop exits without a checkpoint.

    A checkpoint has float32 weights, optimizer moments and, if deterministic, earlier versions. The trained models are
    written to the same disk. A model that cannot be measured is not counted; the topology check reports it.
    """
    saved = 0
    for model in topology.trained:
        with suppress(OSError, ValueError):
            saved += weight_bytes(model, "float32") * (1 + _MOMENTS + model.earlier)
    if topology.serve is not None:  # the models of all clients are parked
        saved *= topology.serve.max_models
    return _STEP_S + saved / _SAVED_BYTES_PER_S
