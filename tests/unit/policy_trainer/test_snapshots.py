"""Tests the snapshots of a rank in shared memory. They restore the same bits, are either sealed or absent, and reveal
damage, and there are never more than two of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from proto.messages import ErrorCode, HeldSnapshot
from services.policy_trainer.checkpoints import BURST_S, SHARE, SnapshotPace
from services.policy_trainer.worker import snapshots
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.snapshots import Snapshots
from services.policy_trainer.worker.weights.publish import EarlierVersions
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.topology import load, snapshot_bytes
from tests.unit.policy_trainer.test_state import backend, folder, same_bits, train
from tests.unit.shared.topology.small_topology import edited, make

__all__ = ["folder"]
PLACE = Layout(1).place(0)


def held(made: Snapshots) -> set[tuple[int, int]]:
    return {(each.lineage, each.step) for each in made.held()}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 7), value), "b": torch.tensor(value, dtype=torch.bfloat16), "c": torch.empty(0, 3)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_from_a_snapshot_ends_with_the_same_bits(folder: Path, tmp_path: Path, dtype: str) -> None:
    straight = backend(folder, dtype)
    for step in (1, 2, 3):
        train(straight, step)
    Snapshots(tmp_path / "s", PLACE).take(0, 3, straight.own_state())
    resumed = backend(folder, dtype)
    train(resumed, 1)  # Any earlier state is replaced.
    resumed.load_own_state(Snapshots(tmp_path / "s", PLACE).read(0, 3))
    for step in (4, 5, 6):
        train(straight, step)
        train(resumed, step)
    assert same_bits(straight.weights(), resumed.weights())
    assert same_bits(straight.state().optimizer, resumed.state().optimizer)


def test_a_snapshot_keeps_no_weights_in_memory_and_loads_while_parts_are_offloaded(
    folder: Path, tmp_path: Path
) -> None:
    """`Tensor.numpy` would share the memory of a tensor, which then could not be freed."""
    made, kept = backend(folder), Snapshots(tmp_path, PLACE)
    train(made, 1)
    kept.take(0, 1, made.own_state())
    before = {name: each.clone() for name, each in made.weights().items()}
    train(made, 2)
    made.shelves.offload(frozenset({"parameters", "optimizer"}))
    assert all(each.untyped_storage().nbytes() == 0 for each in made.model.parameters())
    made.load_own_state(kept.read(0, 1))
    assert same_bits(made.weights(), before)


def test_the_two_newest_snapshots_are_kept_and_found_by_a_later_incarnation(tmp_path: Path) -> None:
    made = Snapshots(tmp_path, PLACE)
    assert held(made) == set()
    for step in (1, 2, 3):
        made.take(0, step, state(step))
    later = Snapshots(tmp_path, PLACE)
    assert held(later) == {(0, 2), (0, 3)}
    assert all(torch.equal(each, state(step)[name]) for step in (2, 3) for name, each in later.read(0, step).items())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("loaded", [1, 2])
def test_the_snapshot_that_was_loaded_is_not_overwritten(loaded: int, tmp_path: Path) -> None:
    made = Snapshots(tmp_path, PLACE)
    for step in (1, 2):
        made.take(0, step, state(step))
    later = Snapshots(tmp_path, PLACE)
    later.keep_only(0, loaded)
    assert held(later) == {(0, loaded)}
    later.take(0, 5, state(5))
    assert held(later) == {(0, loaded), (0, 5)}


def test_loading_any_other_state_discards_all_snapshots(tmp_path: Path) -> None:
    made = Snapshots(tmp_path, PLACE)
    for step in (1, 2):
        made.take(3, step, state(step))
    made.keep_only(4, 2)
    assert held(made) == set()
    with pytest.raises(RpcError) as missing:
        made.read(3, 2)
    assert missing.value.code == ErrorCode.MISSING


def test_an_interrupted_write_leaves_the_other_snapshot_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Snapshots(tmp_path, PLACE)
    for step in (1, 2):
        made.take(0, step, state(step))

    def interrupted(target: object, layout: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "copy_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.take(0, 3, state(3))
    assert held(Snapshots(tmp_path, PLACE)) == {(0, 2)}


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    Snapshots(tmp_path, PLACE).take(0, 1, {"a": torch.arange(40.0), "b": torch.arange(5, dtype=torch.uint8)})
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    outcomes: Counter[str] = Counter()
    for index in range(len(data)):
        data[index] ^= 0x10
        file.write_bytes(data)
        outcomes[outcome(Snapshots(tmp_path, PLACE))] += 1
        data[index] ^= 0x10
    assert outcomes["conflict"] == 40 * 4 + 5
    assert outcomes["wrong"] == 0
    assert 0 < outcomes["whole"] < 2 * 64  # Padding before each tensor is not read.


def outcome(found: Snapshots) -> str:
    if held(found) != {(0, 1)}:
        return "not sealed"
    try:
        values = found.read(0, 1)
    except RpcError as error:
        return error.code
    whole = torch.equal(values["a"], torch.arange(40.0)) and torch.equal(values["b"], torch.arange(5).byte())
    return "whole" if whole else "wrong"


def test_ranks_in_a_different_layout_do_not_see_a_snapshot(tmp_path: Path) -> None:
    Snapshots(tmp_path, Layout(2).place(1)).take(0, 1, state(1))
    others = [Layout(2).place(0), Layout(1).place(0), Layout(4, tp=2).place(1), Layout(2, tp=2).place(1)]
    assert [held(Snapshots(tmp_path, place)) for place in others] == [set()] * 4
    assert held(Snapshots(tmp_path, Layout(2).place(1))) == {(0, 1)}


def test_the_random_number_sequence_continues_after_a_restore() -> None:
    torch.manual_seed(5)
    torch.rand(3)
    loaded = Loaded(MagicMock(**{"own_state.return_value": {}}), MagicMock(), EarlierVersions(0))
    kept = loaded.state(1)
    first = torch.rand(9)
    loaded.load_state(kept)
    assert torch.equal(torch.rand(9), first)


def test_snapshots_take_at_most_one_percent_of_the_time_in_the_long_run() -> None:
    taken = [step for step in range(1, 7) if SnapshotPace(2).due(step, 0.0)]
    assert taken == [2, 4, 6]
    assert not any(SnapshotPace(None).due(step, 0.0) for step in range(1, 7))
    for snapshot_s in (0.001, 0.04, 3.0):
        pace, spent = SnapshotPace(1), 0.0
        for step in range(1, 10_001):
            now = step * 0.5
            if pace.due(step, now):
                pace.kept(snapshot_s)
                spent += snapshot_s
            assert spent <= BURST_S + SHARE * now + snapshot_s
        assert spent == pytest.approx(min(SHARE * 5000, 10_000 * snapshot_s), rel=0.1)


def test_a_slow_snapshot_does_not_delay_the_next() -> None:
    pace = SnapshotPace(1)
    assert pace.due(1, 0.0)
    pace.kept(0.09)
    assert pace.due(2, 0.1)
    pace.kept(0.09)
    assert not pace.due(3, 0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_are_not_larger_than_the_topology_assumes(folder: Path, tmp_path: Path, dtype: str) -> None:
    (tmp_path / "t").mkdir()
    path = edited(make(tmp_path / "t"), "model: ./model", f"model: {folder}")
    topology = load(path, [f"policy.dtype={dtype}", "services.batch-store.memory=1GiB"])
    made, kept = backend(folder, dtype), Snapshots(tmp_path / "s", PLACE)
    for step in (1, 2):
        train(made, step)
        kept.take(0, step, Loaded(made, MagicMock(), EarlierVersions(0)).state(step))
    needed, found = snapshot_bytes(topology), sum(file.stat().st_size for file in (tmp_path / "s").iterdir())
    assert found <= needed <= 1.5 * found + (1 << 20)
    assert snapshot_bytes(load(path, ["checkpoint.memory_every=null", "services.batch-store.memory=1GiB"])) == 0
    assert HeldSnapshot(lineage=0, step=2) in kept.held()
