"""Plans the memory of a run: what each process holds on each host and GPU, and in which phase of the run; shows
the plan as a table, and says which places are too small.

Only the model is counted (parameters, gradients and optimizer state), with the copies of it that exist for a time.
Activations, an engine's cache, the libraries and the shards in the store need additional memory, so a run whose plan
does not fit in its steps or its checkpoints cannot fit. The module is pure. `elements` is the number of parameters of
each model, by section (`capacity.parameter_counts`); the reference and the engines have as many as the policy, but the
reference has no adapters.
`gpus` holds the CUDA_VISIBLE_DEVICES of each process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from shared.rundir import service_name
from shared.topology.capacity import DTYPE_BYTES, Parameters
from shared.topology.fields import format_size
from shared.topology.lora import Lora, live_adapters, vllm_rank, vllm_slots
from shared.topology.models import DEVICE_SERVICE, POLICY, FrozenModel, TrainedModel
from shared.topology.schema import Topology

Key = tuple[str, int]
"""Service and instance."""
SHARE_WITH_GRADIENTS = 0.5
"""Maximum share of a rank's memory that the parts of the model take up if the rank keeps whole gradients. The rest is
for activations and weights that are gathered temporarily."""
_HERE = "this machine"
_FLOAT, _MOMENTS = 4, 8
"""Bytes per parameter of a float32 copy, and of the two moments of AdamW."""


class TrainingPart(StrEnum):
    """The parts of a model during training."""

    BASE = "base"
    WEIGHTS = "weights"
    MASTERS = "masters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


LAST_A_STEP: Mapping[str, frozenset[TrainingPart]] = MappingProxyType(
    {"torch": frozenset({TrainingPart.GRADIENTS}), "megatron": frozenset()}
)
"""The parts that each backend allocates in a step and frees at the end of the step."""


def training_parts(model: TrainedModel, *, evaluate: bool = False) -> dict[TrainingPart, float]:
    """Return the maximum number of bytes per trained parameter on each rank of `model`, by part.

    With backend torch, a single rank holds everything, with float32 masters beside 16-bit weights. Several ranks hold
    equal pieces in float32 (FSDP2). With megatron, ranks hold the weights and float32 gradients of their tensor- and
    pipeline-parallel piece, and split the masters and the optimizer state further. With `evaluate`, there is no
    optimizer state and, with backend torch, there are no gradients.
    """
    never = {TrainingPart.OPTIMIZER, *LAST_A_STEP[model.settings.backend]} if evaluate else set()
    return {part: nbytes for part, nbytes in _parts(model).items() if part not in never}


def _parts(model: TrainedModel) -> dict[TrainingPart, float]:
    trainer, width = model.settings, DTYPE_BYTES[model.dtype]
    masters = _FLOAT if width < _FLOAT else 0
    ranks = trainer.world_size
    if trainer.backend == "megatron":
        pieces = trainer.parallel.tp * trainer.parallel.pp
        return {
            TrainingPart.WEIGHTS: width / pieces,
            TrainingPart.MASTERS: masters / ranks,
            TrainingPart.GRADIENTS: _FLOAT / pieces,
            TrainingPart.OPTIMIZER: _MOMENTS / ranks,
        }
    if ranks > 1:
        return {
            TrainingPart.WEIGHTS: _FLOAT / ranks,
            TrainingPart.GRADIENTS: _FLOAT / ranks,
            TrainingPart.OPTIMIZER: _MOMENTS / ranks,
        }
    return {
        TrainingPart.WEIGHTS: width,
        TrainingPart.MASTERS: masters,
        TrainingPart.GRADIENTS: _FLOAT,
        TrainingPart.OPTIMIZER: _MOMENTS,
    }


def rank_bytes(model: TrainedModel, parameters: Parameters, *, evaluate: bool = False) -> dict[TrainingPart, int]:
    """Return the maximum number of bytes that each rank of `model` holds, by part. Ranks of backend torch, the only one
    with adapters, hold equal pieces of the base in the model's dtype."""
    base = math.ceil(parameters.base * DTYPE_BYTES[model.dtype] / model.settings.world_size)
    shares = training_parts(model, evaluate=evaluate)
    held = dict.fromkeys(shares, parameters.trained)
    for part in (TrainingPart.WEIGHTS, TrainingPart.GRADIENTS):  # the others are divided among all ranks
        held[part] = (
            parameters.trained - parameters.experts + math.ceil(parameters.experts / model.settings.parallel.ep)
        )
    parts = {TrainingPart.BASE: base} | {part: math.ceil(held[part] * share) for part, share in shares.items()}
    return {part: nbytes for part, nbytes in parts.items() if nbytes}


def gathered_bytes(model: TrainedModel, parameters: Parameters) -> int:
    """Return the number of bytes of the layer that each rank of `model` gathers to compute it (FSDP2), with all its
    experts, or 0 if a rank has whole layers. What the next layer takes if it is gathered ahead is not counted."""
    divided = model.settings.backend == "torch" and model.settings.world_size > 1
    return parameters.layer * DTYPE_BYTES[model.dtype] if divided else 0


def saved_bytes(model: TrainedModel) -> int:
    """Return the number of bytes per trained parameter of the state that rank 0 gathers for a checkpoint: the weights,
    the masters of 16-bit weights, and the moments.
    """
    width = DTYPE_BYTES[model.dtype]
    return width + (_FLOAT if width < _FLOAT else 0) + _MOMENTS


def holds_none(topology: Topology) -> bool:
    """Return whether the engine has no weights of its own: it computes with the version in its host's store, or on
    another server, or there is none."""
    rollout = topology.services.rollout
    if not topology.samples:
        return True
    embedded = rollout.engine == "transformers" and rollout.device == "cpu" and not topology.run.deterministic
    return (embedded and topology.policy.lora is None) or rollout.engine == "openai"


def engine_bytes(topology: Topology, parameters: Parameters) -> int:
    """Return the number of bytes of an engine's weights.

    vLLM has slots for several versions of an adapter, padded to the next rank that it supports. An embedded engine on a
    CPU samples with the versions in its host's store. On a GPU and in deterministic mode it copies them, and holds one
    more while it drops another.
    """
    lora, rollout = topology.policy.lora, topology.services.rollout
    if holds_none(topology):
        return 0
    trained = parameters.trained
    if lora is not None:
        live = live_adapters(rollout.in_flight, None if topology.serve is None else topology.serve.max_models)
        if rollout.engine == "vllm":
            trained = vllm_slots(live) * trained * vllm_rank(lora.rank) // lora.rank
        elif live > 1 and (rollout.device != "cpu" or topology.run.deterministic):
            trained *= live + 1
    return (parameters.base + trained) * DTYPE_BYTES[topology.policy.dtype]


def keeps_whole_gradients(elements: int, ranks: int, memory_bytes: int) -> bool:
    """Return whether each rank of backend torch keeps the whole float32 gradient until the last micro-batch.

    The ranks then add up their gradients once per batch instead of once per micro-batch. The whole gradient is not part
    of `training_parts`, because it is kept only where the memory of a rank, `memory_bytes`, allows it.
    """
    pieces = (_FLOAT + _FLOAT + _MOMENTS) / ranks
    return elements * (pieces + _FLOAT) <= SHARE_WITH_GRADIENTS * memory_bytes


def per_process(topology: Topology, elements: Mapping[str, Parameters]) -> dict[Key, int]:
    """Return the number of bytes that its model takes up in each process that computes with one.

    An embedded engine on a CPU computes with the version in its host's store and has no weights of its own, except in
    deterministic mode, in which it copies the version, and with an adapter, whose base it loads.
    """
    of_service: dict[str, float] = {"rollout": engine_bytes(topology, elements[POLICY])}
    for trained in topology.trained:
        parts = rank_bytes(trained, elements[trained.name], evaluate=topology.run.evaluate)
        of_service[trained.service] = sum(parts.values())
    for frozen in topology.frozen:
        parallel, whole = frozen.settings.parallel, elements[frozen.section].whole
        here = whole if frozen.server is None else 0
        of_service[frozen.service] = here * DTYPE_BYTES[frozen.dtype] / (parallel.tp * parallel.pp)
    return {
        (spec.service, spec.instance): math.ceil(of_service[spec.service])
        for spec in topology.services_plan()
        if spec.service in of_service
    }


HINT = Lora(rank=32)
"""The adapter that is recommended to runs that do not fit."""
MOST_GPUS = 1024
"""Maximum number of GPUs that `gpus_that_fit` considers."""
_LOGIT_BYTES = 16
"""Bytes per logit of a pass: the logits, their scaled copy, the log-probs and their gradient in float32 (measured)."""
_VLLM_SHARE = 0.92
"""Default of vLLM's `gpu_memory_utilization`."""


class MemoryPlace(NamedTuple):
    """The memory of a host, or of one of its GPUs."""

    host: str | None
    gpu: str  # as CUDA_VISIBLE_DEVICES names it; "" is the host's own memory


class Phase(StrEnum):
    """A time in a run at which processes hold the same things."""

    START = "start"
    STEPS = "steps"
    CHECKPOINTS = "checkpoints"


ALWAYS = frozenset(Phase)
_STARTED = frozenset({Phase.STEPS, Phase.CHECKPOINTS})


class Use(NamedTuple):
    """Memory that a process holds in some phases. Uses that take turns are never there at the same time, unless they
    belong to the same service."""

    place: MemoryPlace
    key: Key
    what: str
    nbytes: int
    phases: frozenset[Phase]
    turns: bool = False


class Peak(NamedTuple):
    """The phase in which the processes need the most memory in one place, and how much they need."""

    nbytes: int
    phase: Phase


def uses(
    topology: Topology, elements: Mapping[str, Parameters], gpus: Mapping[Key, str], vocabulary: int = 0
) -> list[Use]:
    """Return everything that the run's processes hold of the models. `vocabulary` is the policy's number of tokens."""
    hosts = {(spec.service, spec.instance): spec.host for spec in topology.services_plan()}
    trained = {model.service: model for model in topology.trained}
    found: list[Use] = []
    for key, nbytes in per_process(topology, elements).items():
        names = [name for name in gpus.get(key, "").split(",") if name]
        turns = key[0] in topology.colocated_services
        for place in [MemoryPlace(hosts[key], name) for name in names or [""]]:
            if key[0] in trained:
                model = trained[key[0]]
                gone = LAST_A_STEP[model.settings.backend]  # outside of steps
                for part, held in rank_bytes(model, elements[model.name], evaluate=topology.run.evaluate).items():
                    phases = frozenset({Phase.STEPS}) if part in gone else _STARTED if part == "optimizer" else ALWAYS
                    found.append(Use(place, key, str(part), held, phases, turns))
                if nbytes := gathered_bytes(model, elements[model.name]):
                    found.append(Use(place, key, "gathered layer", nbytes, frozenset({Phase.STEPS}), turns))
            elif nbytes:
                found.append(Use(place, key, "weights", math.ceil(nbytes / max(len(names), 1)), ALWAYS, turns))
        found += _copies(topology, elements, MemoryPlace(hosts[key], ""), key, on_gpu=bool(names), turns=turns)
        if nbytes := logit_bytes(topology, vocabulary, key[0]):
            for place in [MemoryPlace(hosts[key], name) for name in names or [""]]:
                found.append(Use(place, key, "logits", nbytes, frozenset({Phase.STEPS}), turns))
    return found


def logit_bytes(topology: Topology, vocabulary: int, service: str) -> int:
    """Return the bytes of all logits of a micro-batch, if `service` computes them at once (`policy.passes.head`)."""
    scorers: list[TrainedModel | FrozenModel] = [
        *(model for model in topology.trained if model.head == "language"),
        *(model for model in topology.frozen if model.head == "language"),
    ]
    scorer = next((model for model in scorers if model.service == service), None)
    if scorer is None or scorer.passes is None or scorer.passes.head == "blocks" or scorer.settings.backend != "torch":
        return 0
    return scorer.settings.max_tokens_per_micro_batch * vocabulary * _LOGIT_BYTES


def peak(some: Sequence[Use], phases: frozenset[Phase] = ALWAYS) -> Peak:
    """Return the peak of `some` uses, which are all in the same place, in `phases`. Colocated services take turns, so
    only the largest of them counts.
    """
    sums: dict[Phase, int] = {}
    for phase in Phase:
        apart, turns = 0, dict[str, int]()
        for use in some:
            if phase not in use.phases:
                continue
            if use.turns:
                turns[use.key[0]] = turns.get(use.key[0], 0) + use.nbytes
            else:
                apart += use.nbytes
        if phase in phases:
            sums[phase] = apart + max(turns.values(), default=0)
    return max((Peak(nbytes, phase) for phase, nbytes in sums.items()), key=lambda each: each.nbytes)


def by_place(found: Sequence[Use]) -> dict[MemoryPlace, list[Use]]:
    """Return the uses in each place: hosts first, then their GPUs."""
    places = sorted({use.place for use in found}, key=lambda at: (at.gpu != "", at.host or "", len(at.gpu), at.gpu))
    return {place: [use for use in found if use.place == place] for place in places}


def gpus_that_fit(
    model: TrainedModel, parameters: Parameters, limit_bytes: int, *, evaluate: bool = False
) -> int | None:
    """Return the smallest number of GPUs with which each rank's part of the training state of `model` fits in
    `limit_bytes`, or None if no number up to MOST_GPUS does.
    """
    step = model.settings.parallel.model_ranks * model.settings.parallel.ep
    for count in range(step, MOST_GPUS + 1, step):
        divided = replace(model, settings=model.settings.model_copy(update={"gpus": count}))
        held = rank_bytes(divided, parameters, evaluate=evaluate)
        if sum(held.values()) + gathered_bytes(divided, parameters) <= limit_bytes:
            return count
    return None


def vllm_share(topology: Topology) -> float | None:
    """Return the share of a GPU that vLLM takes for its weights and its cache, or None if no engine does so."""
    rollout = topology.services.rollout
    if rollout.engine != "vllm" or not rollout.gpus or "kv_cache_memory_bytes" in rollout.engine_args:
        return None
    return float(rollout.engine_args.get("gpu_memory_utilization", _VLLM_SHARE))


def _copies(
    topology: Topology, elements: Mapping[str, Parameters], host: MemoryPlace, key: Key, *, on_gpu: bool, turns: bool
) -> Iterator[Use]:
    """Yield the copies that a process has in the memory of its host, besides what it computes with."""
    rollout = topology.services.rollout
    whole = elements[POLICY].whole * DTYPE_BYTES[topology.policy.dtype]
    if key[0] == "rollout" and topology.samples and (on_gpu or rollout.engine == "vllm" or holds_none(topology)):
        yield Use(host, key, "loading", whole, frozenset({Phase.START}))
    frozen = next((model for model in topology.frozen if model.service == key[0]), None)
    if frozen is not None and on_gpu and frozen.settings.backend == "torch":
        nbytes = elements[frozen.section].whole * DTYPE_BYTES[frozen.dtype]
        yield Use(host, key, "loading", nbytes, frozenset({Phase.START}))
    model = next((model for model in topology.trained if model.service == key[0]), None)
    if model is None:
        return
    trainer, parameters, width = model.settings, elements[model.name], DTYPE_BYTES[model.dtype]
    if on_gpu and turns:
        gone = LAST_A_STEP[trainer.backend]
        parts = rank_bytes(model, parameters, evaluate=topology.run.evaluate)
        waiting = sum(nbytes for part, nbytes in parts.items() if part not in gone)
        yield Use(host, key, "waiting for its turn", waiting, _STARTED)
    if key[1]:
        return
    version = parameters.trained * width
    yield Use(host, key, "loading", parameters.whole * width, frozenset({Phase.START}))
    if (
        model.publishes is not None
        and model.publishes.sampled
        and (on_gpu or trainer.world_size > 1 or trainer.backend == "megatron")
    ):
        # The page-locked copy of a single rank's weights is kept; gathered weights are not.
        kept = on_gpu and trainer.world_size == 1
        yield Use(host, key, "publishing", version, _STARTED if kept else frozenset({Phase.STEPS}))
    if topology.run.evaluate:
        return
    if model.earlier:
        yield Use(host, key, "earlier versions", version * (model.earlier + 1), _STARTED)
    yield Use(host, key, "saving", parameters.trained * saved_bytes(model), frozenset({Phase.CHECKPOINTS}))
    if topology.serve is not None:  # one of the clients' models is on the device
        waiting = (topology.serve.max_models - 1) * parameters.trained * _FLOAT
        yield Use(host, key, "gradients of models that wait", waiting, frozenset({Phase.STEPS}))


def place_name(place: MemoryPlace, home: str | None) -> str:
    """Return the name of a place for human readers: `this machine`, `host b`, `GPU 0`, `GPU 0 of host b`."""
    if place.host == home:
        return f"GPU {place.gpu}" if place.gpu else _HERE
    return f"GPU {place.gpu} of host {place.host}" if place.gpu else f"host {place.host}"


def described(uses: Sequence[Use]) -> str:
    """Return what one process holds in one place, with the phases of what it does not hold all the time."""
    parts = []
    for use in uses:
        when = ", ".join(phase for phase in Phase if phase in use.phases)
        parts.append(f"{use.what} {format_size(use.nbytes)}" + (f" ({when})" if use.phases != ALWAYS else ""))
    return ", ".join(parts)


def memory_lines(
    topology: Topology, places: Mapping[MemoryPlace, Sequence[Use]], room: Mapping[MemoryPlace, int]
) -> list[str]:
    """Return the lines of the table. `places` holds the uses of each place, and `room` the sizes that are known."""
    stores = {spec.host: spec for spec in topology.services_plan() if spec.service == "batch-store"}
    rows: list[tuple[str, str, str, str, str]] = [("memory of", "model", "of", "at most", "held by")]
    for place, uses in places.items():
        most = peak(uses)
        size = format_size(room[place]) if place in room else "-"
        steady = all(peak(uses, frozenset({phase})).nbytes == most.nbytes for phase in Phase)
        when = "always" if steady else str(most.phase)
        first = (place_name(place, topology.home), format_size(most.nbytes), size, when)
        keys = dict.fromkeys(use.key for use in uses)
        texts = [f"{service_name(*key)}: {described([use for use in uses if use.key == key])}" for key in keys]
        if place.gpu and any(key[0] == "rollout" for key in keys) and (share := vllm_share(topology)) is not None:
            texts.append(f"vLLM takes {share:.0%} of the GPU for weights and cache (gpu_memory_utilization)")
        if not place.gpu and place.host in stores:
            limit = format_size(topology.services.batch_store.memory)
            texts.append(f"{stores[place.host].name}: up to {limit} of shards, not included")
        rows += [(*(first if not number else ("",) * 4), text) for number, text in enumerate(texts)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]


def too_large(
    topology: Topology,
    elements: Mapping[str, Parameters],
    place: MemoryPlace,
    uses: Sequence[Use],
    limit: int,
    with_adapter: Callable[[MemoryPlace], Sequence[Use]] = lambda _: (),
) -> Iterator[str]:
    """Yield an error, with what would fit, if the memory of `place` is smaller than what its processes hold.
    `with_adapter(place)` is what they would hold if the policy had the adapter `HINT`, or nothing if it can have none.

    Copies that exist only at the start are not counted, because the system can take back pages of files.
    """
    where, size = place_name(place, topology.home), format_size(limit)
    share = vllm_share(topology)
    if place.gpu and share is not None:
        usable = math.floor(share * limit)
        for use in uses:
            if use.key[0] == "rollout" and use.nbytes > usable:
                ranks = math.ceil(use.nbytes * topology.services.rollout.gpus / usable)
                yield (
                    "services.rollout.engine_args.gpu_memory_utilization: the engine's weights take "
                    f"{format_size(use.nbytes)} of {where}, of whose {size} vLLM uses {share:.0%}; "
                    f"services.rollout.gpus and parallel.tp of at least {ranks} would fit"
                )
    steps, saves = (peak(uses, frozenset({phase})).nbytes for phase in (Phase.STEPS, Phase.CHECKPOINTS))
    most = max(steps, saves)
    if most <= limit:
        return
    phase = Phase.STEPS if steps > limit else Phase.CHECKPOINTS
    during = [use for use in uses if phase in use.phases]
    keys = dict.fromkeys(use.key for use in during)
    services = {service for service, _ in keys}
    models = [f"{model.name}.model" for model in topology.trained if model.service in services] or [f"{POLICY}.model"]
    whose, saves_it = ("their", "they save") if len(models) > 1 else ("its", "it saves")
    parts = "; ".join(
        f"{service_name(*key)}: "
        + ", ".join(f"{use.what} {format_size(use.nbytes)}" for use in during if use.key == key)
        for key in keys
    )
    text = f"{whose} training takes {format_size(steps)} of the memory of {where}, which has {size} ({parts})"
    if steps <= limit:
        text = f"{whose} checkpoints take {format_size(saves)} of the memory of {where}, which has {size} ({parts})"
    elif saves > steps:
        text += f", and {format_size(saves)} while {saves_it} a checkpoint"
    remedy = _that_fits(topology, elements, place, uses, limit, most)
    adapted = with_adapter(place)
    if adapted and peak(adapted, _STARTED).nbytes <= limit:
        remedy += f"; policy.lora: {{rank: {HINT.rank}}} would fit"
    yield f"{' and '.join(models)}: {text}; {remedy}"


def _that_fits(
    topology: Topology,
    elements: Mapping[str, Parameters],
    place: MemoryPlace,
    uses: Sequence[Use],
    limit: int,
    most: int,
) -> str:
    """Return the smallest number of GPUs that would fit, or else the number of bytes that are missing."""
    missing = f"{format_size(most - limit)} more would fit"
    if not place.gpu:
        return f"{missing}; use a smaller model, or a machine with more memory"
    for model in topology.trained:
        others = [use for use in uses if use.key[0] != model.service]
        if len(others) < len(uses) and peak(others).nbytes <= limit:
            apart = sum(use.nbytes for use in others if not use.turns)
            count = gpus_that_fit(model, elements[model.name], limit - apart, evaluate=topology.run.evaluate)
            if count is not None:
                return f"{_key_of(model)}.gpus: {count} would fit"
    return f"{missing}; use a smaller model, or divide it (parallel.tp)"


def _key_of(model: TrainedModel) -> str:
    """Return the topology key of the service of a trained model."""
    return next(f"services.{key}" for key, service in DEVICE_SERVICE.items() if service == model.service)
