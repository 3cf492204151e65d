"""Finds settings that a topology's engine does not support. It neither queries nor imports an engine.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

from shared.topology.capacity import weight_bytes
from shared.topology.model_files import experts, read_config
from shared.topology.problem import Found
from shared.topology.schema import Topology
from shared.topology.services import Rollout, WeightsRoute

PLANNED_BYTES_PER_S: Mapping[str, float] = MappingProxyType({"gloo": 0.25e9, "nccl": 2e9, "ipc": 5e9})
"""Rates used to plan transfers: conservative values for each route, none of which was measured on a GPU."""
SERVED_TEMPERATURE = 2.0
"""Maximum temperature that vLLM and servers with the OpenAI interface accept."""
_SERVER_ARGUMENTS = ("base_url", "model", "api_key_env", "weights_directory")
_NOT_VLLM = ("gpt_neox",)


def check(topology: Topology) -> Found:
    """Yield the settings that the chosen engine does not support or would ignore."""
    rollout = topology.services.rollout
    if rollout.engine_args and rollout.engine == "transformers":
        names = ", ".join(rollout.engine_args)
        yield ("services", "rollout", "engine_args"), f"{names}: engine transformers takes no arguments; leave it out"
    if rollout.parallel.tp > 1 and rollout.engine != "vllm":
        message = f"{rollout.parallel.tp} is for the vllm engine; {rollout.engine} has no tensor parallelism; use 1"
        yield ("services", "rollout", "parallel", "tp"), message
    yield from _gpus(rollout)
    if rollout.engine == "vllm":
        yield from _family(topology.policy.model)
    hottest = {("sampling", "temperature"): topology.sampling.temperature} | {
        ("data", "eval", name, "temperature"): each.temperature for name, each in topology.data.eval.items()
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
    rollout, policy = topology.services.rollout, topology.policy
    try:
        nbytes = weight_bytes(policy.model, policy.dtype)
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
    if rollout.transfer_s is None:
        yield ("services", "rollout", "transfer_s"), f"null: {route} needs a limit; leave it out or set seconds"
    elif rollout.transfer_s >= topology.lease.lease_s:
        message = f"{rollout.transfer_s:g} is not less than lease.lease_s ({topology.lease.lease_s:g}): an engine that"
        yield ("services", "rollout", "transfer_s"), f"{message} waits would lose its lease; use less, or raise lease_s"
    else:
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


def _family(model: str) -> Found:
    """Find models whose new weights vLLM does not accept under the trainer's names."""
    config, path = read_config(model), ("services", "rollout", "engine")
    count, kind = experts(config), config.get("model_type")
    remedy = "use engine transformers"
    if count:
        message = f"vllm: the model is a mixture of {count} experts, whose weights vLLM cannot receive from the trainer"
        yield path, f"{message}; {remedy}"
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
