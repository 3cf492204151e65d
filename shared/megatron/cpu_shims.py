"""Provides what megatron-core 0.16.1 needs to run on gloo without CUDA. It does nothing if CUDA is available.

megatron-core names the device in three ways: `torch.cuda.current_device()`, the literal `device="cuda"`, and
comparisons of `.type()` with `"torch.cuda.FloatTensor"`. Inside `megatron_device`, the first returns `"cpu"`, the
second is treated as `"cpu"`, and the third gets the answer that it expects. Outside, nothing is changed.
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
    torch.float64: "torch.cuda.FloatTensor",  # tells the distributed optimizer that no float32 master is needed
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}

F = TypeVar("F", bound=Callable[..., Any])


class _CpuForCuda(TorchFunctionMode):
    """Makes torch functions that are asked for CUDA return CPU tensors."""

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


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: without a device there is nothing to wait for."""


@contextmanager
def megatron_device() -> Iterator[None]:
    """Run megatron-core inside this context, on the compute thread only, because the context patches `torch.cuda`."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch.object(torch.cuda, "current_device", _cpu),
        patch.object(torch.cuda, "synchronize", _do_nothing),
        patch.object(torch.cuda, "empty_cache", _do_nothing),
        _CpuForCuda(),
    ):
        yield


def in_megatron(method: F) -> F:
    """Wrap `method` in `megatron_device`."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with megatron_device():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]
