"""Implements the torch backend for any Hugging Face causal language model, with data and context parallelism.

A single rank holds the whole model (`replica`); several ranks hold pieces of it (`shards`, FSDP2).
"""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from proto.messages import AdamW
from proto.tensors import Array
from services.policy_trainer.worker.backend import (
    BackendOptions,
    PartShelves,
    Sequences,
    TokenLoss,
    check_same_model,
    refused_gradient,
    set_numbers,
    totals_of,
)
from services.policy_trainer.worker.blocks import recompute_blocks
from services.policy_trainer.worker.experts import ExpertLoad, sums_of
from services.policy_trainer.worker.mesh import Mesh, from_rank_0
from services.policy_trainer.worker.replica import Replica
from services.policy_trainer.worker.shards import Shards
from services.policy_trainer.worker.slots import AdapterSlots, Slots, WholeModel
from services.policy_trainer.worker.training_state import TrainingState
from shared.colocation.devices import Part
from shared.colocation.shelf import local_part, own_storages
from shared.model import adapter_files, cpu
from shared.model.adapter import adapt, adapters_of, base_weights, check_merge, first_adapters, scales_of
from shared.model.load import allow, load_model, load_shapes, named_weights
from shared.model.logprobs import Entropy, Scores, vocabulary
from shared.model.picks import IdsOf
from shared.model.routing import attach, routers_of
from shared.model.value_head import classifier_config
from shared.model_folder import GENERATION_CONFIG
from shared.ranks.layout import RankPlace
from shared.rpc.errors import BadInput, RpcError
from shared.tensors_torch import to_numpy
from shared.topology.models import Head
from shared.weights.digests import digests_of
from shared.weights.weight_set import Base

_IDLE = Sequences(np.zeros(2, np.int32), np.array([2], np.int32), np.array([0, 1], np.uint8))
"""Input for a rank that has no samples left while others still have some, because it must join their collectives."""


class TorchBackend:
    """The `backend.Backend` for models of the transformers library."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        options: BackendOptions,
        place: RankPlace,
        load: Callable[[Path, str, Head], nn.Module] = load_model,
        load_shapes: Callable[[Path, str, Head], nn.Module] = load_shapes,
    ) -> None:
        """Rank 0 uses `load`. The others need only the model's shapes, because rank 0 sends them their pieces.

        Raises RpcError(bad_request) if the model cannot be loaded, and ValueError if the layout is not supported.
        """
        cpu.set_up(options.threads)
        self.place = place
        self._load: Callable[[], nn.Module] = functools.partial(load, model_dir, dtype, options.head)
        self._source = model_dir
        self._dtype = dtype
        self._options = options
        self._mesh = Mesh(place, torch.device(options.device).type)
        model = self._loaded_on_rank_0(lambda _: None) or load_shapes(model_dir, dtype, options.head)
        self.slots: Slots | None = WholeModel()
        if options.adapter is not None:
            adapt(model, options.adapter)
            self.slots = AdapterSlots(model, options.adapter.lora.rank)
        allow(model, options.passes)
        attach(model)
        self.base: Base | None = None
        if options.adapter is not None and place.rank == 0:
            self.base = Base.of(digests_of(base_weights(model)))
            options.on_adapted(model, options.adapter)
        if options.recompute != "none":
            recompute_blocks(model, options.recompute)
        self._trained: Replica | Shards
        if self._mesh.shard_mesh is None:
            own_storages([*model.parameters(), *model.buffers()])
            self._trained = Replica(model.to(options.device))
        else:
            self._trained = Shards(model, self._mesh.shard_mesh, self._mesh.context)
        self.shelves = PartShelves(options.scratch, self._tensors)
        self._reset()
        if place.rank == 0:
            self._check_export()

    def _check_export(self) -> None:
        """Raise BadInput if the model's configuration could not be written at the end of the run, or its adapter not be
        merged."""
        adapter = self._options.adapter
        if adapter is not None and adapter.lora.export_merged:
            check_merge(self.model, self._source)
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._write_configuration(Path(folder))
        except Exception as error:  # a library's configuration may raise anything
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(
                f"model {self._source}: the trained model could not be exported, because transformers cannot write its "
                f"configuration: {cause[:300]}; correct config.json"
            ) from error

    def _reset(self) -> None:
        self._optimizer = torch.optim.AdamW(list(self._trained.masters.values()), fused=True)  # `step` sets its numbers

    def _loaded_on_rank_0(self, check: Callable[[nn.Module], None]) -> nn.Module | None:
        """Return the checked model from the model directory on rank 0 and None elsewhere. Every rank must call this.

        Raises rank 0's RpcError on all ranks.
        """
        model: nn.Module | None = None
        failure = b""
        if self.place.rank == 0:
            try:
                model = self._load()
                check(model)
            except RpcError as error:
                failure = f"{error.code} {error}".encode()
        if self.place.layout.world_size > 1:
            failure = from_rank_0(failure)
        if failure:
            code, _, text = failure.decode().partition(" ")
            raise RpcError(code, text)
        return model

    def restart(self) -> None:
        """Return to the first weights and reset the optimizer state. The base of an adapter is not read again."""
        self.shelves.backload()
        shapes, source, adapter = self._trained.shapes, self._source, self._options.adapter
        if adapter is not None:
            self._trained.set_weights(first_adapters(adapters_of(self.model), adapter))
        else:
            model = self._loaded_on_rank_0(lambda loaded: check_same_model(shapes, named_weights(loaded), source))
            self._trained.set_weights({} if model is None else named_weights(model))
        self._reset()
        self.drop_gradients()

    def fill_moments(self) -> None:
        for master in self._trained.masters.values():
            if not self._optimizer.state[master]:
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                moments = {slot: torch.zeros_like(master) for slot in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[master] = {"step": step, **moments}

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def model(self) -> nn.Module:
        """The model. Its parameters are pieces if there are several ranks."""
        return self._trained.model

    @property
    def called(self) -> nn.Module:
        """The module that scores a micro-batch with the model, or with other code for the same model."""
        return self._trained.scorer

    @property
    def vocab_size(self) -> int:
        return vocabulary(self.model)

    # ---- passes

    @torch.no_grad()
    def forward(self, sequences: Sequences, temperature: float) -> Array:
        """Return the log-probs or values, float32 [T], complete on every rank."""
        result = torch.zeros(len(sequences.token_ids), dtype=torch.float32, device=self._options.device)

        def keep(scores: Scores) -> None:
            result[scores.tokens] = scores.outputs.float()

        self._run(sequences, temperature, "none", None, keep, lambda _: None)
        self._trained.after_inference()
        record = None if sequences.routing is None else sequences.routing.record
        if record is not None:  # each sequence rank has written its part
            parts = torch.from_numpy(record).to(self._options.device)
            record[:] = to_numpy(self._mesh.sum_over_sequence_ranks(parts))
        return to_numpy(self._mesh.sum_over_sequence_ranks(result))

    def forward_backward(
        self,
        sequences: Sequences,
        temperature: float,
        loss: TokenLoss,
        *,
        entropy: Entropy,
        others: IdsOf | None = None,
        backward: bool = True,
    ) -> dict[str, float]:
        """Add the gradients of all micro-batches. The result does not depend on how the batch is split into them."""
        parts: list[Mapping[str, Tensor]] = []
        routing, load = sequences.routing, self._load_of(sequences)
        whole = self._whole_load(sequences, temperature) if sequences.balance else None

        def back(scores: Scores) -> None:
            total, sums = loss(scores, self._mesh.sum_over_sequence_ranks)
            if load is not None and routing is not None and scores.routed is not None:
                load.add(scores.routed)
                sums = {**sums, **sums_of(scores.routed, replayed=routing.given is not None)}
                if whole is not None:
                    balance = whole.balance(sequences.balance, scores.routed.mass)
                    total, sums = total + balance, {**sums, "balance": balance.detach()}
            if backward:
                total.backward()  # type: ignore[no-untyped-call]
            parts.append(sums)

        def idle(scores: Scores) -> None:
            if backward:
                (scores.outputs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

        self._run(sequences, temperature, entropy, others, back, idle)
        if not backward:
            self._trained.after_inference()
        return totals_of(parts) | ({} if load is None else load.over_ranks(self._mesh.sum_over_ranks).metrics())

    def _load_of(self, sequences: Sequences) -> ExpertLoad | None:
        routers = None if sequences.routing is None else routers_of(self.model)
        return None if routers is None else ExpertLoad(routers, torch.device(self._options.device))

    @torch.no_grad()
    def _whole_load(self, sequences: Sequences, temperature: float) -> ExpertLoad | None:
        """Return the load of the experts in the whole batch before its gradient: from given routes, or from a pass of
        its own."""
        load, routing = self._load_of(sequences), sequences.routing
        if load is None or routing is None:
            return None
        if routing.given is not None:
            if self.place.cp_rank == 0:  # the sequence ranks have the same sequences
                load.add_given(routing.given, sequences.loss_mask)
        else:

            def add(scores: Scores) -> None:
                if scores.routed is not None:
                    load.add(scores.routed)

            self._run(sequences, temperature, "none", None, add, lambda _: None)
            self._trained.after_inference()
        return load.over_ranks(self._mesh.sum_over_ranks)

    def _run(
        self,
        sequences: Sequences,
        temperature: float,
        entropy: Entropy,
        others: IdsOf | None,
        on_scores: Callable[[Scores], None],
        on_idle: Callable[[Scores], None],
    ) -> None:
        """Run as many passes as the rank with the most micro-batches needs."""
        scorer = self._trained.scorer

        def plan(samples: Sequences) -> list[Any]:
            if not len(samples.lengths):
                return []
            arrays = samples.token_ids, samples.lengths, samples.loss_mask
            given = None if samples.routing is None else samples.routing.given
            return scorer.plan(*arrays, temperature, self._options.max_tokens, samples.targets, given)

        batches = plan(sequences)
        passes = self._mesh.most(len(batches))
        for number in range(passes):
            self._trained.expect_backward(last=number == passes - 1)
            if number < len(batches):
                on_scores(scorer.score(batches[number], temperature, entropy, others, sequences.routing))
            else:
                on_idle(scorer.score(plan(_IDLE)[0], temperature, entropy))

    # ---- updates

    def step(self, step: int, optimizer: AdamW) -> float:
        """Clip, step, zero the gradients, and return their norm.

        Raises RpcError(bad_data) if the gradient is not finite; weights and optimizer state then remain unchanged.
        """
        masters = list(self._trained.masters.values())
        norm = torch.nn.utils.clip_grad_norm_(masters, optimizer.clip_norm or math.inf, foreach=True)
        grad_norm = float(self._trained.whole_scalar(norm))
        if not math.isfinite(grad_norm):
            self.drop_gradients()
            raise refused_gradient(step, grad_norm)
        set_numbers(self._optimizer.param_groups, optimizer)
        self._optimizer.step()
        self._trained.write_back()
        self.drop_gradients()
        return grad_norm

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.shelves.backload(frozenset(["gradients"]))
        self._trained.drop_unsummed()
        for parameter in (*self._trained.model.parameters(), *self._trained.masters.values()):
            parameter.grad = None

    # ---- state

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights on rank 0 and {} elsewhere."""
        return self._trained.weights()

    def published(self) -> dict[str, Tensor]:
        """Return the current weights on rank 0. B of an adapter is multiplied by its scale."""
        weights = self.weights()
        return weights | {name: weights[name] * scale for name, scale in scales_of(self.model).items() if weights}

    def state(self) -> TrainingState:
        """Return copies of the weights and the AdamW state on rank 0."""
        speaks = self.place.rank == 0
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights().items()}
        optimizer: dict[str, Tensor] = {}
        for name, master in self._trained.masters.items():
            slots = {slot: torch.as_tensor(value) for slot, value in self._optimizer.state[master].items()}
            if name in self._trained.separate:
                slots["master"] = master
            for slot, value in slots.items():
                whole = self._trained.whole(value)
                if speaks:
                    optimizer[f"{slot}/{name}"] = whole
        return TrainingState(weights, optimizer)

    @torch.no_grad()
    def load_state(self, state: TrainingState) -> None:
        """Load a checkpoint's state. Raises RpcError(conflict) if it belongs to another model."""
        self.shelves.backload()  # the shapes of tied weights are known only while their memory is allocated
        check_same_model(self._trained.shapes, state.weights, self._source)
        self._trained.set_weights(state.weights)
        self._reset()
        for name, master in self._trained.masters.items():
            slots: dict[str, Tensor] = {}
            for slot in ("exp_avg", "exp_avg_sq"):
                if f"{slot}/{name}" in state.optimizer:
                    slots[slot] = self._trained.part(state.optimizer[f"{slot}/{name}"], master)
            if slots:
                slots["step"] = state.optimizer[f"step/{name}"].to(master.device, copy=True)
                self._optimizer.state[master] = slots
            if name in self._trained.separate and f"master/{name}" in state.optimizer:
                master.copy_(self._trained.part(state.optimizer[f"master/{name}"], master))
        self.drop_gradients()

    def own_state(self) -> dict[str, Tensor]:
        """Return the live weights, separate masters, AdamW state and gradients of this rank."""
        state = {f"weight/{name}": tensor for name, tensor in self._trained.own_weights().items()}
        for name, master in self._trained.masters.items():
            state |= {f"{slot}/{name}": tensor for slot, tensor in self._optimizer.state[master].items()}
            if master.grad is not None:
                state[f"gradient/{name}"] = master.grad
        masters = zip(sorted(self._trained.separate), self._trained.own_masters(), strict=False)
        state |= {f"master/{name}": tensor for name, tensor in masters}
        return {name: local_part(tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors back into the weights, the masters, a new AdamW and new gradients."""
        self.shelves.backload()
        self._reset()
        self.drop_gradients()
        for name, master in self._trained.masters.items():
            if f"step/{name}" in state:
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                moments = {slot: torch.empty_like(master) for slot in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[master] = {"step": step, **moments}
            if f"gradient/{name}" in state:
                master.grad = torch.empty_like(master)
        for name, live in self.own_state().items():
            live.copy_(state[name])

    def export(self, folder: Path) -> None:
        """Write the configuration and the weights with the model's own library on rank 0. Every rank must call this.

        An adapter is written beside them, and merged into the weights in the model directory.
        """
        weights = self.weights()
        if self.place.rank == 0 and self._options.adapter is not None:
            lora, tensors = self._options.adapter.lora, {name: to_numpy(tensor) for name, tensor in weights.items()}
            adapter_files.export(folder, self._source, lora, self._dtype, tensors)
            if lora.export_merged:
                self._write_configuration(folder)
        elif self.place.rank == 0:
            model: Any = self._trained.model
            # The model's own may be refused when it is written.
            model.generation_config = cast(Any, GenerationConfig)()
            model.save_pretrained(folder, state_dict={name: tensor.contiguous() for name, tensor in weights.items()})
            (folder / GENERATION_CONFIG).unlink(missing_ok=True)
            self._write_configuration(folder)

    def _write_configuration(self, folder: Path) -> None:
        """Write config.json with the policy's data type. The trained one is float32 if several ranks hold pieces."""
        config: Any = copy.deepcopy(self._trained.model.config)  # a model may read its own while it computes
        if self._options.head == "value":
            config = classifier_config(config, self._trained.shapes)
        config.dtype = self._dtype
        config.save_pretrained(folder)

    def _tensors(self, part: Part) -> list[Tensor]:
        match part:
            case "parameters":
                return self._trained.tensors()
            case "gradients":
                return [master.grad for master in self._trained.masters.values() if master.grad is not None]
            case "optimizer":
                slots = [value for slots in self._optimizer.state.values() for value in slots.values()]
                return [slot for slot in slots if isinstance(slot, Tensor)] + self._trained.own_masters()
