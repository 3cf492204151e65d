"""A single rank of megatron opens a process group of its own, whose backends suit the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from shared.megatron.groups import Groups
from shared.ranks.layout import Layout


class Opened(Exception):
    """Ends the test when a process group would be opened."""


@pytest.mark.parametrize(("on_gpu", "backends"), [(False, {"cpu": "gloo"}), (True, {"cpu": "gloo", "cuda": "nccl"})])
def test_a_group_of_one_rank_supports_the_tensors_of_its_device(
    on_gpu: bool, backends: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, torch can neither open the group for one nor use it, so the test ends before that."""

    def opening(names: str, **options: object) -> None:
        raise Opened(names, options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", opening)
    with pytest.raises(Opened) as opened:
        Groups(Layout(1).place(0))
    names, options = opened.value.args
    found = BackendConfig(Backend(names)).get_device_backend_map()
    assert {kind: found[kind] for kind in backends} == backends
    assert (options["rank"], options["world_size"]) == (0, 1)
