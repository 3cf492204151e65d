"""Implements the trainer's side of the start-up drill: a copy of the model whose weights carry enough noise to show in
the log-probs, and the answers expected from engines. The copy is separate from the model in training and is not kept.

The amount of noise follows from one backward pass over the perturbed copy. To first order, a weight that kept its old
values changes the sum of c_t * logprob_t by <gradient, noise>, with random signs c_t, and hence a log-prob by
<gradient, noise> / sqrt(T) (root mean square). If that is less than `SEEN` tolerances, the noise is increased by a
factor of up to `MAX_FACTOR`, so that an omitted weight shows in the canary and not only in the digests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from proto.tensors import Array
from services.policy_trainer.worker.backend import Sequences
from shared.model.adapter import adapters_of, is_adapted, trained_weights
from shared.model.logprobs import token_logprobs
from shared.rpc.errors import BadInput
from shared.tensors_torch import to_numpy, to_torch
from shared.weights.digests import as_int, digest_whole
from shared.weights.drill import noise, noise_factors, noise_scale, perturb

SEEN = 16.0
"""Number of tolerances by which an omitted weight should change a log-prob."""
MAX_FACTOR = 16.0
"""Maximum factor of the noise, which is then at most 0.8 of a weight's mean."""
BACKWARD_LIMIT_S = 30.0
"""Maximum time, in seconds, for the backward pass. Its duration is estimated as that of three forward passes."""


@dataclass(frozen=True)
class Drill:
    """A drill. `factors` of the noise and `digests` (empty unless requested) are in the order of the sorted names.

    `logprobs` of the perturbed weights and `true_logprobs` of the model directory's weights are float32 [T - 1].
    """

    factors: list[float]
    logprobs: Array
    true_logprobs: Array
    digests: list[int]


def make_drill(
    fresh: Callable[[], nn.Module],
    text_of: Callable[[nn.Module], Sequences],
    seed: int,
    *,
    tolerance: float,
    with_digests: bool,
) -> Drill:
    """Return the drill of a model. `tolerance` is the narrowest tolerance by which its log-probs may be judged.

    `fresh()` returns the model with the weights with which an engine starts, and is called up to three times. The drill
    changes the tensors of a version (`trained_weights`), which must be as engines hold them. Raises BadInput if the
    model does not call a layer that has an adapter.
    """
    model = fresh()
    text = text_of(model)
    began = time.perf_counter()
    with _calls_every_adapter(model):
        true_logprobs = _logprobs(model, text)
    expected_s = 3 * (time.perf_counter() - began)
    factors = noise_factors(trained_weights(model), [])
    if expected_s <= BACKWARD_LIMIT_S:
        scales = _perturb(model, seed, factors)
        for name, effect in _effects(model, text, seed, scales).items():
            factors[name] = min(max(SEEN * tolerance / max(effect, 1e-30), 1.0), MAX_FACTOR)
        del model
        model = fresh()
    else:
        structlog.get_logger("drill").warning(
            "the drill's noise is not scaled: its backward pass would take too long",
            expected_s=round(expected_s),
            limit_s=BACKWARD_LIMIT_S,
        )
    _perturb(model, seed, factors)
    logprobs = _logprobs(model, text)
    if not np.isfinite(logprobs).all():  # float16 overflows above 65504
        factors, model = noise_factors(factors, []), fresh()
        _perturb(model, seed, factors)
        logprobs = _logprobs(model, text)
    weights = trained_weights(model)
    return Drill(
        factors=[factors[name] for name in sorted(factors)] if max(factors.values(), default=1.0) > 1 else [],
        logprobs=logprobs,
        true_logprobs=true_logprobs,
        digests=[as_int(digest_whole(weights[name])) for name in sorted(weights)] if with_digests else [],
    )


@torch.no_grad()
def _perturb(model: nn.Module, seed: int, factors: dict[str, float]) -> dict[str, float]:
    """Add noise to the weights in place and return its standard deviation for each weight."""
    scales: dict[str, float] = {}
    for name, tensor in trained_weights(model).items():
        values = to_numpy(tensor)
        if tensor.is_floating_point() and tensor.numel():
            scales[name] = noise_scale(values) * factors[name]
        tensor.copy_(to_torch(perturb(name, values, seed, factors[name])))
    return scales


def _effects(model: nn.Module, text: Sequences, seed: int, scales: dict[str, float]) -> dict[str, float]:
    """Return the first-order effect of each weight's noise on a log-prob. Each gradient is freed after its use."""
    effects: dict[str, float] = {}
    tokens = int(text.loss_mask.sum())

    def used(name: str, weight: nn.Parameter) -> None:
        gradient, weight.grad = cast(Tensor, weight.grad), None
        along = float(gradient.reshape(-1).float() @ torch.from_numpy(noise(name, weight.numel(), seed)))
        effects[name] = abs(along) * scales[name] / math.sqrt(tokens)

    names = {tensor.data_ptr(): name for name, tensor in trained_weights(model).items()}
    hooks: list[Any] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        name = names[parameter.data_ptr()]
        hooks.append(
            cast(Any, parameter).register_post_accumulate_grad_hook(lambda weight, name=name: used(name, weight))
        )
    with torch.enable_grad():
        logprobs, _ = token_logprobs(model, text.token_ids, text.lengths, text.loss_mask, 1.0, len(text.token_ids))
        signs = np.random.Generator(np.random.Philox(seed)).choice(np.array([-1, 1], np.float32), len(logprobs))
        (logprobs * torch.from_numpy(signs)).sum().backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    if is_adapted(model):  # other parameters may have no part in the log-probs
        _refuse_without_effect(name.rpartition(".")[0] for name in names.values() if name not in effects)
    return effects


@contextmanager
def _calls_every_adapter(model: nn.Module) -> Iterator[None]:
    """Raise BadInput if the model does not call each layer with an adapter within the block. It may read the layer's
    weight instead, which is that of the base."""
    layers, called = adapters_of(model), set[str]()
    hooks = [layer.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, layer in layers.items()]
    yield
    for hook in hooks:
        hook.remove()
    _refuse_without_effect(name for name in layers if name not in called)


def _refuse_without_effect(layers: Iterable[str]) -> None:
    """Raise BadInput for the first of `layers`."""
    for name in layers:
        raise BadInput(
            f"policy.lora.target_modules: the model does not call {name} as a layer, so its adapter has no effect; "
            "add it to exclude_modules"
        )


@torch.no_grad()
def _logprobs(model: nn.Module, text: Sequences) -> Array:
    logprobs, _ = token_logprobs(model, text.token_ids, text.lengths, text.loss_mask, 1.0, len(text.token_ids))
    values: Array = to_numpy(logprobs)[1:].astype(np.float32)
    return values
