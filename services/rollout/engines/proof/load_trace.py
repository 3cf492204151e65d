"""Follows weights into a model while its own loaders cut, fuse and pack them, and digests the result.

It observes where weights go and assumes nothing about any model. It does not import vLLM.

A `LoadTrace` watches torch operations during a load. It keeps a map of memory that shows which addresses hold which
part of which weight. A copy carries the parts along, and newly allocated memory holds no parts. An operation may pack a
weight for a CPU, after which `.weight` is empty. The memory that it packs is therefore digested at that moment, and the
digests are recorded under the handle that the operation returns. After the load, `proof` digests every parameter in
place, and adds the digests for the handles that the model's layers now hold.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared.weights.digests import as_int, digest, matrix_shape

_PACKING = frozenset(
    ["_C::create_onednn_mm_handler", "_C::convert_weight_packed", "zentorch::zentorch_weight_prepack_for_linear"]
)
"""vLLM operations that convert their first argument to another layout for CPU matrix products. They are composite
operations, which are visible only to a function mode."""
_PACKING_INTO = frozenset(["_C::prepack_moe_weight"])
"""vLLM operations that write their first argument, in another layout, into their second."""
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""Parameters that hold all experts of a layer: vLLM's names, and those of transformers. Both keep the experts in order,
and the rows of an expert's gate before those of its up projection."""
READ_BACK_FLOP = 4 * 10**9
"""Maximum number of floating-point operations for reading back one handle. This is enough for a whole layer of a 0.5B
model, and for a sample of rows spread over its embedding. Reading back all handles takes seconds."""
_READ_BACK_ROWS = 256
_COPIES = frozenset(["aten::_to_copy", "aten::clone"])
_NEW = ("aten::empty", "aten::new_empty")
_FILLS = frozenset(["aten::fill_", "aten::zero_"])


class WeightPart(NamedTuple):
    """Elements [row, row + rows) x [column, column + columns) of weight `name`, seen as a matrix (`matrix_shape`)."""

    name: str
    row: int
    column: int
    rows: int
    columns: int


Digested = tuple[WeightPart, int]
_PACKED = "packed memory"
"""The name of the part that stands for memory that a packing operation has written."""


@dataclass(frozen=True)
class Proof:
    """The contents of a model: the parts of the weights, each with the digest of its values in memory, and any
    faults."""

    parts: list[Digested]
    faults: list[str]

    def plain(self) -> dict[str, list[Any]]:
        """Return the proof as lists, numbers and strings only."""
        return {"parts": [[*part, value] for part, value in self.parts], "faults": self.faults}

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[Any]]) -> Proof:
        return cls([(WeightPart(*row[:-1]), row[-1]) for row in plain["parts"]], list(plain["faults"]))


@dataclass(frozen=True)
class _Contents:
    """Contents of addresses [begin, end): `part` by rows, in elements of `dtype`, or a constant if `part` is None."""

    begin: int
    end: int
    part: WeightPart | None
    dtype: torch.dtype


class _Memory:
    """A map of memory without overlaps."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._held: dict[int, _Contents] = {}

    def forget(self, begin: int, end: int) -> None:
        """Forget what these addresses hold. A part that overlaps them is no longer whole and is also forgotten."""
        for contents in self.within(begin, end):
            self._begins.remove(contents.begin)
            del self._held[contents.begin]
            if contents.part is None:  # the rest of a constant is still constant
                for rest in ((contents.begin, begin), (end, contents.end)):
                    if rest[0] < rest[1]:
                        self._put(replace(contents, begin=rest[0], end=rest[1]))

    def hold(self, contents: _Contents) -> None:
        self.forget(contents.begin, contents.end)
        self._put(contents)

    def within(self, begin: int, end: int) -> list[_Contents]:
        """Return all contents that overlap these addresses, in order."""
        first = bisect.bisect_right(self._begins, begin) - 1
        within = []
        for at in self._begins[max(first, 0) :]:
            if at >= end:
                break
            if self._held[at].end > begin:
                within.append(self._held[at])
        return within

    def is_packed(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is memory that a packing operation has written, and nothing else since."""
        held = [
            (each.begin, each.end) for each in self.within(*_span(tensor)) if each.part and each.part.name == _PACKED
        ]
        return held == [_span(tensor)]

    def copied(self, target: Tensor, source: Tensor) -> None:
        if _nowhere(target):
            return
        parts = [] if _nowhere(source) else list(self._parts(source))  # first, since both may share memory
        begin, end = _span(target)
        self.forget(begin, end)
        if not target.is_contiguous() or source.numel() != target.numel():
            return
        for offset, length, part, dtype in parts:
            if source.dtype != dtype or not (target.dtype == dtype or target.dtype == torch.float32):
                continue  # the copy has neither the weight's bits nor a type that holds all its values
            at, size = begin + offset * target.element_size(), length * target.element_size()
            self.hold(_Contents(at, at + size, part, dtype))

    def _parts(self, source: Tensor) -> Iterator[tuple[int, int, WeightPart | None, torch.dtype]]:
        """Yield (first element, number of elements, part, part dtype) for everything that `source` holds, in element
        order."""
        size = source.element_size()
        sources = self.within(*_span(source))
        if source.is_contiguous():
            first, last = _span(source)
            for contents in sources:
                begin, end = max(contents.begin, first), min(contents.end, last)
                part = _flat_part(contents, (begin - contents.begin) // size, (end - begin) // size)
                if contents.part is None or part is not None:
                    yield (begin - first) // size, (end - begin) // size, part, contents.dtype
        elif len(sources) == 1 and sources[0].part is not None:
            offset = (source.data_ptr() - sources[0].begin) // size
            boxes = list(_boxes(sources[0].part, offset, _axes(source)))
            lengths = [part.rows * part.columns for part in boxes]
            if sum(lengths) == source.numel():
                begins = itertools.accumulate(lengths, initial=0)
                yield from (
                    (at, n, part, sources[0].dtype) for at, n, part in zip(begins, lengths, boxes, strict=False)
                )

    def filled(self, target: Tensor) -> None:
        if _nowhere(target):
            return
        begin, end = _span(target)
        self.forget(begin, end)
        if target.is_contiguous():
            self.hold(_Contents(begin, end, None, target.dtype))

    def _put(self, contents: _Contents) -> None:
        bisect.insort(self._begins, contents.begin)
        self._held[contents.begin] = contents


class _Operations(TorchDispatchMode):
    """Keeps `memory` up to date while the mode is active."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.name()).partition(".")[0]
        if name == "aten::copy_":
            self._memory.copied(args[0], args[1])
        elif name in _COPIES:
            self._memory.copied(result, args[0])
        elif name in _FILLS:
            self._memory.filled(args[0])
        elif name.startswith(_NEW) and not _nowhere(result):
            self._memory.forget(*_span(result))
        return result


class _Packings(TorchFunctionMode):
    """While the mode is active, calls `packed` with each weight that is packed and with the result."""

    def __init__(self, packed: Callable[[Tensor, Any], None]) -> None:
        self._packed = packed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "_qualified_op_name", "")
        if name in _PACKING or name in _PACKING_INTO:
            self._packed(args[0], result if name in _PACKING else args[1])
        return result


class LoadTrace:
    """Follows one load (`over`). Afterwards, `proof` reports what was loaded."""

    def __init__(
        self, names: Callable[[Iterable[tuple[str, Tensor]]], Any] | None = None, *, read_back: bool = False
    ) -> None:
        """`names` turns weights into those that the model's loaders know. The proof keeps the names before that.

        If `read_back` is true, weights that oneDNN packs are read back through products with unit vectors and compared
        with the originals. Other packed weights must have the same elements.
        """
        self._names = names or (lambda weights: weights)
        self._read_back = read_back
        self._memory = _Memory()
        self._packed: dict[int, Proof] = {}
        """The proofs by handle. A handle is the number or address that the packing operation returned."""

    @contextmanager
    def over(self, model: Any) -> Iterator[None]:
        """Follow all weights that are passed to `model.load_weights` while this context is active."""
        load_weights = model.load_weights

        def traced(weights: Iterable[tuple[str, Tensor]]) -> Any:
            return load_weights(self._names(self._announced(weights)))

        model.load_weights = traced
        try:
            with _Operations(self._memory), _Packings(self._pack):
                yield
        finally:
            del model.load_weights

    def proof(self, model: nn.Module) -> Proof:
        """Return the proof for every parameter, loaded buffer and handle that a module of `model` now holds."""
        parts: list[Digested] = []
        faults: list[str] = []
        digests: list[tuple[WeightPart, Tensor]] = []
        names = _Names(model)
        for path, module in model.named_modules():
            handle = handle_of(module)
            if handle is not None:
                packed = self._packed.get(handle)
                if packed is None:
                    faults.append(f"{path}: computes with weights that were packed before this load")
                else:
                    parts += packed.parts
                    faults += [f"{path}: {fault}" for fault in packed.faults]
                    faults += names.misplaced(module, f"{path}.weight", [part for part, _ in packed.parts])
            for name, tensor in module.named_parameters(path, recurse=False):
                if tensor.numel() == 0 and handle is not None:
                    continue  # the module's weight is in the handle
                if self._memory.is_packed(tensor):
                    packed = self._packed[tensor.data_ptr()]
                    parts += packed.parts
                    faults += [f"{name}: {fault}" for fault in packed.faults]
                    faults += names.misplaced(module, name, [part for part, _ in packed.parts])
                    continue
                if name.rpartition(".")[2] in EXPERTS and hasattr(experts_of(module), "isa"):
                    faults.append(f"{name}: is not packed, but the kernel reads packed weights")
                digested, whole = self._digested(tensor)
                digests += digested
                faults += names.misplaced(module, name, [part for part, _ in digested])
                if not whole:
                    faults.append(f"{name}: not all of it was loaded")
            for _, buffer in module.named_buffers(recurse=False):
                digested, whole = self._digested(buffer)
                digests += digested if whole else []  # most buffers are computed and hold no weights
        if digests:
            values = torch.stack([value.to(digests[0][1].device) for _, value in digests]).tolist()
            parts += [(part, value & (1 << 64) - 1) for (part, _), value in zip(digests, values, strict=True)]
        return Proof(parts, faults)

    def _announced(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            rows, columns = matrix_shape(tensor.shape)
            if tensor.is_contiguous() and tensor.numel():
                self._memory.hold(_Contents(*_span(tensor), WeightPart(name, 0, 0, rows, columns), tensor.dtype))
            yield name, tensor

    def _pack(self, weight: Tensor, result: Any) -> None:
        flat = torch.as_strided(weight, (weight.numel(),), (1,), weight.storage_offset())
        digested, whole = self._digested(flat)
        parts = [(part, as_int(value)) for part, value in digested]
        faults = [] if whole else ["not everything that it packed was loaded"]
        if self._read_back and not (
            _same_elements(result, weight) if isinstance(result, Tensor) else _reads_back(int(result), weight)
        ):
            faults.append("packed weights differ when they are read back")
        if isinstance(result, Tensor):
            part = WeightPart(_PACKED, 0, 0, result.numel(), 1)
            self._memory.hold(_Contents(*_span(result), part, result.dtype))
        handle = result.data_ptr() if isinstance(result, Tensor) else int(result)
        self._packed[handle] = Proof(parts, faults)

    def _digested(self, tensor: Tensor) -> tuple[list[tuple[WeightPart, Tensor]], bool]:
        """Return the digests of the parts in contiguous `tensor`, and whether all of its contents are known."""
        first, last = _span(tensor)
        size, size_known = tensor.element_size(), 0
        flat, digests = tensor.detach().reshape(-1), []
        for contents in _joined(self._memory.within(first, last)):
            if contents.begin < first or contents.end > last:
                continue
            size_known += contents.end - contents.begin
            if contents.part is None:
                # Reused memory might be mistaken for a constant. Constants are padding, which must be zeros.
                zeros = flat[(contents.begin - first) // size : (contents.end - first) // size]
                size_known -= int(zeros.count_nonzero() > 0)
                continue
            values = flat[(contents.begin - first) // size : (contents.end - first) // size]
            if values.dtype != contents.dtype:
                narrow = values.to(contents.dtype)
                size_known -= 0 if torch.equal(narrow.to(values.dtype), values) else 1
                values = narrow
            part = contents.part
            digests.append((part, digest(values.reshape(part.rows, part.columns), part.row, part.column)))
        return digests, size_known == last - first


class _Names:
    """Checks that weights are in the modules that their names indicate. Names that a model's loader translates are not
    checked here; the canary covers those weights."""

    def __init__(self, model: nn.Module) -> None:
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        self._modules = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        self._first: dict[int, nn.Module] = {}
        """The first module with a parameter at each address. Later modules with a parameter at that address are tied to
        the first one."""

    def misplaced(self, module: nn.Module, name: str, parts: Sequence[WeightPart]) -> list[str]:
        """Return the faults in the placement of `parts`, given in order, in parameter `name` of `module`."""
        own = module._parameters.get(name.rpartition(".")[2])
        if own is not None and own.numel() and self._first.setdefault(own.data_ptr(), module) is not module:
            return []
        holder, kind = _leaf(name)
        fused = self._fused.get(holder, ())
        order = []
        for part in parts:
            leaf, its_kind = _leaf(part.name)
            is_loaded = leaf in self._modules or any(leaf in fused for fused in self._fused.values())
            strange = is_loaded and leaf != holder and leaf not in fused
            if strange or EXPERTS.get(kind, kind) != its_kind or _numbers(part.name) != _numbers(name):
                return [f"{name}: holds {part.name}"]
            order.append((fused.index(leaf) if leaf in fused else 0, part.row if kind in EXPERTS else 0))
        return [] if order == sorted(order) else [f"{name}: its parts are in a different order"]


def _leaf(name: str) -> tuple[str, str]:
    """Return the last module in a parameter's name, and the kind of the parameter: `weight` or `bias`.

    A layer that can have an adapter is inside a wrapper that has its name, which is the name that counts. So are vLLM's
    experts.
    """
    path, _, kind = name.rpartition(".")
    return path.removesuffix(".base_layer").removesuffix(".routed_experts").rpartition(".")[2], kind


def _numbers(name: str) -> list[str]:
    """Return the layer numbers in a name."""
    return [piece for piece in name.split(".") if piece.isdigit()]


def _nowhere(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or tensor.is_meta or tensor.numel() == 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first element, and the address after the last element."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach * tensor.element_size()


def _flat_part(contents: _Contents, offset: int, count: int) -> WeightPart | None:
    """Return `count` consecutive elements of `held` from `offset` on as a part, or None if they do not form a box."""
    part = contents.part
    if part is None:
        return None
    row, column = divmod(offset, part.columns)
    if column == 0 and count % part.columns == 0:
        return part._replace(row=part.row + row, rows=count // part.columns)
    if column + count <= part.columns:
        return WeightPart(part.name, part.row + row, part.column + column, 1, count)
    return None


def _axes(view: Tensor) -> list[tuple[int, int]]:
    """Return the sizes and strides of `view`, with axes that are contiguous with the next one merged into it."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size > 1:
            axes.append((size, stride))
    return axes


def _boxes(part: WeightPart, offset: int, axes: Sequence[tuple[int, int]]) -> Iterator[WeightPart]:
    """Yield the elements of `part` that a view with `axes` (sizes and strides) shows, as parts in the view's order.
    Elements that form no box are left out.

    The view begins `offset` elements into `part`.
    """
    row, column = divmod(offset, part.columns)
    if axes[-1][1] == part.columns:
        axes = [*axes, (1, 1)]
    count, stride = axes[-1]
    if stride != 1:
        return
    if len(axes) == 1 and column == 0 and count % part.columns == 0:
        axes = [(count // part.columns, part.columns), (part.columns, 1)]
    elif len(axes) == 1:
        axes = [(1, part.columns), *axes]
    if len(axes) > 2 or axes[0][1] != part.columns:
        for index in range(axes[0][0]):
            yield from _boxes(part, offset + index * axes[0][1], axes[1:])
    elif column + axes[1][0] <= part.columns:
        yield WeightPart(part.name, part.row + row, part.column + column, axes[0][0], axes[1][0])


def _joined(pieces: Iterable[_Contents]) -> list[_Contents]:
    """Return `pieces` with each that continues the rows of the one before it in memory joined to that one, because the
    digests of many small parts take long."""
    joined: list[_Contents] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.part is not None and piece.part is not None and last.dtype == piece.dtype:
            rows, more = last.part.rows, piece.part.rows
            if piece.part == last.part._replace(row=last.part.row + rows, rows=more) and piece.begin == last.end:
                joined[-1] = replace(last, end=piece.end, part=last.part._replace(rows=rows + more))
                continue
        joined.append(piece)
    return joined


def _same_elements(packed: Tensor, weight: Tensor) -> bool:
    """Return whether `packed` has the elements of `weight`, bit for bit, in any order."""
    if packed.dtype != weight.dtype:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
    return torch.equal(*(each.detach().reshape(-1).view(integers).sort().values for each in (packed, weight)))


def _reads_back(handle: int, weight: Tensor) -> bool:
    """Return whether products of unit vectors with `handle`, packed from `weight` [in, out], reproduce the rows of
    `weight` exactly.

    All rows are checked if that takes at most `READ_BACK_FLOP`; otherwise, as many evenly spread rows are checked as
    that limit allows, but at least 16.
    """
    inputs, outputs = weight.shape
    count = min(max(READ_BACK_FLOP // (2 * inputs * outputs), 16), inputs)
    rows = torch.linspace(0, inputs - 1, count).long()
    for some in rows.split(_READ_BACK_ROWS):  # type: ignore[no-untyped-call]
        units = torch.zeros(len(some), inputs, dtype=weight.dtype)
        units[range(len(some)), some] = 1
        products = torch.empty(len(some), outputs, dtype=weight.dtype)
        torch.ops._C.onednn_mm(products, units, None, torch.tensor(handle))
        if not torch.equal(products, weight[some]):
            return False
    return True


def handle_of(module: nn.Module) -> int | None:
    """Return the handle that a packing operation returned for the weight of `module`, or None if there is none."""
    product = getattr(module, "cpu_linear", None)
    for cell in getattr(product, "__closure__", None) or ():
        value = cell.cell_contents
        if hasattr(value, "handler_tensor"):
            return int(value.handler_tensor)
        if isinstance(value, Tensor):
            return value.data_ptr()
    return None


def experts_of(module: nn.Module) -> Any:
    """Return the kernel of vLLM for the experts in `module`, or None if it holds no experts. A kernel for CPUs has the
    attribute `isa`."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)
