"""Tests loading a model onto several ranks: rank 0 reads it and sends the pieces, and no other rank ever holds the
whole model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.messages import ErrorCode
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.model.load import blocks_of, load_model, load_shapes, named_weights
from shared.ranks.layout import Layout, RankPlace
from shared.rpc.errors import RpcError
from shared.topology.passes import FASTEST
from tests.parity.groups import run_group
from tests.unit.tiny_models import make_model

LAYOUT = Layout(4)
ROOM = 0.6
"""Maximum growth of a rank's peak memory while it loads, as a fraction of the whole model in float32. The rank's pieces
take 0.25, and one tensor of the model 0.12."""


def resident_bytes(what: str) -> int:
    """Return the value on a line of /proc/self/status, in bytes: VmHWM is the peak, RssAnon the memory not mapped from
    files."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def backend_of(model: Path, dtype: str, place: RankPlace, folder: Path) -> TorchBackend:
    options = BackendOptions(
        max_tokens=4096, threads=1, device="cpu", scratch=folder / f"of-{os.getpid()}", recompute="none", passes=FASTEST
    )
    return TorchBackend(model, dtype, options, place)


def load_and_keep(place: RankPlace, folder: Path) -> None:
    """Load the model, change it and load it again. Keep the weights of rank 0 and the memory of every rank."""
    # Loading the small model imports modules and creates everything that a process creates only once.
    backend_of(folder.parent / "small", "bfloat16", place, folder)
    Path("/proc/self/clear_refs").write_text("5")  # This resets VmHWM.
    before = resident_bytes("VmHWM")
    backend = backend_of(folder.parent / "model", "bfloat16", place, folder)
    grown = resident_bytes("VmHWM") - before
    loaded = {name: each.clone() for name, each in backend.weights().items()}
    backend._trained.set_weights({name: torch.zeros_like(each) for name, each in loaded.items()})
    backend.restart()
    out = folder / f"rank-{place.rank}"
    (out / "memory.json").write_text(json.dumps(grown))
    save_file(loaded, out / "loaded.safetensors")
    save_file(backend.weights(), out / "again.safetensors")


def test_ranks_other_than_0_hold_only_pieces_and_all_weights_arrive(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    make_model("qwen3", dtype=torch.bfloat16, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path / "model")
    make_model("qwen3", dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path / "small")
    run_group("tests.parity.test_sharded_load:load_and_keep", LAYOUT, tmp_path / "run")
    expected = named_weights(load_model(tmp_path / "model", "bfloat16"))
    for name in ("loaded", "again"):
        found = load_file(tmp_path / "run" / "rank-0" / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], value) for each, value in expected.items())
    whole = sum(each.numel() for each in expected.values()) * 4
    grown = [json.loads((tmp_path / "run" / f"rank-{rank}" / "memory.json").read_text()) for rank in range(4)]
    assert max(grown[1:]) < ROOM * whole, f"{[each / whole for each in grown]} of the model in float32"


def refuse(place: RankPlace, folder: Path) -> None:
    with pytest.raises(RpcError, match=r"no config\.json there") as raised:
        backend_of(folder.parent / "missing", "float32", place, folder)
    assert raised.value.code == ErrorCode.BAD_REQUEST


def test_every_rank_refuses_a_model_that_rank_0_cannot_load(tmp_path: Path) -> None:
    run_group("tests.parity.test_sharded_load:refuse", Layout(2), tmp_path / "run")


def test_the_shapes_of_a_model_are_those_of_its_weights(tmp_path: Path) -> None:
    make_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    shapes, loaded = load_shapes(tmp_path, "bfloat16"), load_model(tmp_path, "bfloat16")
    assert len(list(blocks_of(shapes))) == len(list(blocks_of(loaded)))
    found = {name: (each.shape, each.dtype) for name, each in named_weights(shapes).items()}
    assert found == {name: (each.shape, each.dtype) for name, each in named_weights(loaded).items()}
