"""Tests the state of an adapter in training: its checkpoints, snapshots, earlier versions and restarts hold nothing of
its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from proto.messages import ErrorCode, WeightsKind
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.snapshots import Snapshots
from services.policy_trainer.worker.training_state import TrainingState
from services.policy_trainer.worker.weights.drill import Drill
from services.policy_trainer.worker.weights.publish import Canaries, EarlierVersions
from shared.checkpoint_files import STATE, AdapterNote, check_note
from shared.model.adapter import AdapterStart, scales_of
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.topology.lora import Lora
from tests.unit.policy_trainer.test_state import backend, folder, same_bits, train
from tests.unit.policy_trainer.training import one_rank

__all__ = ["folder"]
LORA = Lora(rank=2, alpha=3.0)
NO_DRILL = Drill([], np.ones(4, np.float32), np.zeros(4, np.float32), [])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def adapted(folder: Path, dtype: str = "float32") -> TorchBackend:
    return one_rank(folder, dtype, max_tokens=4096, adapter=AdapterStart(LORA, seed=7))


def saved(made: TorchBackend, path: Path, step: int) -> Path:
    state, base = made.state(), made.base
    note = None if base is None else AdapterNote(base.name, LORA.rank, LORA.alpha)
    return checkpoint.save(path, SavedState(step, state.weights, state.optimizer, adapter=note))


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@DTYPES
def test_training_from_a_checkpoint_of_an_adapter_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    straight = adapted(folder, dtype)
    for step in (1, 2, 3):
        train(straight, step)
    path = saved(straight, tmp_path / "c", 3)
    resumed, loaded = adapted(folder, dtype), checkpoint.load(tmp_path / "c", 3)
    assert straight.base is not None
    assert loaded.adapter == AdapterNote(straight.base.name, 2, 3.0)
    resumed.load_state(TrainingState(loaded.weights, loaded.optimizer))
    for step in (4, 5):
        train(straight, step)
        train(resumed, step)
    assert same_bits(straight.published(), resumed.published())
    assert same_bits(straight.state().optimizer, resumed.state().optimizer)
    whole = backend(folder, dtype)
    train(whole, 1)
    assert {name.rpartition(".")[2] for name in load_file(path / "model.safetensors")} == {"lora_A", "lora_B"}
    elements = sum(tensor.numel() for tensor in straight.weights().values())
    state = elements * (4 + 4 + 4 if dtype == "float32" else 2 + 4 + 4 + 4)  # weights, masters, two moments
    assert state < size(path) < state + 16384  # names, shapes and counts of steps
    assert size(path) < 0.35 * size(saved(whole, tmp_path / "whole", 1))  # the layers of this model are tiny


@DTYPES
def test_training_from_a_snapshot_of_an_adapter_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    straight = adapted(folder, dtype)
    train(straight, 1)
    Snapshots(tmp_path / "s", Layout(1).place(0)).take(0, 1, straight.own_state())
    resumed = adapted(folder, dtype)
    train(resumed, 3)
    state = Snapshots(tmp_path / "s", Layout(1).place(0)).read(0, 1)
    assert {name.rpartition(".")[2] for name in state} == {"lora_A", "lora_B"}
    resumed.load_own_state(state)
    for made in (straight, resumed):
        train(made, 2)
    assert same_bits(straight.published(), resumed.published())
    assert same_bits(straight.state().optimizer, resumed.state().optimizer)


def test_a_restart_resets_the_adapter_without_reading_the_base(folder: Path) -> None:
    made, fresh = adapted(folder), adapted(folder)
    train(made, 1)
    assert not same_bits(made.published(), fresh.published())
    folder.rename(folder.with_name("moved"))
    made.restart()
    assert same_bits(made.published(), fresh.published())
    assert made.state().optimizer == {}
    train(made, 1)
    train(fresh, 1)
    assert same_bits(made.published(), fresh.published())
    assert same_bits(made.state().optimizer, fresh.state().optimizer)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (AdapterNote("0123456789abcdef", 2, 3.0), "over the weights {base}, but .* over the weights 0123456789abcdef;"),
        (
            AdapterNote("{base}", 4, 3.0),
            "an adapter of rank 2 and alpha 3 .*, but .* adapter of rank 4 and alpha 3 ",
        ),
        (AdapterNote("{base}", 2, 1.5), r"of rank 2 and alpha 3 .*, but the run trains .* of rank 2 and alpha 1\.5 "),
        (None, "an adapter of rank 2 .*, but the run trains all weights of a model;"),
    ],
)
def test_a_checkpoint_over_another_base_or_of_another_adapter_is_refused(
    folder: Path, tmp_path: Path, run: AdapterNote | None, text: str
) -> None:
    made = adapted(folder)
    path = saved(made, tmp_path, 0)
    assert made.base is not None
    mine, name = checkpoint.load(tmp_path, 0).adapter, made.base.name
    check_note(path, mine, AdapterNote(name, 2, 3.0))
    expected = None if run is None else AdapterNote(run.base.format(base=name), run.rank, run.alpha)
    with pytest.raises(RpcError, match=rf"^checkpoint {path}: holds .*{text.format(base=name)}.* restore") as caught:
        check_note(path, mine, expected)
    assert caught.value.code == ErrorCode.CONFLICT
    assert "\n" not in str(caught.value)
    with pytest.raises(RpcError, match="holds all weights of a model, but the run trains an adapter of rank 2 "):
        check_note(path, None, mine)


def test_a_checkpoint_that_says_nonsense_of_its_adapter_is_damaged(folder: Path, tmp_path: Path) -> None:
    path = saved(adapted(folder), tmp_path, 0)
    text = (path / STATE).read_text()
    for old, new in (('"rank": 2', '"rank": "two"'), ('"base"', '"bass"')):
        (path / STATE).write_text(text.replace(old, new))
        with pytest.raises(RpcError, match=r"damaged \("):
            checkpoint.load(tmp_path, 0)


def test_adapters_of_other_modules_are_refused_and_nothing_changes(folder: Path) -> None:
    made = adapted(folder)
    before = made.state().weights
    less = {name: tensor for name, tensor in before.items() if "layers.0.mlp.up_proj" not in name}
    with pytest.raises(RpcError, match=r"weights of another model: model\.layers\.0\.mlp\.up_proj\.lora_A"):
        made.load_state(TrainingState(less, {}))
    assert same_bits(made.weights(), before)


@DTYPES
def test_an_earlier_version_is_published_again_as_the_adapter_that_it_was(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    made = adapted(folder, dtype)
    assert made.base is not None
    canaries = Canaries(made, folder, dtype, 3, with_digests=True, drill=NO_DRILL)
    loaded = Loaded(made, canaries, EarlierVersions(1))
    train(made, 1)
    loaded.record(1)
    first = {name: tensor.clone() for name, tensor in made.published().items()}
    assert not same_bits(first, made.weights())  # B is multiplied by its scale
    assert scales_of(made.model).keys() == {name for name in first if name.endswith("lora_B")}
    record = canaries.weight_set(first)
    train(made, 2)
    loaded.record(2)
    state = made.state()
    checkpoint.save(tmp_path, SavedState(2, state.weights, state.optimizer, loaded.earlier.tensors(2)))
    read, later = checkpoint.load(tmp_path, 2), EarlierVersions(1)
    later.restore(read.earlier, canaries)
    version: Any = later.get(1)
    assert same_bits(version.weights, first)
    again = canaries.weight_set(version.weights)
    assert (again.kind, again.base, again.digests) == (WeightsKind.ADAPTER, made.base, record.digests)
    assert again.digests != canaries.weight_set(made.published()).digests
