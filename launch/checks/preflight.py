"""Checks rows, functions, tokenizer, memory and ports before anything starts. It changes nothing in the run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from launch.checks import adapter, critic, distill, experts, functions, model_proof, rewards, schedule
from launch.checks import sources as source_checks
from launch.checks.addresses import check_address, check_doors, check_server
from launch.checks.findings import Findings
from launch.processes.plan import gpus_described, gpus_wanted, own_gpus, visible_gpus
from services.tracker.exporter import REMEDY, missing
from shared.data import DataError, open_source
from shared.data.source import RowDigests, read_rows
from shared.os_limits import host_bytes
from shared.rundir import SHM_ROOT
from shared.security.connections import MOST_CONNECTIONS, most_connections
from shared.topology import (
    Topology,
    hub,
    memory_plan,
    model_files,
    snapshot_bytes,
    tied_weights,
)
from shared.topology.capacity import parameter_counts, rows_problem
from shared.topology.document import dotted
from shared.topology.fields import format_size
from shared.topology.memory_plan import MemoryPlace
from shared.topology.model_files import vocabulary
from shared.topology.models import POLICY, REWARD_MODEL_SECTION
from shared.topology.monitor import split_address, token_problems
from shared.topology.passes import Passes, Verdict

NO_ROWS: Mapping[str, RowDigests] = MappingProxyType({})
SHOWN_ROWS = 3
MIB = 1 << 20


def check(topology: Topology, file: str, begun: Mapping[str, RowDigests] = NO_ROWS, *, calls: bool = True) -> Findings:
    """Check everything that `shared.topology` cannot know from the file alone.

    `file` is the topology's name in the findings. `begun` are the rows with which a resumed run began. Unless `calls`,
    no user's function is called.
    """
    findings = Findings(file)
    left_out = RUN_CHECKS if topology.serve is not None else ()
    for key, source in sources(topology).items():
        _check_rows(topology, source, key, begun.get(key), findings)
    for one_check in CHECKS:
        if one_check not in left_out and (calls or one_check is not rewards.check_calls):
            one_check(topology, findings)
    findings.opened.clear()
    return findings


def prove(topology: Topology, findings: Findings) -> Topology:
    """Return `topology` with the passes that are proved for its models, and check the memory that they need.

    A model that is not on this machine yet is not checked.
    """
    passes: dict[str, Passes] = {}
    proofs: dict[tuple[Path, str], Verdict] = {}
    for model in topology.own_models:
        proved = (model.folder, model.settings.device)
        try:
            proof = proofs[proved] if proved in proofs else model_proof.prove(topology, model)
        except (OSError, ValueError):
            return topology
        if problems := [*model_proof.problems(proof, model), *experts.problems(topology, proof, model)]:
            findings.error(*problems)
            return topology
        if proved not in proofs:
            findings.notes.append(f"passes         {model_proof.described(proof)}")
            findings.notes.extend(f"               {reason}" for reason in proof.reasons)
            with contextlib.suppress(OSError, ValueError):  # Another check reports it.
                findings.notes.extend(adapter.notes(topology, proof, model))
            findings.notes.extend(experts.notes(topology, proof, model))
        proofs[proved] = proof
        passes[model.section] = model.passes or proof.passes
    topology = topology.with_passes(passes)
    _check_model_memory(topology, findings)
    return topology


def check_host(topology: Topology) -> list[str]:
    """Return one line for each requirement of the topology's computing processes that this host does not meet.

    A model that will be fetched from home is not checked.
    """
    findings = Findings()
    for one_check in HOST_CHECKS if topology.policy.distribute else (*HOST_CHECKS, *MODEL_CHECKS):
        one_check(topology, findings)
    return findings.errors


def with_room(topology: Topology) -> Topology:
    """Return `topology` without snapshots of the trainer if shared memory has no room for them."""
    if not _refused_snapshots(topology):
        return topology
    checkpoint = topology.checkpoint.model_copy(update={"memory_every": None})
    return topology.model_copy(update={"checkpoint": checkpoint})


def shm_root(topology: Topology) -> Path:
    """Return the folder that holds the shards of the run."""
    directory = topology.services.batch_store.directory
    return Path(directory) if directory else SHM_ROOT


def sources(topology: Topology) -> dict[str, str]:
    """Return every data source, by the key that names it. A hub data set that is not in the cache is left out, and a
    server has none."""
    return {
        key: source
        for key, source in (topology.data.sources if topology.serve is None else {}).items()
        if hub.source_name(source) is None or hub.source_files(source)
    }


def _check_rows(topology: Topology, source: str, key: str, begun: RowDigests | None, findings: Findings) -> None:
    where = findings.in_file(key)
    evaluated = topology.data.eval.get(key.removeprefix("data.eval.").removesuffix(".source"))
    most = evaluated.rows if evaluated is not None else None
    try:
        rows = open_source(source, where=where)
        bad, findings.rows[key], longest = read_rows(rows, most, begun)
    except DataError as error:
        findings.errors.append(str(error))
        return
    findings.opened[key] = rows
    if begun is not None and most is None and len(rows) > begun.rows:
        findings.added[key] = len(rows) - begun.rows
    if evaluated is None and longest is not None and topology.data.train.max_prompt_tokens is None:
        nbytes = longest.nbytes + topology.data.train_sources[key].system_bytes
        with contextlib.suppress(OSError, ValueError):  # Another check reports it, or the model is not here yet.
            if problem := rows_problem(topology, nbytes, rows.place(longest.row)):
                findings.error(problem)
    if not bad:
        return
    lines = findings.errors if len(bad) == len(rows) else findings.warnings
    fate = ", so no row is left" if lines is findings.errors else " and are left out"
    lines.append(f"{where}: {len(bad)} of {len(rows)} rows cannot be used{fate}; the first of them:")
    lines.extend(f"  {row.message}" for row in bad[:SHOWN_ROWS])


def _check_tokenizer(topology: Topology, findings: Findings) -> None:
    """Check the tokenizer files in the folders of the models, with which a rollout tokenizes prompts and answers."""
    _check_tokenizer_of(topology.policy.model, f"{POLICY}.model", _messages(topology), findings)
    if topology.reward_model is not None:
        needs = _messages(topology) if topology.workflow is None else "workflow.function, whose samples are chats,"
        _check_tokenizer_of(topology.reward_model.model, f"{REWARD_MODEL_SECTION}.model", needs, findings)


def _check_tokenizer_of(model: str, key: str, needs: str, findings: Findings) -> None:
    """Check the tokenizer of the model that `key` names. `needs` is the part of the topology that needs a template."""
    if hub.model_name(model) is not None and not Path(model).is_dir():
        return  # The model is not in the cache (yet).
    where = f"{key}: {model}"
    if not model_files.has_tokenizer(model):
        names = ", ".join(model_files.TOKENIZERS)
        findings.error(f"{where} has no tokenizer (none of {names}); write one with save_pretrained")
        return
    largest, size = model_files.largest_token(model), vocabulary(model)
    if largest is not None and size and largest >= size:
        findings.error(
            f"{where}: its tokenizer has token {largest}, but its config.json has a vocabulary of {size}; enlarge "
            "the model's embedding (resize_token_embeddings), or use the tokenizer that the model was trained with"
        )
    if needs and not model_files.has_chat_template(model):
        findings.error(
            f"{where} has no chat template (chat_template.jinja), which {needs} needs; add one, or write text"
        )


def _check_ends(topology: Topology, findings: Findings) -> None:
    """Say at which tokens sampling ends, and check that it ends at the token that ends the answers trained on."""
    model = topology.policy.model
    if not Path(model).is_dir():
        return  # The model is not here yet.
    try:
        ends = model_files.end_tokens(model)
    except ValueError as error:
        findings.error(f"policy.model: {error}")
        return
    findings.notes.append(f"sampling       ends at the tokens {', '.join(map(str, ends)) or '(none)'}")
    if not topology.algorithm.loss.from_rows or not model_files.has_tokenizer(model):
        return
    answers = model_proof.answer_ends(Path(model))
    if isinstance(answers, str):
        findings.error(f"policy.model: {answers}")
        return
    trained = {key: source for key, source in sources(topology).items() if key in topology.data.train_sources}
    for prompt in (list, str):
        if not (where := _first_row(trained, prompt)):
            continue
        try:
            number = answers.end(messages=prompt is list)
        except ValueError as error:
            findings.error(f"policy.model: {model}: {error} ({where})")
        else:
            findings.notes.append(f"               and so do the answers that are trained on: token {number} ({where})")


def _check_functions(topology: Topology, findings: Findings) -> None:
    findings.error(*functions.problems(topology))


def _check_model_files(topology: Topology, findings: Findings) -> None:
    """Check that each model's folder holds one set of weights, and name the files that are ignored."""
    for model, names in topology.model_folders().items():
        where = f"{names[0]}.model: {model}"
        errors, ignored = model_files.oddities(model)
        findings.error(*(f"{where}: {error}" for error in errors))
        if ignored:
            findings.warn(f"{where}: ignored: {', '.join(ignored)}")


def _check_engine(topology: Topology, findings: Findings) -> None:
    """Check that the rollout's engine is installed."""
    rollout = topology.services.rollout
    if rollout.engine == "vllm" and not _is_installed("vllm"):
        target = "setup-vllm" if rollout.gpus else "setup-vllm-cpu"
        findings.error(f"services.rollout.engine: vllm is not installed; run `make {target}`")


def _check_snapshots(topology: Topology, findings: Findings) -> None:
    refused = _refused_snapshots(topology)
    if refused and topology.serve is not None:
        remedy = "lower serve.max_models" + ("" if topology.serve.full_training else " or serve.max_rank")
        findings.error(f"{refused}; clients' models live in snapshots, so {remedy}, too")
    elif refused:
        findings.warn(f"{refused}: a killed trainer returns to its checkpoint")


def trainers_named(topology: Topology) -> str:
    """Return what trains the models of the run, such as `the trainer and the critic`."""
    others = (f"the {model.name}" for model in topology.trained if model.name != POLICY)
    return " and ".join(["the trainer", *others])


def _check_tied_weights(topology: Topology, findings: Findings) -> None:
    """Check that the policy's files hold equal values for weights that its configuration ties. A critic has no output
    layer that could be tied."""
    model = topology.policy.model
    with contextlib.suppress(OSError, ValueError):  # Another check reports it, or the model is not here yet.
        if differs := tied_weights.ambiguity(model):
            findings.error(f"policy.model: {model}: {differs}")


def _messages(topology: Topology) -> str:
    """Return the part of the topology that needs a chat template, or an empty string if no part does."""
    workflow = topology.workflow
    if workflow is not None and workflow.function.startswith("builtin:"):
        return f"workflow.function {workflow.function}"
    return _first_row(sources(topology), list)


def _first_row(sources: Mapping[str, str], prompt: type) -> str:
    """Return the place of the first row whose prompt is of this type, or an empty string if there is none."""
    for key, source in sources.items():
        try:
            rows = open_source(source, where=key)
        except DataError:
            continue  # `_check_rows` reports this error.
        for index in range(len(rows)):
            with contextlib.suppress(DataError):
                if isinstance(rows.row(index)["prompt"], prompt):
                    return f"{key}: {rows.place(index)}"
    return ""


def _check_memory(topology: Topology, findings: Findings) -> None:
    root = shm_root(topology)
    folder = next(parent for parent in (root, *root.parents) if parent.exists())
    room = shutil.disk_usage(folder)
    wanted = topology.services.batch_store.memory
    where = f"services.batch-store.memory: {wanted / MIB:.0f} MiB wanted, but {root} has"
    if room.total < wanted:
        findings.error(
            f"{where} {room.total / MIB:.0f} MiB in all; lower it, enlarge {root} (docker: --shm-size), "
            "or set services.batch-store.directory"
        )
    elif room.free < wanted:
        findings.error(
            f"{where} {room.free / MIB:.0f} MiB free of {room.total / MIB:.0f}; lower it, or free space in {root}"
        )
    elif not os.access(folder, os.W_OK):
        findings.error(f"{folder}: not writable; set services.batch-store.directory")


def _check_model_memory(topology: Topology, findings: Findings) -> None:
    """Check that the models being trained fit into the memory of this machine and of its GPUs."""
    names = own_gpus()
    try:
        visible = visible_gpus(topology, names if gpus_wanted(topology) <= len(names) else None)
        elements = parameter_counts(topology)
    except (OSError, ValueError):
        return  # Another check reports it, or the model is not here yet.
    places = memory_plan.by_place(memory_plan.uses(topology, elements, visible, vocabulary(topology.policy.model)))
    room, instead = room_of(topology, places), functools.cache(lambda: adapter.instead(topology, visible))
    for place, uses in places.items():
        if place in room:
            errors = memory_plan.too_large(
                topology, elements, place, uses, room[place], lambda place: instead().get(place, ())
            )
            findings.error(*errors)


def room_of(topology: Topology, places: Iterable[MemoryPlace]) -> dict[MemoryPlace, int]:
    """Return the sizes, in bytes, of those places that are on this machine, as far as they can be measured."""
    sizes = {"": host_bytes()} | (gpu_bytes() if any(place.gpu for place in places) else {})
    return {place: sizes[place.gpu] for place in places if place.host == topology.home and place.gpu in sizes}


def gpu_bytes() -> dict[str, int]:
    """Return the memory of every GPU of this machine by its index and by its UUID, or {} if nvidia-smi cannot report
    it.

    CUDA may number GPUs of different sizes in a different order, so their indices are left out.
    """
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        sizes = {index: int(mib) * MIB for index, _, mib in rows}
        by_index = sizes if len(set(sizes.values())) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else {}
        return {uuid: sizes[index] for index, uuid, _ in rows} | by_index
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _refused_snapshots(topology: Topology) -> str:
    """Return the reason why the trainer cannot keep the requested snapshots, or an empty string."""
    needed, limit = snapshot_bytes(topology), topology.checkpoint.memory
    if needed > limit:
        return (
            f"checkpoint.memory: snapshots of {trainers_named(topology)} need {format_size(needed)}, but the limit is "
            f"{format_size(limit)}; raise it, or set checkpoint.memory_every to null"
        )
    root = shm_root(topology)
    free = shutil.disk_usage(next(parent for parent in (root, *root.parents) if parent.exists())).free
    left = max(free - topology.services.batch_store.memory, 0)
    if needed > left:
        return (
            f"checkpoint.memory_every: snapshots of {trainers_named(topology)} need {format_size(needed)}, but {root} "
            f"has {format_size(left)} left after setting aside services.batch-store.memory; lower that key, enlarge "
            f"{root}, or set checkpoint.memory_every to null"
        )
    return ""


def _check_gpus(topology: Topology, findings: Findings) -> None:
    names, needed = own_gpus(), gpus_wanted(topology)
    if needed > len(names):
        seen = "CUDA_VISIBLE_DEVICES names" if "CUDA_VISIBLE_DEVICES" in os.environ else "this machine has"
        findings.error(
            f"services.*.gpus: {needed} GPUs wanted ({gpus_described(topology)}), but {seen} {len(names)}; "
            "lower them, or let services take turns (placement.colocate)"
        )


def _check_allocator(topology: Topology, findings: Findings) -> None:
    """Check that torch allocates GPU memory that another process can open, if weights are read from such memory."""
    if topology.services.rollout.weights != "ipc":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            findings.error(
                f"services.rollout.weights: ipc: {name} has expandable_segments:True, and engines cannot "
                "open such memory; remove that, or use weights: nccl"
            )


def _check_compiler(topology: Topology, findings: Findings) -> None:
    """Warn if vLLM is going to compile its model without a C++ compiler, which torch.compile calls even on a GPU."""
    rollout, compiler = topology.services.rollout, os.environ.get("CXX", "g++")
    compiles = rollout.engine == "vllm" and rollout.gpus and not rollout.engine_args.get("enforce_eager")
    if compiles and shutil.which(compiler) is None:
        findings.warn(
            f"services.rollout.engine: vllm compiles its model on a GPU, which needs a C++ compiler, but there "
            f"is no {compiler}; install it, or set services.rollout.engine_args.enforce_eager to true"
        )


def _check_connections(topology: Topology, findings: Findings) -> None:
    """Check that the scheduler can accept a connection from every process on the other hosts."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, most = len(topology.away_plan()), most_connections(descriptors)
    if needed > most:
        findings.error(
            f"placement: {needed} processes on other hosts connect to the scheduler, which accepts {most} "
            f"connections ({MOST_CONNECTIONS}, or fewer if ulimit -Hn is too low); lower services.rollout.instances"
        )


def _check_trackers(topology: Topology, findings: Findings) -> None:
    """Warn about each tracker whose client is not installed. The run goes on without such a tracker."""
    for name in topology.monitor.trackers:
        if lacking := missing(name):
            findings.warn(
                f"monitor.{name}: {', '.join(lacking)} not installed; the run goes on without {name}, which "
                f"receives no steps; {REMEDY}, then `ctl restart tracker` or, after the run, "
                f"`ctl track {name}` sends them"
            )


def _check_monitor(topology: Topology, findings: Findings) -> None:
    """Check the libraries and the token files of the browser page and the exporter, and that their addresses can be
    used."""
    monitor = topology.monitor
    findings.error(*(f"{dotted(path)}: {message}" for path, message in token_problems(monitor)))
    findings.error(*missing_libraries(topology))
    for name, section in (("web", monitor.web), ("prometheus", monitor.prometheus)):
        if section is not None:
            check_address(split_address(section.listen), (f"monitor.{name}.listen",) * 2, findings)


def missing_libraries(topology: Topology) -> list[str]:
    """Return a line for each library that the exporter needs and that is not installed."""
    monitor = topology.monitor
    needed: dict[str, str] = {}
    if monitor.prometheus is not None:
        needed["prometheus"] = "prometheus_client"
    if monitor.traces is not None and monitor.traces.otlp is not None:
        needed["traces.otlp"] = "opentelemetry.proto"
    remedy = "which is not installed; run make setup-observability"
    return [
        f"monitor.{key}: needs the package {module}, {remedy}"
        for key, module in needed.items()
        if not _is_installed(module)
    ]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


Check = Callable[[Topology, Findings], None]
MODEL_CHECKS: tuple[Check, ...] = (
    _check_tokenizer,
    _check_ends,
    _check_model_files,
    _check_tied_weights,
    critic.check_critic,
    critic.check_head,
    distill.check_teacher,
)
"""Checks of the models' folders, on every machine that has some of its own."""
HOST_CHECKS: tuple[Check, ...] = (_check_functions, _check_engine, _check_memory, _check_allocator)
"""Checks of the machine on which processes of the run compute."""
RUN_CHECKS: tuple[Check, ...] = (
    source_checks.check_prompts,
    source_checks.check_answers,
    rewards.check_fields,
    rewards.check_calls,
    adapter.check_rate,
    schedule.check_schedule,
)
"""Checks of what a training run adds to a cluster, which a server does not have."""
CHECKS: tuple[Check, ...] = (
    *HOST_CHECKS,
    *MODEL_CHECKS,
    *RUN_CHECKS,
    _check_snapshots,
    _check_gpus,
    _check_compiler,
    _check_connections,
    _check_trackers,
    check_doors,
    _check_monitor,
    check_server,
)
"""All checks, which a dry run and a start make alike, after those of the rows."""
