"""The contract between the runtime and a device: tensors, KV caches, step programs.

Above this line nobody knows a tensor framework or a piece of hardware. A device owns memory, the layout of
weights and caches, and how a step is executed (call by call, recorded, captured); the runtime owns what a step
computes and when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from device.dtypes import numpy_dtype
from device.errors import ConfigError
from device.weights import Activation, CanonicalWeight

if TYPE_CHECKING:
    from device.binding import Bound, OpTable

Outputs = Mapping[str, "Tensor"]
StepFn = Callable[["Inputs", Hashable], Outputs]


class Tensor(Protocol):
    """What lives on a device. It has a shape and a dtype, can be viewed, and has no arithmetic: all else is an op."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def reshape(self, *shape: int) -> Tensor:
        """A view with other trailing dimensions; the first dimension must stay as it is. May copy if strided."""
        ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A view. Slices with step 1 only; rows (the first dimension) may only be sliced as ``[:]`` in a program."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """Heads and head size of one layer's cache, and what will attend to it; layers may differ (pruned models).

    q_heads and window let a device decide at allocation whether its attention takes the layer.
    """

    heads: int
    head_dim: int
    q_heads: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a cache holds: one entry a layer. dtype: a float name or ``int8`` (scales beside the page)."""

    layers: tuple[KVLayerSpec, ...]
    dtype: str

    @property
    def elements_per_token(self) -> int:
        """Numbers (K and V of all layers) stored for one token."""
        return sum(2 * layer.heads * layer.head_dim for layer in self.layers)


class PackedWeight(Protocol):
    """A weight in the layout of the implementation that packed it. shape: (N, K); dtype: what ``embed`` gives."""

    impl: Any
    shape: tuple[int, int]
    dtype: str
    nbytes: int


class KVLayer(Protocol):
    """One layer of a cache. impl: the implementation that allocated it. read_dtype: what ``read_kv`` gives."""

    impl: Any
    heads: int
    head_dim: int
    read_dtype: str


class KVCache(Protocol):
    """Pages of KV for all layers. The first ``reserved`` blocks are the device's own and never hold a sequence."""

    impl: Any
    spec: KVSpec
    blocks: int
    block_size: int
    reserved: int

    def layer(self, index: int) -> KVLayer:
        """What ``store_kv``, ``read_kv`` and ``paged_attention`` take for this layer."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes. ``free``: what a new allocation may take without harming others. ``source`` says how it was found."""

    total: int
    free: int
    source: str


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device can do, asked once at start-up. The first entry of each list is its default."""

    kind: str
    name: str
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    """Block sizes it takes; with ``any_block_size`` these are only the recommended ones."""
    any_block_size: bool = False
    reserved_blocks: int = 1
    max_seqs: int | None = None
    """Most sequences in one step, None: no limit of the device's own."""
    capture: Literal["none", "recorded", "graph"] = "none"
    traces: bool = False
    """Whether the op calls of a step can be timed one by one."""
    tree_attention: bool = True
    kv_share_limit: float = 1.0
    """Most of the free memory that a KV pool may take; less where others need memory of the same kind."""

    def check_block_size(self, size: int) -> int:
        """``size`` or, for 0, the default; ConfigError for one that the device does not take."""
        if size == 0:
            return self.block_sizes[0]
        if size in self.block_sizes or (self.any_block_size and size > 0):
            return size
        raise ConfigError(
            f"block_size {size} is not possible on {self.name}; it takes {', '.join(map(str, self.block_sizes))}"
        )


# ---------------------------------------------------------------- a step's inputs


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a step: [count + extra, *tail].

    count: the name of the actual count that the first dimension follows (``T`` tokens, ``B`` sequences, ``R`` rows
        of logits, …). bound: the most that count can be. pad: what fills rows that a device runs beyond the actual
        count (``last`` repeats the last real entry). grows: lies in the second, growing buffer, its capacity is part
        of the key, ``bound`` is the capacity to begin with.
    """

    name: str
    dtype: str
    count: str
    bound: int
    tail: tuple[int, ...] = ()
    extra: int = 0
    pad: int | float | Literal["last"] = 0
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """All inputs of a step program, and the order of the counts in ``counts`` [n] i32."""

    counts: tuple[str, ...]
    inputs: tuple[InputSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.inputs]
        if len(set(names)) != len(names) or "counts" in names:
            raise ValueError(f"input names must be unique and not 'counts': {names}")
        for spec in self.inputs:
            if spec.count not in self.counts:
                raise ValueError(f"input {spec.name} follows {spec.count!r}, which is none of {self.counts}")
            if spec.grows and spec.bound < 1:
                raise ValueError(f"input {spec.name} grows by doubling, so it has to begin with at least one row")

    def bound(self, count: str) -> int:
        """The most that a count can be: the least bound among the inputs that follow it."""
        return min((s.bound for s in self.inputs if s.count == count and not s.grows), default=0)


_ALIGN = 64


class HostBuffer:
    """The host side of one step's inputs: one contiguous allocation, a view for each input, and the growing ones.

    The runtime writes ``views[name][:n]`` and ``counts``; a device copies ``data`` (and ``growing``) in as few
    copies as it likes. ``lists`` are plain Python lists for devices whose operators take host lengths. alloc: gives
    zeroed bytes; a device passes its own for pinned memory.
    """

    def __init__(self, layout: Layout, alloc: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self.layout = layout
        self._alloc = alloc or (lambda size: np.zeros(size, np.uint8))
        offset = _round_up(4 * len(layout.counts))
        places: list[tuple[InputSpec, int]] = []
        self.growing: dict[str, NDArray[Any]] = {}
        self.addresses: dict[str, int] = {}
        """Of the growing inputs, kept because NumPy is slow to tell them. ``address``: of ``data``."""
        for spec in layout.inputs:
            if spec.grows:
                self._grow(spec, spec.bound)
                continue
            places.append((spec, offset))
            size = int(np.prod(spec.tail, dtype=np.int64)) * (spec.bound + spec.extra)
            offset = _round_up(offset + size * numpy_dtype(spec.dtype).itemsize)
        self.data = self._alloc(offset)
        self.address = self.data.ctypes.data
        self.counts = self.data[: 4 * len(layout.counts)].view(np.int32)
        self.offsets = {spec.name: at for spec, at in places}
        self.views: dict[str, NDArray[Any]] = {}
        for spec, at in places:
            dtype = numpy_dtype(spec.dtype)
            shape = (spec.bound + spec.extra, *spec.tail)
            end = at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self.views[spec.name] = self.data[at:end].view(dtype).reshape(shape)
        self.lists: dict[str, list[int]] = {"q_lens": [], "kv_lens": []}

    def count(self, name: str) -> int:
        """The actual count of this step."""
        return int(self.counts[self.layout.counts.index(name)])

    def array(self, name: str) -> NDArray[Any]:
        """The whole host array of an input, as large as its bound (or present capacity)."""
        view = self.views.get(name)
        return self.growing[name] if view is None else view

    def ensure(self, count: str, size: int) -> int:
        """Grow the inputs that follow ``count`` by doubling until ``size`` rows fit; their capacity is returned."""
        capacity = 0
        for spec in self.layout.inputs:
            if not spec.grows or spec.count != count:
                continue
            capacity = self.growing[spec.name].shape[0]
            while capacity < size:
                capacity *= 2
            old = self.growing[spec.name]
            if capacity != old.shape[0]:
                self._grow(spec, capacity)[: old.shape[0]] = old
        return capacity

    def _grow(self, spec: InputSpec, rows: int) -> NDArray[Any]:
        dtype = numpy_dtype(spec.dtype)
        size = int(np.prod(spec.tail, dtype=np.int64)) * rows * dtype.itemsize
        array: NDArray[Any] = self._alloc(size).view(dtype).reshape(rows, *spec.tail)
        array[:] = 0 if spec.pad == "last" else spec.pad
        self.growing[spec.name], self.addresses[spec.name] = array, array.ctypes.data
        return array

    def pad(self, bucket: Mapping[str, int]) -> None:
        """Fill every input between its actual count and the bucket's with its padding value.

        A growing input that follows a bucketed count (a bitmask a row) grows to the bucket first.
        """
        for spec in self.layout.inputs:
            if spec.grows:
                self.ensure(spec.count, bucket.get(spec.count, 0))
            array = self.array(spec.name)
            live = self.count(spec.count) + spec.extra
            end = array.shape[0] if spec.grows else bucket[spec.count] + spec.extra
            if live < end:
                array[live:end] = array[live - 1] if spec.pad == "last" else spec.pad


def _round_up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


@dataclass(slots=True)
class AttnMeta:
    """Where this step's rows stand in their sequences, for attention.

    q_start [B+1], seq_lens [B] (this step's tokens counted), block_table [B, M], slots [T], all i32 on the device.
    q_lens, kv_lens: the same lengths as host lists, for operators that take them there; never read them back.
    tree [T, 2] i32 and is_tree [B] i32: visibility bits among a sequence's own rows (bit j: row j), or None: causal.
    counts: the actual counts, i32, in the layout's order.
    """

    q_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    counts: Tensor
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    tree: Tensor | None = None
    is_tree: Tensor | None = None


class Inputs:
    """What a step function sees: the inputs by name, the op table to call, and the attention metadata."""

    __slots__ = ("_meta", "_tensors", "ops")

    def __init__(self, ops: OpTable, tensors: Mapping[str, Tensor], lists: Mapping[str, Sequence[int]]) -> None:
        self.ops = ops
        self._tensors = tensors
        self._meta: AttnMeta | None = None
        if "q_start" in tensors:
            self._meta = AttnMeta(
                tensors["q_start"],
                tensors["seq_lens"],
                tensors["block_table"],
                tensors["slots"],
                tensors["counts"],
                lists["q_lens"],
                lists["kv_lens"],
                tensors.get("tree"),
                tensors.get("is_tree"),
            )

    @property
    def meta(self) -> AttnMeta:
        """The attention metadata; only of a layout that has q_start, seq_lens, block_table and slots."""
        if self._meta is None:
            raise KeyError("this program's layout has no attention inputs")
        return self._meta

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


# ---------------------------------------------------------------- programs and devices


class Pending(ABC):
    """A step under way."""

    @abstractmethod
    def wait(self) -> dict[str, NDArray[Any]]:
        """The outputs as host arrays (actual counts, no padding). Blocks, without the GIL; raises what the step raised.

        The arrays are valid until the program's next launch; a bfloat16 output is its uint16 bits.
        """


class Program(ABC):
    """A step function, ready to be launched with any counts below the layout's bounds."""

    layout: Layout

    def prepare(self, keys: Sequence[Hashable]) -> None:
        """Called once before serving, with the keys that are to be expected: record, compile or capture them now, ask
        ``supports`` for the shapes that they bring, and raise what would otherwise be raised in a user's step."""
        return

    @abstractmethod
    def buffer(self) -> HostBuffer:
        """A step buffer (host part, and a device part where the device has one). It belongs to the device from
        ``launch`` until that launch's ``wait`` has returned."""

    @abstractmethod
    def launch(self, buffer: HostBuffer, key: Hashable) -> Pending:
        """Start one step and return at once. ``key`` is whatever changes the list of op calls."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


class Communicator(ABC):
    """Collectives of one world. A world of one has none to do."""

    world: World

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenation over ranks along the last dimension."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op call of a step. detail: which of several (a weight's shape). moved: bytes of weights, cache and operands
    at least; operations: of products, a multiply-add counted as two."""

    op: str
    detail: str
    seconds: float
    moved: int
    operations: int


Tracer = Callable[[Mapping[str, int], Sequence[OpTime]], None]
"""Hears, after a step, of its counts and its calls in order."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on the device: bytes/s (read and written bytes both counted), operations/s of a matrix product."""

    bandwidth: float
    rate: float


@dataclass(slots=True)
class StartReport:
    """What a device says at start-up: (op, implementation, note) rows, and notices."""

    ops: list[tuple[str, str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class Device(ABC):
    """One device. Launches, and ops called outside a program, run in call order; ``Pending.wait`` and ``numpy`` are
    the only synchronisations."""

    caps: Caps
    dtype: str
    """The compute dtype: of activations, and of float weights once packed."""
    ops: OpTable
    """The op table for calls outside a program. A step function uses ``inputs.ops``."""
    bound: Bound
    """How the table was bound: which implementations a family has, which ops are batch-invariant."""
    report: StartReport
    """What was bound, and every notice since (a weight that a portable version had to take, …)."""
    tracer: Tracer | None = None
    """Set: each step is timed op by op, which slows it down a little. Only where ``caps.traces``."""

    @abstractmethod
    def memory(self) -> MemoryInfo: ...

    def input_of(self, w: CanonicalWeight) -> Activation:
        """How the input of ``linear`` is quantised for ``w``: as the checkpoint asks, or by the device's own choice
        where the weight leaves it (``Activation.as_is`` does not).

        What is said here is the op's definition on this device; its error is counted against that.
        """
        return w.activation

    def ceilings(self) -> Ceilings | None:
        """What the hardware can do at most, measured now, with the device idle; None: unknown."""
        return None

    @abstractmethod
    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes that one block takes in all layers, scales and padding of the layout included."""

    @abstractmethod
    def alloc_kv(self, spec: KVSpec, blocks: int, block_size: int | None = None) -> KVCache:
        """A cache of ``blocks`` blocks, the reserved ones among them."""

    @abstractmethod
    def host_kv(self, spec: KVSpec, blocks: int, block_size: int) -> KVCache:
        """A cache in (pinned) host memory, for ``swap_kv``."""

    @abstractmethod
    def tensor(self, array: NDArray[Any], dtype: str | None = None) -> Tensor:
        """A copy of a host array on the device, converted to ``dtype`` (a bfloat16 host array is uint16)."""

    @abstractmethod
    def numpy(self, t: Tensor) -> NDArray[Any]:
        """A host copy (bfloat16: uint16 bits). Waits for the work before it."""

    @abstractmethod
    def program(self, fn: StepFn, layout: Layout) -> Program: ...

    def communicator(self, world: World) -> Communicator:
        """Collectives for tensor parallelism; ConfigError where the device has none for this size."""
        if world.size != 1:
            raise ConfigError(f"{self.caps.name} has no collectives for {world.size} ranks; use tensor_parallel = 1")
        return SingleRank()

    def close(self) -> None:
        """Free threads and memory. The device is not used afterwards."""
        return


class SingleRank(Communicator):
    """A world of one: both collectives are the identity."""

    world = World()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x
