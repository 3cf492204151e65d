"""Holds the model, its gradient buffers and megatron-core's distributed optimizer, with their state under Hugging Face
names.

Gradients are unscaled sums over data and context ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn

from proto.messages import AdamW
from services.policy_trainer.worker.backend import set_numbers
from services.policy_trainer.worker.spare_memory import SpareMemory
from services.policy_trainer.worker.training_state import TrainingState
from shared.megatron.converter import Weight
from shared.megatron.pieces import Pieces

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trained:
    """A model in training. All methods that move weights or state are collectives."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._converter = pieces.converter
        self._groups = pieces.groups
        model, config = pieces.model, pieces.model.config
        self._low = bool(config.bf16)
        self._grad_dtype = torch.float32 if self._low else config.params_dtype
        self._params: dict[str, nn.Parameter] = dict(model.named_parameters())
        for weight in pieces.weights:
            # megatron-core sets this attribute during initialisation. Without it, a norm would omit the shards of other
            # ranks.
            cast(Any, self._params[weight.name]).tensor_model_parallel = weight.rule != "whole"
        self._spare = SpareMemory(next(iter(self._params.values())).device)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=self._low,
                overlap_grad_reduce=False,  # gradients from several calls add up; `reduce` sums over ranks once
            ),
            model,
        )
        self.reset()

    def reset(self) -> None:
        """Create fresh optimizer state for the current weights."""
        model, groups = self.model, self._groups
        self._optimizers = {False: self._optimizer(model.buffers, groups.dp_cp, shared=False)}
        if model.expert_parallel_buffers:
            self._optimizers[True] = self._optimizer(model.expert_parallel_buffers, groups.expert_dp, shared=True)
        self.optimizer = ChainedOptimizer(list(self._optimizers.values()))

    def _optimizer(self, buffers: list[Any], data_parallel: dist.ProcessGroup, *, shared: bool) -> DistributedOptimizer:
        """Return an optimizer of the parameters in `buffers`, which are those of `shared` experts or all others."""
        params = [param for param in self._params.values() if param.requires_grad and _is_shared(param) == shared]
        # Every parameter decays, as in the torch backend. Megatron's own groups exclude norms and biases.
        group = {"params": params, "is_expert_parallel": shared, "wd_mult": 1.0, "lr_mult": 1.0}
        inner = torch.optim.AdamW([group], fused=True)  # `update` sets its numbers
        optimizer = DistributedOptimizer(
            inner,
            OptimizerConfig(
                bf16=self._low,
                use_distributed_optimizer=True,
                params_dtype=params[0].dtype,
            ),
            None,
            None,
            model_chunks=[self.model],
            per_model_buffers={0: buffers},
            data_parallel_group=data_parallel,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        optimizer.tp_group = self._groups.tp
        optimizer.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
        return optimizer

    # ---- updates

    def reduce(self) -> None:
        """Sum gradients over data and context ranks (each rank keeps its part) and over copies of the same
        parameter."""
        finalize_model_grads([self.model], None)

    def norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank. Call it after `reduce`."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def update(self, grad_norm: float, numbers: AdamW) -> None:
        """Clip by `grad_norm` and step. Call it after `norm`."""
        optimizer = self.optimizer
        set_numbers(optimizer.param_groups, numbers)
        pieces = [piece for each in self._optimizers.values() for piece in each.get_parameters()]
        clip_grad_by_total_norm_fp32(pieces, numbers.clip_norm or math.inf, grad_norm)
        optimizer.step_with_ready_grads()
        self._spare.updated()

    def drop_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    # ---- from the layout to full tensors

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return the full weights on rank 0 and {} elsewhere. They may share the model's memory.

        They are on rank 0's device if they have room there beside the training, otherwise in host memory.
        """
        dtype = next(iter(self._params.values())).dtype
        place = self._spare.place_for(self._converter.elements * dtype.itemsize)
        return self._whole(lambda name: self._params[name].detach(), dtype, place)

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return full gradients on rank 0 and {} elsewhere. Call it after `reduce`."""

        def read(name: str) -> Tensor:
            part = self._part(self._params[name])
            grad: Tensor = cast(Any, self._params[name]).main_grad
            return self._filled(name, None if part is None else grad.view(-1)[part], self._grad_dtype)

        return self._whole(read, self._grad_dtype)

    @torch.no_grad()
    def state(self) -> TrainingState:
        """Return a copy of the state on rank 0 and an empty state elsewhere."""
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights().items()}
        mains = self._mains()
        optimizer: dict[str, Tensor] = {}

        def add(slot: str, of: Callable[[str, Tensor], Tensor]) -> None:
            def read(name: str) -> Tensor:
                main = mains.get(self._params[name])
                return self._filled(name, None if main is None else of(name, main), torch.float32)

            whole = self._whole(read, torch.float32)
            optimizer.update({f"{slot}/{name}": tensor for name, tensor in whole.items()})

        steps = self._groups.most(max((self._steps(param, main) for param, main in mains.items()), default=0.0))
        if steps:
            for slot in _MOMENTS:
                add(slot, lambda name, main, slot=slot: self._inner(self._params[name]).state[main][slot])  # type: ignore[misc]
            if weights:
                optimizer |= {f"step/{name}": torch.tensor(steps) for name in weights}
        if self._low:
            add("master", lambda name, main: main)
        return TrainingState(weights, optimizer)

    def _inner(self, param: nn.Parameter) -> Any:
        """Return torch's optimizer of `param`, which has the state of the piece that this rank trains."""
        return self._optimizers[_is_shared(param)].optimizer

    def _steps(self, param: nn.Parameter, main: Tensor) -> float:
        """Return the number of updates. torch's optimizer counts per parameter, Transformer Engine's per group."""
        inner = self._inner(param)
        return float(inner.state[main].get("step", inner.param_groups[0].get("step", 0)) if main in inner.state else 0)

    def _whole(
        self, read: Callable[[str], Tensor], dtype: torch.dtype, to: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Return Hugging Face tensors on rank 0, on device `to` (default: the CPU), assembled from `read(name)` for
        each parameter of each stage."""
        tensors: dict[str, Tensor] = {}
        place = self._groups.place
        first = place.tp_rank == place.cp_rank == place.dp_rank == 0
        device = next(iter(self._params.values())).device
        for weight in self._converter.weights:
            parts: list[Tensor] = []
            if place.pp_rank == weight.stage:
                group = self._groups.ep if weight.rule == "experts" else self._groups.tp
                parts = self._converter.join(weight, self._groups.gather(read(weight.name), group))
            elif place.rank == 0:
                parts = [torch.empty(shape, dtype=dtype, device=device) for shape in weight.shapes]
            if first and (arrived := self._groups.to_rank_0(parts, weight.stage)) is not None:
                tensors |= {name: tensor.to(to or "cpu") for name, tensor in zip(weight.parts, arrived, strict=True)}
        return tensors

    def _filled(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return parameter `name`, merged from the pieces (`part`) of the data-parallel ranks. Some ranks may have no
        piece."""
        param = self._params[name]
        flat = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        where = self._part(param)
        if part is not None and where is not None:
            flat[where] = part.detach()
        self._groups.merge(flat, self._groups.expert_dp if _is_shared(param) else self._groups.dp_cp)
        return flat.view(param.shape)

    def _part(self, param: nn.Parameter) -> slice | None:
        """Return the range of elements of `param` that this data-parallel rank trains, or None if it trains none."""
        optimizer = self._optimizers[_is_shared(param)]
        if param not in optimizer.model_param_gbuf_map:
            return None
        elements = optimizer._get_model_param_range_map(param)["param"]
        return slice(elements.start, elements.end)

    def _mains(self) -> dict[nn.Parameter, Tensor]:
        """Return the float32 piece of each parameter that the optimizer trains on this rank."""
        pairs = [
            pair
            for optimizer in self._optimizers.values()
            for pair in (
                *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
                *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
            )
        ]
        return {param: main for params, mains in pairs for param, main in zip(params, mains, strict=True)}

    # ---- from full tensors to the layout

    @torch.no_grad()
    def set_weights(self, weights: Callable[[str], Tensor]) -> None:
        """Load the full tensors that `weights` returns by Hugging Face name, update the masters and drop the
        moments."""
        self._pieces.copy_in(weights)
        self.reset()

    @torch.no_grad()
    def set_optimizer(self, slots: dict[str, Tensor]) -> None:
        """Load `TrainingState.optimizer`. Call it after `set_weights`."""
        mains = self._mains()
        for weight in self._pieces.weights:
            if self._params[weight.name] not in mains:
                continue
            param = self._params[weight.name]
            main, where = mains[param], self._part(param)

            def piece(slot: str, weight: Weight = weight, where: slice | None = where) -> Tensor | None:
                parts = [slots.get(f"{slot}/{name}") for name in weight.parts]
                given = [part for part in parts if part is not None]
                if len(given) < len(parts):
                    return None
                return self._pieces.mine(weight, given).to(torch.float32).reshape(-1)[where].clone()

            master, moments = piece("master"), {slot: piece(slot) for slot in _MOMENTS}
            if self._low and master is not None:
                main.copy_(master)
            step = slots.get(f"step/{weight.parts[0]}")
            if step is not None and all(moment is not None for moment in moments.values()):
                on_device = {slot: moment.to(main.device) for slot, moment in moments.items() if moment is not None}
                self._inner(param).state[main] = {"step": step.to(main.device, torch.float32, copy=True), **on_device}

    # ---- this rank's part

    def own_state(self) -> dict[str, Tensor]:
        """Return the live tensors of this rank by name: weights, separate masters, moments and update counts."""
        state = {f"weight/{name}": param.detach() for name, param in self._params.items()}
        mains = self._mains()
        for name, param in self._params.items():
            main = mains.get(param)
            if main is None:
                continue
            if self._low:
                state[f"master/{name}"] = main
            state |= {f"{slot}/{name}": tensor for slot, tensor in self._inner(param).state.get(main, {}).items()}
        return state

    @torch.no_grad()
    def set_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `own_state` returned in the same layout."""
        self.reset()
        mains = self._mains()
        for name, param in self._params.items():
            if f"step/{name}" in state:
                main = mains[param]
                moments = {slot: torch.zeros_like(main) for slot in _MOMENTS}
                step = state[f"step/{name}"].to(main.device, copy=True)
                self._inner(param).state[main] = {"step": step, **moments}
        for name, live in self.own_state().items():
            live.copy_(state[name])

    # ---- memory

    def tensors(self) -> list[Tensor]:
        """Return all weights and constants of this rank."""
        return [*self._params.values(), *self.model.module.buffers()]

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers in which gradients are summed."""
        return [buffer.grad_data for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers)]

    def optimizer_tensors(self) -> list[Tensor]:
        """Return moments, step counts, and masters that are separate tensors."""
        states = [slots for each in self._optimizers.values() for slots in each.optimizer.state.values()]
        found = [each for slots in states for each in slots.values() if isinstance(each, Tensor)]
        return found + (list(self._mains().values()) if self._low else [])


def _is_shared(param: nn.Parameter) -> bool:
    """Return whether `param` belongs to experts that are divided among data-parallel ranks, each of which trains its
    own."""
    return not getattr(param, "allreduce", True)
