"""Low-rank adapters (LoRA, arXiv 2106.09685) beside linear layers whose weights do not change.

An adapted layer computes y = W x + b + s B A x with the two parameters `lora_A` [rank, in] and `lora_B` [out, rank] of
the linear module itself, and s = alpha / rank. The module keeps its place and its weight, and both keep their names.
There is no wrapper: code that reads only `weight` would compute the base model, so it must ask `is_adapted` first.

The tensors of a version are the adapters, with B already multiplied by s in the model's dtype. Engines compute with
exactly these bits, and so do the trainer's passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.model import adapter_files
from shared.model.linear import OneDnnLinear, linear, product, suits
from shared.model.load import blocks_of, named_weights
from shared.rpc.errors import BadInput
from shared.tensors_torch import to_torch
from shared.topology.lora import ALL_LINEAR, WITH_HEAD, AdapterPlan, Lora, is_called

A, B = adapter_files.A, adapter_files.B
"""Names of an adapter's parameters within its module."""


class AdaptedLinear(OneDnnLinear):
    """A linear layer with an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    """The factor of B; 1 if `lora_B` holds the product."""
    applies: bool
    """Whether the adapter is on."""
    merges: bool = False
    """Whether it is merged into the weight, which loses what the weight's dtype rounds away."""

    def forward(self, input: Tensor) -> Tensor:
        if self.merges:
            return linear(input, self.merged(), self.bias)
        if not self.applies:
            return linear(input, self.weight, self.bias)
        tensors = input, self.weight, self.bias, self.lora_A, self.scaled_B()
        if torch.is_grad_enabled():
            return cast(Tensor, cast(Any, _Adapted).apply(*tensors))
        return _adapted(*tensors)[0]

    def scaled_B(self) -> Tensor:
        """Return B multiplied by the scale, in the parameter's dtype: what engines hold."""
        return self.lora_B if self.scale == 1.0 else self.lora_B * self.scale

    def merged(self) -> Tensor:
        """Return the weight of an export (`adapter_files.merge`)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return (self.weight.to(wide) + self.scaled_B().to(wide) @ self.lora_A.to(wide)).to(self.weight.dtype)


def _adapted(rows: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [..., out] of an adapted layer and, between A and B, [..., rank], without gradients."""
    out, inner = linear(rows, weight, bias), linear(rows, a)
    # Not in place: selective recomputation keeps the first summand.
    return torch.addmm(out.flatten(0, -2), inner.flatten(0, -2), b.t()).view_as(out), inner


class _Adapted(torch.autograd.Function):
    """An adapted layer whose weight and bias are constant. Sums are part of the products, because on a CPU a pass over
    the outputs costs about as much as a product with A or B."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        out, inner = _adapted(rows, weight, bias, a, b)
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.with_onednn = suits(rows, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor]:
        rows, weight, a, b, inner = ctx.saved_tensors
        grad = grad.contiguous()
        grad_NO = grad.flatten(0, -2)
        grad_NR = grad_NO @ b
        grad_a, grad_b = grad_NR.t() @ rows.flatten(0, -2), grad_NO.t() @ inner.flatten(0, -2)
        if not ctx.needs_input_grad[0]:
            return None, None, None, grad_a, grad_b
        grad_rows = product(grad, weight.t()) if ctx.with_onednn else grad @ weight
        grad_rows.view(-1, grad_rows.shape[-1]).addmm_(grad_NR, a)
        return grad_rows, None, None, grad_a, grad_b


@dataclass(frozen=True)
class AdapterStart:
    """The adapter with which a run begins. `seed` is the run's."""

    lora: Lora
    seed: int


@dataclass(frozen=True)
class Targets:
    """The linear layers of a model by name: `chosen` get an adapter, and `left` do not, each with the reason."""

    chosen: Mapping[str, nn.Linear]
    left: Mapping[str, str]


def targets_of(model: nn.Module, lora: Lora) -> Targets:
    """Return the layers of `model` that get an adapter. Raises BadInput for a name that is no linear layer, and if no
    layer is left."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inside = {id(module) for block in blocks_of(model) for module in block.modules()}
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    if lora.target_modules == WITH_HEAD:
        inside.add(id(cast(Any, model).get_output_embeddings()))
    names = () if lora.target_modules in (ALL_LINEAR, WITH_HEAD) else lora.target_modules
    for name, module in layers.items():
        if any(is_called(name, excluded) for excluded in lora.exclude_modules):
            left[name] = "named by exclude_modules"
        elif names and not any(is_called(name, wanted) for wanted in names):
            left[name] = "not named by target_modules"
        elif not names and id(module) not in inside:
            left[name] = "outside the decoder's layers; name it to adapt it"
        elif type(module) not in (nn.Linear, OneDnnLinear):
            left[name] = f"a {type(module).__name__}, which is no plain linear layer"
        else:
            chosen[name] = module
    for key, given in (("target_modules", names), ("exclude_modules", lora.exclude_modules)):
        for wanted in given:
            if not any(is_called(name, wanted) for name in layers):
                there = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                raise BadInput(f"policy.lora.{key}: {wanted} is no linear layer of this model; it has {there}")
    if not chosen:
        why = next(iter(left.values()), "the model has none")
        raise BadInput(f"policy.lora: no linear layer gets an adapter ({why}); correct target_modules")
    return Targets(chosen, left)


def planned(model: nn.Module, lora: Lora) -> AdapterPlan:
    """Return what the adapters of `model` would consist of, or why it can have none."""
    try:
        targets = targets_of(model, lora)
    except BadInput as error:
        return AdapterPlan(refused=str(error))
    layers = Counter(name.rpartition(".")[2] for name in targets.chosen)
    sizes = (layer.in_features + layer.out_features for layer in targets.chosen.values())
    return AdapterPlan(layers=dict(layers), left=dict(targets.left), parameters=lora.rank * sum(sizes))


def adapt(model: nn.Module, start: AdapterStart, *, scaled: bool = False) -> nn.Module:
    """Give `model` the adapters with which a run begins, freeze its other parameters, and return it.

    With `scaled`, B holds the product with the scale, as engines need it. A model on the meta device gets adapters
    there. Raises BadInput like `targets_of` and `first_adapters`.
    """
    chosen = targets_of(model, start.lora).chosen
    model.requires_grad_(False)
    for module in chosen.values():
        module.__class__ = AdaptedLinear
        adapted = cast(AdaptedLinear, module)
        adapted.applies = True
        for part in (A, B):
            setattr(adapted, part, nn.Parameter(module.weight.new_empty(0)))
    begin_again(model, start, scaled=scaled)
    return model


@torch.no_grad()
def begin_again(model: nn.Module, start: AdapterStart, *, scaled: bool) -> None:
    """Replace the adapters of `model`, which is whole, by those with which the run begins."""
    layers = adapters_of(model)
    tensors = first_adapters(layers, start, scaled=scaled)
    for name, layer in layers.items():
        layer.scale = 1.0 if scaled else start.lora.scale
        layer.lora_A.data, layer.lora_B.data = (tensors[f"{name}.{part}"].to(layer.weight.device) for part in (A, B))


def first_adapters(layers: Mapping[str, nn.Linear], start: AdapterStart, *, scaled: bool = False) -> dict[str, Tensor]:
    """Return the tensors of the adapters of `layers` with which a run begins, by name, in the dtype of their layers.

    With `scaled`, B is multiplied by the scale in that dtype, as engines hold it.

    They are read from `adapter_path`. Those of a new adapter depend only on the run's seed and the layer's name: A is
    uniform within 1 / sqrt(in), as in peft (He et al., arXiv 1502.01852, with a = sqrt(5)), and B is zero.

    Raises the errors of `adapter_files.read`.
    """
    tensors: dict[str, Tensor] = {}
    if start.lora.adapter_path is not None:
        shapes = {name: _shape(layer) for name, layer in layers.items()}
        read = adapter_files.read(Path(start.lora.adapter_path), start.lora, shapes)
        dtypes = {f"{name}.{part}": layer.weight.dtype for name, layer in layers.items() for part in (A, B)}
        tensors = {name: to_torch(read[name]).to(dtype) for name, dtype in dtypes.items()}
    else:
        for name, layer in layers.items():
            random = np.random.Generator(np.random.Philox(xxhash.xxh3_64_intdigest(f"{start.seed}:{name}".encode())))
            bound, shape = 1.0 / math.sqrt(layer.in_features), (start.lora.rank, layer.in_features)
            a = torch.from_numpy(random.uniform(-bound, bound, shape).astype(np.float32))
            tensors[f"{name}.{A}"] = a.to(layer.weight.dtype)
            tensors[f"{name}.{B}"] = torch.zeros(layer.out_features, start.lora.rank, dtype=layer.weight.dtype)
    if scaled:
        tensors |= {name: tensor * start.lora.scale for name, tensor in tensors.items() if name.endswith(f".{B}")}
    return tensors


def adapters_of(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the adapted layers by name; none if the whole model is trained."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def check_merge(model: nn.Module, source: Path) -> None:
    """Raise BadInput unless the adapters of `model` can be merged into the files of its base in the folder
    `source`."""
    layers = adapters_of(model)
    tied = cast(Any, model).get_expanded_tied_weights_keys(all_submodels=True)
    for name in layers:
        if f"{name}.weight" in (*tied, *tied.values()):
            raise BadInput(
                f"policy.lora: an adapter cannot be merged into {name}, which shares its weight with another layer; "
                "set policy.lora.export_merged: false"
            )
    adapter_files.check_merge(source, {name: _shape(layer) for name, layer in layers.items()})


def _shape(layer: nn.Linear) -> tuple[int, int]:
    return layer.out_features, layer.in_features


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has adapters."""
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a version of `model` consists of, by name: its adapters, or all its weights.

    Like `named_weights`, they are detached and not copied. B is as the model has it, which may be without the scale.
    """
    weights = named_weights(model)
    return {name: weights[name] for name in weights if is_adapter(name)} if is_adapted(model) else weights


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of `model` that are not part of an adapter, by name."""
    return {name: tensor for name, tensor in named_weights(model).items() if not is_adapter(name)}


def scales_of(model: nn.Module) -> dict[str, float]:
    """Return the factor by which each B must be multiplied for an engine, by the tensor's name, unless it is 1."""
    return {f"{name}.{B}": layer.scale for name, layer in adapters_of(model).items() if layer.scale != 1.0}


def adapters_off(model: nn.Module) -> AbstractContextManager[None]:
    """Compute the base model within the block."""
    return _switched(model, "applies", to=False)


def adapters_merged(model: nn.Module) -> AbstractContextManager[None]:
    """Compute the model that an export with merged weights holds within the block. No weight changes."""
    return _switched(model, "merges", to=True)


@contextmanager
def _switched(model: nn.Module, switch: Literal["applies", "merges"], *, to: bool) -> Iterator[None]:
    layers = adapters_of(model).values()
    for layer in layers:
        setattr(layer, switch, to)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, switch, not to)
