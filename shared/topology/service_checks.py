"""Finds the faults of the sections `services`, `placement` and `transport`: degrees that do not divide the model, hosts
and GPUs that do not exist, services that cannot take turns, and settings that an engine does not support.

It neither queries nor imports an engine or a model library. A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from shared.topology.capacity import weight_bytes
from shared.topology.document import Found
from shared.topology.model_files import experts, read_config
from shared.topology.models import CRITIC, DEVICE_SERVICE, REWARD_MODEL, TEACHER, FrozenModel, TrainedModel
from shared.topology.schema import Topology
from shared.topology.services import Placed, Rollout, ScorerSettings, WeightsRoute

PLANNED_BYTES_PER_S: Mapping[str, float] = MappingProxyType({"gloo": 0.25e9, "nccl": 2e9, "ipc": 5e9})
"""Rates used to plan transfers: conservative values for each route, none of which was measured on a GPU."""
UNSUPPORTED = MappingProxyType({"pp": "pipeline", "cp": "context"})
"""Kinds of parallelism that no engine of this version has, by key of services.rollout.parallel."""
SERVED_TEMPERATURE = 2.0
"""Maximum temperature that vLLM and servers with the OpenAI interface accept."""
EXPERT_UNIT = 32
"""vLLM's kernel for experts on CPUs pads sizes to a multiple of this number, and a reload does not fit into padding."""
_SERVER_ARGUMENTS = ("base_url", "model", "api_key_env", "weights_directory")
_NOT_VLLM = ("gpt_neox",)
_COLOCATE = ("placement", "colocate")
MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")


def check(topology: Topology) -> Found:
    """Yield every contradiction between the processes of the run, their hosts and what they can do."""
    yield from _services(topology)
    yield from _split(topology)
    yield from _placement(topology)
    yield from _colocated(topology)
    yield from _engine(topology)
    yield from _partial(topology)
    yield from _transport(topology)


def _services(topology: Topology) -> Found:
    services = topology.services
    counts = [(key, "gpus", service.gpus, service.parallel.model_ranks) for key, service in services.placed.items()]
    counts += [(key, "workers", own.workers or 0, own.parallel.model_ranks) for key, own in services.trainers.items()]
    for key, name, count, ranks in counts:
        if count % ranks:
            enough = math.ceil(count / ranks) * ranks
            yield ("services", key, name), f"{count} is not a multiple of tp*pp*cp = {ranks}; use {enough}"
    for key, trainer in services.trainers.items():
        if trainer.workers is not None and trainer.gpus:
            own = key == "policy-trainer" or services.policy_trainer.gpus > 0
            remedy = "remove it" if own else "set it to null"  # services.policy-trainer may give it
            message = f"{trainer.workers} has no effect with {trainer.gpus} gpus: one rank runs on each; {remedy}"
            yield ("services", key, "workers"), message
        parallel, copies = trainer.parallel, trainer.world_size // trainer.parallel.model_ranks
        if copies % parallel.ep:
            message = f"{parallel.ep} does not divide the {copies} copies of the model that share experts"
            remedy = f"use {parallel.ep * parallel.model_ranks} ranks or a multiple of that (workers, or gpus)"
            yield ("services", key, "parallel", "ep"), f"{message}; {remedy}"
    store = services.batch_store
    if store.spill is None and store.spill_limit is not None:
        message = f"{store.spill_limit} bytes have no effect without spill; remove it, or name a folder as spill"
        yield ("services", "batch-store", "spill_limit"), message
    if store.spill is not None and store.spill_limit is None:
        yield ("services", "batch-store", "spill"), f"{store.spill} has no limit; set spill_limit, such as 500GiB"
    checkpoint = topology.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        message = f"{checkpoint.keep_every} is not a multiple of every ({checkpoint.every}), so some would not exist"
        yield ("checkpoint", "keep_every"), f"{message}; use a multiple"


def _split(topology: Topology) -> Found:
    """Yield a problem for each degree that the backend does not support, that does not divide the size it splits, or
    that crosses hosts, and for recomputation that the backend does not support."""
    trainers = topology.services.trainers
    for name, trainer in trainers.items():
        yield from _ranks_on_hosts(name, trainer, trainer.world_size, len(trainer.host or ()))
        if trainer.recompute == "selective" and trainer.backend == "megatron":
            message = "selective is for backend torch; use layers, or set backend to torch"
            yield ("services", name, "recompute"), message
    for name, frozen in topology.services.frozen.items():
        copies, ranks = max(frozen.dp, 1), frozen.parallel.model_ranks
        yield from _ranks_on_hosts(name, frozen, ranks, min(len(frozen.host or ()) // copies, ranks))
    every: list[TrainedModel | FrozenModel] = [*topology.trained, *topology.frozen]
    models = {model.service: model for model in every}
    for name, service in topology.services.scorers.items():
        model = models.get(DEVICE_SERVICE[name])
        if service.backend == "torch":
            yield from _torch_degrees(name, service, {"tp", "pp", "ep"} if name in trainers else {"tp", "pp", "cp"})
        elif service.backend == "megatron" and model is not None:
            yield from _megatron_degrees(name, service, model)


def _ranks_on_hosts(name: str, service: ScorerSettings, ranks: int, hosts: int) -> Found:
    """Check `ranks` that are divided among `hosts`. Tensor, context and expert parallel ranks exchange data in every
    layer."""
    if hosts < 2:
        return
    degrees = _degrees_of(service)
    close = degrees["tp"] * degrees["cp"] * degrees["ep"]
    per_host = ranks // hosts
    if ranks % hosts or per_host % close:
        rule = f"each host must have the same number of ranks, a multiple of tp*cp*ep = {close}"
        remedy = f"use {hosts * close * max(per_host // close, 1)} ranks, or fewer hosts"
        yield ("services", name, "host"), f"{hosts} hosts for {ranks} rank{'s' * (ranks > 1)}: {rule}; {remedy}"


def _degrees_of(service: ScorerSettings) -> dict[str, int]:
    return {name: getattr(service.parallel, name, 1) for name in ("tp", "pp", "cp", "ep")}  # only trainers have ep


def _torch_degrees(name: str, service: ScorerSettings, has_no: set[str]) -> Found:
    for degree, count in _degrees_of(service).items():
        if degree in has_no and count > 1:
            what = {"cp": "sequences here", "ep": "experts"}.get(degree, "layers")
            remedy = "set backend to megatron, or use 1"
            message = f"{count} splits {what}, which backend torch does not support; {remedy}"
            yield ("services", name, "parallel", degree), message


def _megatron_degrees(name: str, service: ScorerSettings, model: TrainedModel | FrozenModel) -> Found:
    place, degrees = ("services", name), _degrees_of(service)
    if model.dtype not in ("float32", "bfloat16"):
        yield (model.section, "dtype"), f"{model.dtype}: backend megatron supports float32 and bfloat16"
    config = read_config(str(model.folder))
    kind = config.get("model_type")
    if kind is not None and kind not in MEGATRON_FAMILIES:
        message = f"megatron supports {', '.join(MEGATRON_FAMILIES)}, but the model is a {kind}; use torch"
        yield (*place, "backend"), message
        return
    mixture = experts(config)
    if degrees["ep"] > 1 and mixture % degrees["ep"]:
        message = f"{degrees['ep']} does not divide the model's {mixture} experts; use a divisor"
        yield (*place, "parallel", "ep"), message
    elif degrees["ep"] > 1 and not mixture:
        yield (*place, "parallel", "ep"), f"{degrees['ep']}: the model has no experts; use 1"
    for degree in ("tp", "cp") if mixture else ():
        if degrees[degree] > 1:
            message = f"{degrees[degree]}: not available for a mixture of experts; use ep and pp"
            yield (*place, "parallel", degree), message
    heads = config.get("num_attention_heads")
    for degree, what, count in (
        ("tp", "attention heads", heads),
        ("tp", "key-value heads", config.get("num_key_value_heads") or heads),
        ("tp", "columns of the feed-forward layer", config.get("intermediate_size")),
        ("pp", "layers", config.get("num_hidden_layers")),
    ):
        if isinstance(count, int) and count % degrees[degree]:
            message = f"{degrees[degree]} does not divide the model's {count} {what}; use a divisor"
            yield (*place, "parallel", degree), message


def _placement(topology: Topology) -> Found:
    hosts, services, placement = topology.placement.hosts, topology.services, topology.placement
    for key, service in services.placed.items():
        for name in service.host or ():
            if name not in hosts:
                near = difflib.get_close_matches(name, list(hosts), n=1) or sorted(hosts)
                remedy = f"use {' or '.join(map(repr, near))}" if near else "add it there"
                yield ("services", key, "host"), f"no host {name!r} in placement.hosts; {remedy}"
        if service.host is not None and len(set(service.host)) < max(len(service.host), 1):
            yield ("services", key, "host"), f"{list(service.host)}: name a host, or several different ones"
    needed = _gpus_needed(topology)
    for name, host in hosts.items():
        if needed[name] > host.gpus:
            message = f"{host.gpus} GPUs, but the services on host {name} use {needed[name]}; move one or colocate"
            yield ("placement", "hosts", name, "gpus"), message
    others = [name for name in topology.store_hosts()[1:] if name in hosts]
    if placement.engine == "ray" and not others:
        yield (
            ("placement", "engine"),
            "ray has no effect without other hosts; name them in placement.hosts or use local",
        )
    named = {host for service in services.placed.values() for host in service.host or ()}
    reached = topology.transport.listen is not None or placement.engine == "ray"
    if others and not reached and named <= hosts.keys():
        message = f"none, but {', '.join(map(str, others))} must reach this machine; give its address"
        yield ("transport", "listen"), message
    away = sorted({str(spec.host) for spec in topology.away_plan() if spec.service == "rollout"})
    if away and services.rollout.weights == "ipc":
        message = f"ipc reaches rollouts on the trainer's GPUs only, not on {', '.join(away)}"
        yield ("services", "rollout", "weights"), f"{message}; use shards or nccl"


def _gpus_needed(topology: Topology) -> Counter[str | None]:
    """Return the number of GPUs that the services on each host use. Colocated services share them."""
    separate: Counter[str | None] = Counter()
    together: Counter[str | None] = Counter()
    for key, service in topology.services.placed.items():
        gpus = service.gpus if key == "rollout" else min(service.gpus, 1)
        hosts = [spec.host for spec in topology.services_plan() if spec.service == DEVICE_SERVICE[key]]
        mine = Counter({host: gpus * hosts.count(host) for host in hosts})
        if key in topology.placement.colocate:
            together |= mine
        else:
            separate += mine
    return separate + together


def _colocated(topology: Topology) -> Found:
    """Yield names that cannot take turns, hosts or numbers of GPUs that differ, and settings under which a rollout
    cannot take turns."""
    names = topology.placement.colocate
    if not names:
        return
    for index, name in enumerate(names):
        if name not in DEVICE_SERVICE:
            message = f"{name!r} is not a service with devices; use {', '.join(DEVICE_SERVICE)}"
            yield (*_COLOCATE, index), message
        elif name in names[:index]:
            yield (*_COLOCATE, index), f"{name} is named twice; remove one"
        elif name == "reference" and not topology.needs_reference:
            yield (
                (*_COLOCATE, index),
                "no reference is started without algorithm.kl.coef above 0 or loss dpo or ipo; leave it out",
            )
        elif name == "reference" and topology.reference_by_trainer:
            message = "with policy.lora, the trainer is the reference, and none is started"
            yield (*_COLOCATE, index), f"{message}; leave it out, or add services.reference: {{}}"
        elif name == CRITIC and topology.critic is None:
            yield (*_COLOCATE, index), "no critic is started without the section critic; leave it out"
        elif name == TEACHER and topology.teacher is None:
            yield (*_COLOCATE, index), "no teacher is started without the section teacher; leave it out"
        elif name == REWARD_MODEL and topology.reward_model is None:
            yield (*_COLOCATE, index), "no reward model is started without the section reward_model; leave it out"
    if len(names) == 1:
        yield _COLOCATE, f"{names[0]} alone shares nothing; name two services or leave it out"
    yield from _same_place(topology)
    if "rollout" in names:
        yield from _rollout_takes_turns(topology)


def _same_place(topology: Topology) -> Found:
    services = topology.services.placed
    placed = [(name, services[name]) for name in topology.placement.colocate if name in services]
    for name, service in placed[1:]:
        first, other = placed[0]
        here, there = _named_hosts(topology, service), _named_hosts(topology, other)
        if here != there or len(here) > 1:
            message = f"{' and '.join(here)}, but {first}, which is colocated, is on {' and '.join(there)}"
            yield ("services", name, "host"), f"{message}; use one host"
        mine, theirs = _device_count(topology, name, service), _device_count(topology, first, other)
        if mine != theirs:
            message = f"{name} uses {mine} GPUs, but {first}, which is colocated, uses {theirs}; use the same number"
            yield ("services", name, "gpus"), message


def _named_hosts(topology: Topology, service: Placed) -> list[str]:
    return sorted(set(service.host or (topology.home or "this machine",)))


def _device_count(topology: Topology, name: str, service: Placed) -> int:
    return service.gpus * (topology.services.rollout.instances if name == "rollout" else 1)


def _rollout_takes_turns(topology: Topology) -> Found:
    rollout = topology.services.rollout
    if topology.staleness:
        message = f"{topology.staleness}: a colocated rollout cannot run ahead of the trainer; set 0"
        yield ("staleness",), message
    if rollout.in_flight != "wait":
        message = f"{rollout.in_flight}: a colocated engine sleeps while the trainer computes new weights; use wait"
        yield ("services", "rollout", "in_flight"), message
    if rollout.engine == "openai":
        message = "the engine's own server would keep its memory; colocate vllm or transformers"
        yield ("services", "rollout", "engine"), message


def _engine(topology: Topology) -> Found:
    """Yield the settings that the chosen engine does not support or would ignore."""
    rollout = topology.services.rollout
    if rollout.engine_args and rollout.engine == "transformers":
        names = ", ".join(rollout.engine_args)
        yield ("services", "rollout", "engine_args"), f"{names}: engine transformers takes no arguments; leave it out"
    if rollout.parallel.tp > 1 and rollout.engine != "vllm":
        message = f"{rollout.parallel.tp} is for the vllm engine; {rollout.engine} has no tensor parallelism; use 1"
        yield ("services", "rollout", "parallel", "tp"), message
    for key, kind in UNSUPPORTED.items():
        if getattr(rollout.parallel, key) > 1:
            message = f"not available in this version: {kind} parallelism {getattr(rollout.parallel, key)}; use 1"
            yield ("services", "rollout", "parallel", key), message
    yield from _gpus(rollout)
    if rollout.engine == "vllm":
        yield from _family(topology)
    hottest = {("sampling", "temperature"): topology.sampling.temperature} | {
        ("data", "eval", name, "temperature"): evaluation.temperature for name, evaluation in topology.data.eval.items()
    }
    for path, temperature in hottest.items():
        if rollout.engine != "transformers" and temperature > SERVED_TEMPERATURE:
            yield path, f"{temperature} is more than {rollout.engine} accepts; use at most {SERVED_TEMPERATURE}"
    if rollout.engine == "openai":
        yield from _server(topology)
    yield from _route(topology)
    if rollout.in_flight != "wait" and rollout.engine == "openai":
        message = f"{rollout.in_flight} is for engines in the service; openai updates between blocks; use wait"
        yield ("services", "rollout", "in_flight"), message
    if rollout.in_flight == "recompute" and rollout.engine == "transformers":
        yield ("services", "rollout", "in_flight"), "recompute is for vllm; transformers supports keep; use keep"
    if rollout.in_flight != "wait" and topology.workflow is not None:
        message = f"{rollout.in_flight} is for single answers; a workflow's calls are short blocks; use wait"
        yield ("services", "rollout", "in_flight"), message


def transfer_floor_s(route: WeightsRoute, nbytes: int, engines: int) -> float:
    """Return the minimum number of seconds needed, at the planned rate, to send a version of `nbytes` bytes to
    `engines` engines over the trainer's network link."""
    return nbytes * engines / PLANNED_BYTES_PER_S[route]


def _too_short(topology: Topology, transfer_s: float) -> Found:
    """Check that a version can be sent within the limit. A model that cannot be measured is reported elsewhere."""
    rollout = topology.services.rollout
    try:
        nbytes = weight_bytes(topology.policy_model)
    except (OSError, ValueError):
        return
    needed = transfer_floor_s(rollout.weights, nbytes, rollout.instances)
    if needed > transfer_s:
        how = f"{rollout.instances} engines by {rollout.weights} at {PLANNED_BYTES_PER_S[rollout.weights] / 1e9:g} GB/s"
        more = f"set at least {math.ceil(needed)}, and lease.lease_s to at least {math.ceil(1.5 * needed)}"
        message = f"{transfer_s:g} is too short for {nbytes / 1e9:.1f} GB to {how}; {more}"
        yield ("services", "rollout", "transfer_s"), message


def _route(topology: Topology) -> Found:
    """Check that the trainer and the engine both support the chosen route for the weights."""
    rollout, trainer = topology.services.rollout, topology.services.policy_trainer
    route, path = rollout.weights, ("services", "rollout", "weights")
    if rollout.transfer_s is not None and route == "shards":
        message = f"{rollout.transfer_s:g} has no effect with weights: shards, which are not sent; remove it"
        yield ("services", "rollout", "transfer_s"), message
    if route == "shards":
        return
    if rollout.transfer_s is not None and rollout.transfer_s >= topology.lease.lease_s:
        message = f"{rollout.transfer_s:g} is not less than lease.lease_s ({topology.lease.lease_s:g}): an engine that"
        yield ("services", "rollout", "transfer_s"), f"{message} waits would lose its lease; use less, or raise lease_s"
    elif rollout.transfer_s is not None:
        yield from _too_short(topology, rollout.transfer_s)
    if rollout.engine == "openai":
        yield path, f"{route}: engine openai receives weights as a file; use shards"
        return
    if route == "gloo":
        if rollout.gpus:
            yield path, f"gloo is for engines on a CPU, but this one has {rollout.gpus} GPUs; use nccl or shards"
        return
    if rollout.engine != "vllm":
        yield path, f"{route} is vLLM's weight transfer, which engine {rollout.engine} lacks; use shards"
    if not rollout.gpus or not trainer.gpus:
        yield path, f"{route} needs GPUs for policy-trainer ({trainer.gpus}) and rollout ({rollout.gpus}); use shards"
    together = {"policy-trainer", "rollout"} <= set(topology.placement.colocate)
    if route == "nccl" and together:
        yield path, "nccl allows one process per GPU, but placement.colocate puts both on one; use ipc or shards"
    if route == "ipc" and not together:
        yield (
            path,
            "ipc needs policy-trainer and rollout on the same GPUs; put both into placement.colocate, or use nccl",
        )
    if route == "ipc" and max(trainer.gpus, rollout.gpus * rollout.instances) > 1:
        message = (
            f"ipc reaches one engine on the one GPU of the trainer, not {rollout.instances} on {trainer.gpus} GPUs"
        )
        yield path, f"{message}; use shards"


def _family(topology: Topology) -> Found:
    """Find models whose new weights vLLM does not accept."""
    rollout, config = topology.services.rollout, read_config(topology.policy.model)
    path, count, kind = ("services", "rollout", "engine"), experts(config), config.get("model_type")
    remedy = "use engine transformers"
    if count and topology.policy.lora is not None:
        yield path, f"vllm: the model is a mixture of {count} experts, for which vLLM takes no adapter here; {remedy}"
    sizes = {key: config.get(key) for key in ("hidden_size", "moe_intermediate_size", "intermediate_size")}
    inner = sizes["moe_intermediate_size"] or sizes["intermediate_size"]
    for what, size, ranks in (("inputs", sizes["hidden_size"], 1), ("rows", inner, rollout.parallel.tp)):
        if count and not rollout.gpus and isinstance(size, int) and size % (ranks * EXPERT_UNIT):
            shared = f" on {ranks} ranks (parallel.tp)" if ranks > 1 else ""
            message = f"vllm: an expert has {size} {what}{shared}, but vLLM's kernel for CPUs needs a multiple of"
            yield path, f"{message} {EXPERT_UNIT} on each; {remedy}"
    if kind in _NOT_VLLM:
        message = f"vllm: the model is a {kind}, whose weights a vLLM process cannot read back to verify them"
        yield path, f"{message}; {remedy}"


def _gpus(rollout: Rollout) -> Found:
    """Find GPUs that an instance would leave idle."""
    path, gpus = ("services", "rollout", "gpus"), rollout.gpus
    if not gpus:
        return
    if rollout.engine == "openai":
        yield path, f"{gpus}: the server of engine openai has its own GPUs; leave it out"
    elif gpus != rollout.parallel.model_ranks:
        uses = "1" if rollout.engine == "transformers" else f"{rollout.parallel.model_ranks} (parallel.tp)"
        yield path, f"{gpus} for each instance, but an engine uses {uses}; use that many, and more instances"


def _server(topology: Topology) -> Found:
    """Check the settings of a server that was started outside the run."""
    rollout, path = topology.services.rollout, ("services", "rollout", "engine_args")
    if rollout.instances > 1:
        message = f"{rollout.instances} would overwrite one another's weights on their one server; use 1"
        yield ("services", "rollout", "instances"), message
    if "base_url" not in rollout.engine_args:
        yield path, "engine openai needs to know its server; set base_url, such as http://127.0.0.1:8000"
    for name, value in rollout.engine_args.items():
        if name not in _SERVER_ARGUMENTS:
            near = difflib.get_close_matches(name, _SERVER_ARGUMENTS, 1) or _SERVER_ARGUMENTS
            yield (*path, name), f"engine openai takes no such argument; use {' or '.join(near)}"
        elif not isinstance(value, str):
            yield (*path, name), f"{value!r} is not text, as engine openai's arguments must be"
        elif name == "base_url" and not value.startswith(("http://", "https://")):
            yield (*path, name), f"{value!r} is not an http address; use one such as http://127.0.0.1:8000"


def _partial(topology: Topology) -> Found:
    rollout = topology.services.rollout
    if rollout.partial_s is None:
        return
    path, value = ("services", "rollout", "partial_s"), f"{rollout.partial_s:g}"
    if rollout.engine == "openai":
        yield path, f"{value} has no effect with engine openai, which starts samples over; remove it"
    if rollout.engine == "vllm" and topology.sampling.stop:
        yield path, f"{value}: vllm would miss a stop text (sampling.stop) across the cut; remove one of them"
    if topology.workflow is not None:
        yield path, f"{value} has no effect with a workflow, whose samples start over; remove it"
    if topology.algorithm.loss.from_rows:
        yield path, f"{value} has no effect with loss {topology.algorithm.loss.name}, which does not sample; remove it"
    if topology.run.deterministic:
        yield path, f"{value}: the moment of a kill would affect the results; run.deterministic needs it left out"


def _transport(topology: Topology) -> Found:
    """Check the endpoints for other hosts. With Ray, the launcher fills in the address of its node."""
    transport = topology.transport
    if topology.policy.distribute and not topology.placement.hosts:
        yield ("policy", "distribute"), "true has no effect without other hosts (placement.hosts); leave it out"
    ports = ("scheduler_port", "supervisor_port", "monitor_port")
    if transport.listen is None and topology.placement.engine == "local":
        if not transport.encrypt_bulk:
            message = "false: without transport.listen, nothing is sent to other hosts; leave it out"
            yield ("transport", "encrypt_bulk"), message
        for name in ports:
            if getattr(transport, name) != type(transport).model_fields[name].default:
                yield ("transport", name), "without transport.listen, no process listens on tcp; leave it out"
        return
    if transport.listen == "0.0.0.0":  # noqa: S104  # refused, not bound
        yield ("transport", "listen"), "0.0.0.0: other hosts are told this address; give the one that they reach"
    taken: dict[int, str] = {}
    for name in ports:
        port = getattr(transport, name)
        if port in taken:
            yield ("transport", name), f"{port} is transport.{taken[port]} too; choose another"
        taken[port] = name
