"""Replaces the CUDA kernels of torch, for the whole process and all of its threads.

Each ATen operation that has a CUDA kernel is computed by the CPU's kernel on the same bytes, because an emulated GPU's
memory is host memory. What torch does around kernels stays torch's own code for CUDA: dispatch, autograd, the caching
allocators, streams, events, page-locked memory, CUDA IPC and the choice of an attention kernel. Operations for which
the CPU has no kernel, or another one than CUDA, are in `special`. All others raise with the name of the kernel.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
NATIVE = {
    *("empty.memory_format", "empty_strided", "as_strided", "view", "view.dtype", "view_as_real", "view_as_complex"),
    *("resize_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold"),
    *("_reshape_alias", "squeeze", "alias", "_efficientzerotensor", "_nested_view_from_buffer", "is_set_to"),
    *("_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "_fused_sdp_choice"),
    *("_has_same_storage_numel",),
}
"""Operations that launch no kernel: metadata, allocation, transfers."""
ACCEPTS_HOST = {"index.Tensor", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index.Tensor"}
"""Operations that accept tensors of the host beside those of a device, as do the prefixes below."""
ACCEPTS_HOST_PREFIXES = ("_foreach", "_fused_adam", "_amp")
WAITS = {
    *("nonzero", "masked_select", "equal", "repeat_interleave.Tensor"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations whose CUDA kernels make the host wait, because the result or its size must be on the host."""
WAITS_FOR_MASKS = {"index.Tensor", "index_put_", "_index_put_impl_"}
ELSEWHERE = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")

launched: Counter[str] = Counter()
"""Number of kernels that a GPU would have been given, by operation. Transfers are not among them."""
_library = torch.library.Library("aten", "IMPL")
_random = threading.RLock()
_finish: Any = ctypes.CDLL(None).emulated_gpu_finish
_finish.argtypes = [ctypes.c_void_p]


def host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the bytes of a device's tensor. The caller keeps the device's tensor alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor in the memory of `device`."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if made.numel():
        host(made).copy_(tensor)
    return made


def in_order(device: torch.device) -> None:
    """Finish the work that was issued on the current stream of `device`, as a kernel would."""
    _finish(torch._C._cuda_getCurrentRawStream(device.index))


class Lowered:
    """The arguments of a call for the CPU, and the way back to the tensors of the device."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.on_host = False
        """Whether a tensor with elements to index was on the host."""
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def down(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == "cuda":
                self.devices.append(value.device)
                return self.stands_for(value, host(value))
            self.on_host |= value.dim() > 0
            return value
        return [self.down(item) for item in value] if isinstance(value, (list, tuple)) else value

    def stands_for(self, original: Tensor, alias: Tensor) -> Tensor:
        self._originals[id(alias)] = (original, alias)
        return alias

    def up(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            pair = self._originals.get(id(value))
            if pair is not None:
                return pair[0]
            return on_device(value, self.devices[0]) if value.device.type == "cpu" else value
        return type(value)(self.up(item) for item in value) if isinstance(value, (list, tuple)) else value


class StandIn:
    """Computes one operation with the CPU's kernel."""

    def __init__(self, name: str, operation: Any) -> None:
        schema = operation._schema
        self._name = name
        self._operation = operation
        self._packet = getattr(torch.ops.aten, name.partition(".")[0])
        self._tensors = [i for i, item in enumerate(schema.arguments) if str(item.type) == "Tensor"]
        self._outputs = {item.name for item in schema.arguments if item.is_out}
        self._takes_generator = any(item.name == "generator" for item in schema.arguments)
        self._random = torch.Tag.nondeterministic_seeded in operation.tags
        self._accepts_host = name in ACCEPTS_HOST or name.startswith(ACCEPTS_HOST_PREFIXES)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lowered = Lowered()
        host_args = [lowered.down(value) for value in args]
        # Lists of outputs have their sizes already, and are written in place.
        outputs = {name: out for name, out in kwargs.items() if name in self._outputs and isinstance(out, Tensor)}
        host_kwargs = {name: lowered.down(value) for name, value in kwargs.items() if name not in outputs}
        for name, value in outputs.items():  # resized by the CPU's kernel, then copied
            lowered.devices.append(value.device)
            host_kwargs[name] = lowered.stands_for(value, torch.empty(0, dtype=value.dtype))
        device = self._device(lowered, host_kwargs)
        launched[self._name] += 1
        in_order(device)
        if torch._C._cuda_get_sync_debug_mode() and self._makes_host_wait(args):
            torch.cuda.current_stream(device).synchronize()
        # A number that torch wrapped as a tensor arrives as a number, which only another overload accepts.
        wrapped = any(i < len(args) and not isinstance(args[i], Tensor) for i in self._tensors)
        call = self._packet if wrapped else self._operation
        result = self._draw(call, host_args, host_kwargs, device) if self._random else call(*host_args, **host_kwargs)
        for name, value in outputs.items():
            value.resize_(host_kwargs[name].size())
            host(value).copy_(host_kwargs[name])
        return lowered.up(result)

    def _device(self, lowered: Lowered, host_kwargs: dict[str, Any]) -> torch.device:
        host_kwargs.pop("pin_memory", None)
        wanted = host_kwargs.get("device")
        if wanted is not None:
            host_kwargs["device"] = CPU
            wanted = torch.device(wanted)
            index = torch.cuda.current_device() if wanted.index is None else wanted.index
            lowered.devices.append(torch.device("cuda", index))
        if not lowered.devices:
            raise RuntimeError(f"emulated GPU: a call of {self._name} names no device")
        kinds = {str(device) for device in lowered.devices} | ({"cpu"} if lowered.on_host else set())
        if len(kinds) > 1 and not self._accepts_host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self._name} got {', '.join(sorted(kinds))}"
            )
        return lowered.devices[0]

    def _makes_host_wait(self, args: tuple[Any, ...]) -> bool:
        if self._name in WAITS_FOR_MASKS:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return self._name in WAITS

    def _draw(self, call: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Call with a CPU generator that continues from the CUDA generator, which moves on as after a kernel."""
        own = kwargs.get("generator")
        own = torch.cuda.default_generators[device.index] if own is None else own
        with _random:
            offset = own.get_offset()
            own.set_offset(offset + 4)
            generator = torch.Generator().manual_seed((own.initial_seed() * 1_000_003 + offset) % (1 << 63))
            if self._takes_generator:
                return call(*args, **kwargs | {"generator": generator})
            before = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
            try:
                return call(*args, **kwargs)
            finally:
                torch.set_rng_state(before)


def one_kind(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what the fused optimizers of CUDA refuse and those of the CPU accept."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        for tensors in zip(*args[:4], strict=True):
            if len({(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}) > 1:
                raise RuntimeError(
                    f"{name}: params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"
                )
        return operation(*args, **kwargs)

    return checked


class Copy:
    """A transfer is torch's own, by cudaMemcpyAsync. A copy on devices that needs a kernel is computed here."""

    def __init__(self) -> None:
        self._native = torch.library.get_kernel("aten::copy_", "CUDA")

    def __call__(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        alike = target.dtype == source.dtype and target.size() == source.size()
        if target.is_cuda and source.is_cuda:
            launched["copy_"] += 1
            if not (alike and target.is_contiguous() and source.is_contiguous()):
                in_order(source.device)
                in_order(target.device)
                host(target).copy_(host(source))
                return target
        elif not non_blocking:  # the host waits for the stream, here without Python's lock
            in_order(target.device if target.is_cuda else source.device)
        keys = torch._C._dispatch_keys(target if target.is_cuda else source)
        cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        self._native.call_boxed(keys & cuda, target, source, non_blocking)
        return target


def install(special: dict[str, Callable[..., Any]]) -> None:
    """Replace the kernels; those in `special` by its functions."""
    special = special | {"copy_": Copy()}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = full_name.partition("::")
        if namespace != "aten":
            continue
        if name in special:
            _library.impl(name, counted(name, special[name]), "CUDA", allow_override=True)
            continue
        replaceable = has_kernel(full_name, "CUDA") and any(has_kernel(full_name, key) for key in ELSEWHERE)
        if name in NATIVE or not replaceable:
            continue
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if operation.is_view:
            continue
        kernel: Callable[..., Any] = StandIn(name, operation)
        if name.startswith("_fused_adam"):
            kernel = one_kind(name, kernel)
        _library.impl(name, kernel, "CUDA", allow_override=True)


def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that counts its calls, unless it does so itself."""
    if isinstance(kernel, Copy):
        return kernel

    def call(*args: Any, **kwargs: Any) -> Any:
        launched[name] += 1
        return kernel(*args, **kwargs)

    return call
