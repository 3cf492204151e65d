"""Prepares a run that evaluates the policy or a checkpoint without training (`--evaluate`), and formats its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from proto.messages import ErrorCode
from shared import model_folder
from shared.checkpoint_files import MODEL, STATE, AdapterNote, check_note, note_of, verify
from shared.evaluation import ACCURACY, PART, REWARD, draws
from shared.names import EVALUATION_PREFIX
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, checkpoint_steps
from shared.topology import Topology, model_files
from shared.topology.lora import CONFIG as ADAPTER_CONFIG
from shared.topology.lora import FOLDER as ADAPTER_FOLDER
from shared.topology.lora import Lora
from shared.topology.models import CRITIC, FROZEN, REWARD_MODEL

MODEL_FOLDER = "model"
"""Folder in the run directory with the weights of an evaluated checkpoint."""
_MOST_NAME_CHARS = 64
_SHOWN_NAMES = 3


def without_training(topology: Topology) -> Topology:
    """Return `topology` for a run that only evaluates and does not start or reserve what only training needs.

    The trainer is kept, because it publishes the weights and proves that the engines have loaded them.
    """
    trained_with = [name for name in FROZEN if name != REWARD_MODEL]  # evaluations are scored, too
    colocated = tuple(name for name in topology.placement.colocate if name not in (*trained_with, CRITIC))
    changes = {
        "run": topology.run.model_copy(
            update={"evaluate": True, "name": f"{EVALUATION_PREFIX}{topology.run.name}"[:_MOST_NAME_CHARS]}
        ),
        "algorithm": topology.algorithm.model_copy(update={"kl": None, "distill": None}),
        "critic": None,
        "teacher": None,
        "services": topology.services.model_copy(update=dict.fromkeys((*trained_with, CRITIC))),
        "checkpoint": topology.checkpoint.model_copy(update={"memory_every": None}),
        "placement": topology.placement.model_copy(update={"colocate": colocated if len(colocated) > 1 else ()}),
    }
    return topology.model_copy(update=changes)


def with_model(topology: Topology, folder: Path) -> Topology:
    """Return `topology` with the model in `folder` as its policy, without an adapter."""
    return topology.model_copy(
        update={"policy": topology.policy.model_copy(update={"model": str(folder), "lora": None})}
    )


def with_adapter(topology: Topology, folder: Path) -> Topology:
    """Return `topology` with the adapter in `folder`, which is in peft's format, over its policy's weights."""
    lora = topology.policy.lora
    if lora is None:
        text = f"--checkpoint {folder}: is an adapter, but the topology has no policy.lora"
        raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; add it with the adapter's rank and alpha")
    lora = lora.model_copy(update={"adapter_path": str(folder)})
    return topology.model_copy(update={"policy": topology.policy.model_copy(update={"lora": lora})})


def with_weights(topology: Topology, folder: Path) -> Topology:
    """Return `topology` with the exported model or adapter in `folder`. A checkpoint changes nothing yet
    (`with_checkpoint`)."""
    if is_checkpoint(folder):
        return topology
    adapter = _adapter_in(folder)
    return with_model(topology, folder) if adapter is None else with_adapter(topology, adapter)


def _adapter_in(folder: Path) -> Path | None:
    """Return the folder of the adapter in `folder`, an adapter or an export, unless that also holds a whole model."""
    places = () if (folder / "config.json").is_file() else (folder, folder / ADAPTER_FOLDER)
    return next((place for place in places if (place / ADAPTER_CONFIG).is_file()), None)


def with_checkpoint(topology: Topology, checkpoint: Path, folder: Path, run: Path) -> Topology:
    """Return `topology` with the weights of `checkpoint`, which are written into `folder`, the later directory `run`.
    An adapter is not merged, because that would round it. Raises OSError."""
    policy = topology.policy
    lora = None if policy.lora is None else policy.lora.model_copy(update={"export_merged": False})
    target = folder / MODEL_FOLDER
    model_folder.from_checkpoint(checkpoint, Path(policy.model), target, policy.dtype, lora=lora)
    if lora is None:
        return with_model(topology, run / MODEL_FOLDER)
    return with_adapter(topology, run / MODEL_FOLDER / ADAPTER_FOLDER)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a run's checkpoint rather than a model folder."""
    return (path / STATE).is_file()


def check_checkpoint(path: Path, model: str, lora: Lora | None = None) -> None:
    """Raise a one-line RpcError(bad_request or conflict) unless `path` is an intact checkpoint or exported model with
    the same shapes as the policy in the folder `model`. A checkpoint must hold an adapter like `lora`, if that is
    given; the shapes of adapters are checked when they are loaded."""
    if not path.is_dir():
        there = [f"step-{step}" for step in checkpoint_steps(path.parent)]
        remedy = f"; available: {', '.join(there)}" if there else "; name RUN/checkpoints/step-N or RUN/export"
        raise RpcError(ErrorCode.BAD_REQUEST, f"--checkpoint {path}: no such folder{remedy}")
    if is_checkpoint(path):
        note = note_of(verify(path, only=[MODEL]))
        check_note(path, note, None if lora is None else AdapterNote(note.base if note else "", lora.rank, lora.alpha))
        if note is not None:
            return
    elif _adapter_in(path) is not None:
        return
    elif not (path / "config.json").is_file():
        text = (
            f"--checkpoint {path}: holds neither {STATE} (a checkpoint) nor config.json (an exported model) nor "
            f"{ADAPTER_CONFIG} (an adapter)"
        )
        raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; name RUN/checkpoints/step-N, RUN/export or RUN/export/adapter")
    try:
        own = model_files.file_shapes(path / MODEL) if is_checkpoint(path) else model_files.named_shapes(str(path))
        wrong = _differences(own, model_files.named_shapes(model))
    except (OSError, ValueError) as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"--checkpoint {path}: {error}") from None
    if wrong:
        more = f" and {len(wrong) - _SHOWN_NAMES} more" if len(wrong) > _SHOWN_NAMES else ""
        text = f"--checkpoint {path}: belongs to a different model than policy.model ({model})"
        raise RpcError(ErrorCode.BAD_REQUEST, f"{text}: {', '.join(wrong[:_SHOWN_NAMES])}{more}")


def _differences(own: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> list[str]:
    """Return a short description of each matrix that only one of the two models has, or whose shape differs.

    A tied output matrix may be left out. Experts may be stored individually or together, so they are not compared.
    """

    def matrices(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return {
            name: shape
            for name, shape in shapes.items()
            if len(shape) > 1 and ".experts." not in name and name != "lm_head.weight"
        }

    mine, theirs = matrices(own), matrices(expected)
    missing = [f"{name} is missing" for name in sorted(theirs.keys() - mine.keys())]
    strange = [f"{name} is unknown" for name in sorted(mine.keys() - theirs.keys())]
    common = sorted(mine.keys() & theirs.keys())
    reshaped = [f"{name} is {mine[name]}, not {theirs[name]}" for name in common if mine[name] != theirs[name]]
    return reshaped + missing + strange


def table(topology: Topology, row: Mapping[str, float]) -> list[str]:
    """Return the results of each evaluation set in `row`, a row of metrics.jsonl, as lines of a table.

    Mean rewards are called accuracies if those of all sets are. Below the table are the pass@k of fewer samples than a
    row has, and the means of named rewards.
    """
    results = {name: _results(row, f"eval/{name}/") for name in topology.data.eval}
    label = REWARD if any(ACCURACY not in values for values in results.values() if REWARD in values) else ACCURACY
    lines, below = [("set", "rows", "samples", label, "avg@k", "pass@k", "dropped")], []
    for name, section in topology.data.eval.items():
        values, samples = results[name], section.samples
        shown = [
            f"{values[score]:.3f}" if score in values else "-" for score in (label, f"avg@{samples}", f"pass@{samples}")
        ]
        counts = [f"{values.get(count, 0):.0f}" for count in ("rows_scored", "rows_dropped")]
        lines.append((name, counts[0], str(samples), shown[0], shown[1], shown[2], counts[1]))
        more = [
            *(f"pass@{k}" for k in draws(samples)[:-1]),
            *(score for score in sorted(values) if score.startswith(PART)),
        ]
        given = [f"{score.removeprefix(PART)} {values[score]:.3f}" for score in more if score in values]
        below += [f"{name}: {', '.join(given)}"] if given else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return made + below


def _results(row: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def best_lines(run: RunDir) -> list[str]:
    """Return a list with one line that names the exported best checkpoint, or an empty list if none was exported."""
    try:
        best = json.loads(run.best_note.read_text())
        return [f"best       {run.export_best} (step {best['step']}, {best['metric']} {best['value']:.3f})"]
    except FileNotFoundError:
        return []
