"""Everything that megatron-core 0.16.1 needs to run on gloo without CUDA. Does nothing where CUDA is there.

megatron-core names the device in three ways: `torch.cuda.current_device()`, the literal `device="cuda"`, and
comparisons of `.type()` with `"torch.cuda.FloatTensor"`. Inside `megatron_device` the first answers `"cpu"`, the
second means it, and the third gets the answer it looks for; outside nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.FloatTensor",  # the distributed optimizer's word for "needs no float32 master"
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}

F = TypeVar("F", bound=Callable[..., Any])


class _CpuForCuda(TorchFunctionMode):
    """Torch functions that are asked for CUDA give CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not given:
            return _TYPES.get(args[0].dtype) or func(*args)
        device = given.get("device")
        if device is not None and torch.device(device).type == "cuda":
            given = {**given, "device": "cpu"}
        return func(*args, **given)


def _cpu() -> str:
    return "cpu"


def _nothing(*_: Any, **__: Any) -> None:
    """What there is to wait for without a device."""


@contextmanager
def megatron_device() -> Iterator[None]:
    """Run megatron-core inside this. Compute thread only: `torch.cuda` is another one while it lasts."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch.object(torch.cuda, "current_device", _cpu),
        patch.object(torch.cuda, "synchronize", _nothing),
        patch.object(torch.cuda, "empty_cache", _nothing),
        _CpuForCuda(),
    ):
        yield


def in_megatron(method: F) -> F:
    """`method` inside `megatron_device`."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with megatron_device():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]
