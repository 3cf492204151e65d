"""Trains an adapter with the trainer's own backend, and publishes its versions as a trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from proto.messages import AdamW, ErrorCode, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.weights.publish import Canaries, adapter_drill
from shared.model.adapter import AdapterStart
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from tests.unit.rollout.rollout_engine import MODEL
from tests.weights_refs import weights_ref

SEED = 7
START = AdapterStart(Lora(rank=4, alpha=7.0), SEED)
"""The scale is no power of two, so it changes the bits of a product."""


class AdapterTrainer:
    """A trainer's backend with its canaries, before and after two updates. The first changes only B, which is zero."""

    def __init__(self, dtype: str, folder: Path, start: AdapterStart = START) -> None:
        drills = []

        def on_adapted(model: torch.nn.Module, begun: AdapterStart) -> None:
            drills.append(adapter_drill(model, begun, dtype, with_digests=True))

        options = BackendOptions(
            max_tokens=4096,
            threads=1,
            device="cpu",
            scratch=folder,
            passes=FASTEST,
            adapter=start,
            on_adapted=on_adapted,
        )
        self.backend = TorchBackend(MODEL, dtype, options, Layout(1).place(0))
        self.canaries = Canaries(self.backend, MODEL, dtype, start.seed, with_digests=True, drill=drills[0])
        self.first = self.published(0)
        for step in (1, 2):
            self.update(step)
        self.second = self.published(2)

    def update(self, step: int) -> None:
        ids = np.arange(5, 35, dtype=np.int32)
        mask = np.ones(30, np.uint8)
        mask[0] = 0
        text = Sequences(ids, np.array([30], np.int32), mask)
        self.backend.forward_backward(text, 1.0, lambda scores, _: (-scores.outputs.sum(), {}), entropy="none")
        self.backend.step(step, AdamW(lr=0.05, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0))

    def published(self, step: int, lineage: int = 1) -> tuple[WeightsRef, dict[str, Array]]:
        tensors = {name: tensor.clone() for name, tensor in self.backend.published().items()}
        record = self.canaries.weight_set(tensors)
        canary = structs.replace(self.canaries.current(), digests=list(record.digests))
        ref = weights_ref(lineage, step, canary, self.canaries.drill, drill_seed=self.canaries.drill_seed)
        assert record.base is not None
        ref = structs.replace(
            ref,
            drill_factors=self.canaries.drill_factors,
            kind=record.kind,
            base=record.base.name,
            base_digests=list(record.base.digests),
        )
        return ref, {name: to_numpy(tensor) for name, tensor in tensors.items()}


class Published:
    """A data plane with the versions of a trainer. Version `n` has the name `weights/1/<n>`."""

    def __init__(self, folder: Path) -> None:
        trainer = AdapterTrainer("float32", folder)
        versions = [trainer.first, trainer.second]
        for step in (3, 4):
            trainer.update(step)
            versions.append(trainer.published(step))
        self.refs = [ref for ref, _ in versions]
        self._weights = {ref.task_id: tensors for ref, tensors in versions}
        self.gone: set[str] = set()

    async def fetch(self, meta: Any, keys: Any, **_: Any) -> list[dict[str, Array]]:
        (task,) = meta.tasks
        if task.task_id in self.gone:
            raise RpcError(ErrorCode.COLLECTED, f"{task.task_id} was collected")
        return [self._weights[task.task_id]]
