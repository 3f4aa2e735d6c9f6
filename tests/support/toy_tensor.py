"""Memory and stream of the toy device: everything happens late, in order, on one worker; host code never sees numbers.

A ``ToyTensor`` is a window (offset, shape, strides) on a ``Storage``. Its numbers may be touched by kernels only, that
is on the worker; all that the host can do is ask for shape and dtype and make other windows.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from device.dtypes import numpy_dtype
from device.errors import DeviceError
from tests.support.worker_queue import Job, SerialQueue

POISON_INT = -12345
_HELD_TOO_LONG = 60.0


def poison(array: NDArray[Any]) -> None:
    """Numbers that no correct result contains: NaN, -12345, or -77 where that does not fit."""
    if array.dtype.kind == "f":
        array.fill(np.nan)
    elif array.dtype.kind == "u":
        array.fill(77)
    else:
        array.fill(-77 if array.dtype.itemsize == 1 else POISON_INT)


class Stream:
    """The worker. jitter: every job starts up to so many seconds late, drawn from ``seed``."""

    def __init__(self, seed: int, jitter: float) -> None:
        self._random = random.Random(seed)
        self._jitter = jitter
        self._open = threading.Event()
        self._open.set()
        self._queue = SerialQueue("toy-device")
        self._error: BaseException | None = None
        self._worker: int = self._queue.run(threading.get_ident)

    @property
    def on_worker(self) -> bool:
        return threading.get_ident() == self._worker

    def submit(self, fn: Callable[[], Any]) -> Job:
        """A job whose error belongs to whoever asks for its result."""

        def late() -> Any:
            if not self._open.wait(_HELD_TOO_LONG):
                raise DeviceError("the toy device was held while somebody waited for it")
            if self._jitter:
                time.sleep(self._random.uniform(0, self._jitter))
            return fn()

        return self._queue.submit(late)

    def enqueue(self, fn: Callable[[], Any]) -> None:
        """A job that nobody waits for: its error comes out at the next synchronisation."""

        def guarded() -> None:
            try:
                fn()
            except BaseException as error:
                self._error = self._error or error

        if self.on_worker:
            fn()
        else:
            self.submit(guarded)

    def synchronise(self, fn: Callable[[], Any]) -> Any:
        """Wait for everything before, then for ``fn``; raises the first error of a job that nobody waited for."""
        result = self.submit(fn).result()
        self.raise_late_error()
        return result

    def raise_late_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No job starts inside: what is called meanwhile is certain to run late."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        self._open.set()
        self._queue.close()


class Storage:
    """One allocation: ``size`` numbers in a row, poisoned until something is written."""

    __slots__ = ("data", "dead", "dtype", "stream")

    def __init__(self, stream: Stream, size: int, dtype: str) -> None:
        self.stream, self.dtype = stream, dtype
        self.dead = False
        self.data: NDArray[Any] = np.empty(size, numpy_dtype(dtype))
        poison(self.data)

    def kill(self) -> None:
        """The end of its life: whoever reads it afterwards gets an error, and a window kept of it gets poison."""
        poison(self.data)
        self.dead = True


def _refuse(what: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any) -> NoReturn:
        raise TypeError(f"a device tensor has no {what}; call an op, or numpy(tensor) to have it on the host")

    return method


class ToyTensor:
    """An opaque tensor. strides count elements."""

    __slots__ = ("offset", "shape", "storage", "strides")
    __array_ufunc__ = None  # NumPy leaves operators with an array on their left to the methods below

    def __init__(self, storage: Storage, shape: tuple[int, ...], offset: int = 0,
                 strides: tuple[int, ...] | None = None) -> None:  # fmt: skip
        self.storage, self.shape, self.offset = storage, shape, offset
        self.strides = row_major(shape) if strides is None else strides

    @classmethod
    def empty(cls, stream: Stream, shape: tuple[int, ...], dtype: str) -> ToyTensor:
        return cls(Storage(stream, int(np.prod(shape, dtype=np.int64)), dtype), shape)

    @classmethod
    def of(cls, stream: Stream, array: NDArray[Any]) -> ToyTensor:
        """A tensor of its own with these numbers; kernels only."""
        out = cls.empty(stream, array.shape, array.dtype.name)
        out.array()[...] = array
        return out

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def nbytes(self) -> int:
        return int(self.storage.data.nbytes)

    def array(self) -> NDArray[Any]:
        """The numbers, as a strided window on the storage; on the worker only."""
        storage = self.storage
        if not storage.stream.on_worker:
            raise DeviceError("the host looked into device memory; numpy(tensor) copies it")
        if storage.dead:
            raise DeviceError("a tensor was used after the end of its life")
        data = storage.data
        if 0 in self.shape:
            return np.empty(self.shape, data.dtype)
        width = data.itemsize
        return np.ndarray(self.shape, data.dtype, data.data, self.offset * width, [s * width for s in self.strides])

    def reshape(self, *shape: int) -> ToyTensor:
        """A window where the trailing dimensions lie in one run, else a copy."""
        rest = int(np.prod(self.shape[1:], dtype=np.int64))
        known = int(np.prod([n for n in shape[1:] if n != -1], dtype=np.int64))
        full = (self.shape[0], *(rest // max(known, 1) if n == -1 else n for n in shape[1:]))
        if shape[0] not in (self.shape[0], -1) or int(np.prod(full[1:], dtype=np.int64)) != rest:
            raise ValueError(f"reshape {self.shape} -> {shape}: the first dimension must stay and the size be the same")
        inner = _run(self.shape[1:], self.strides[1:])
        if inner is not None:
            strides = (self.strides[0], *(s * inner for s in row_major(full[1:])))
            return ToyTensor(self.storage, full, self.offset, strides)
        copy = ToyTensor.empty(self.storage.stream, self.shape, self.dtype)
        self.storage.stream.enqueue(lambda: copy.array().__setitem__(..., self.array()))
        return copy.reshape(*full)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> ToyTensor:
        cuts = index if isinstance(index, tuple) else (index,)
        if len(cuts) > len(self.shape) or not all(isinstance(c, slice) for c in cuts):
            raise TypeError(f"a device tensor takes at most {len(self.shape)} slices here, not {index!r}")
        shape, offset = list(self.shape), self.offset
        for axis, cut in enumerate(cuts):
            start, stop, step = cut.indices(self.shape[axis])
            if step != 1:
                raise ValueError("a device tensor takes slices with step 1 only")
            shape[axis] = max(stop - start, 0)
            offset += start * self.strides[axis]
        return ToyTensor(self.storage, tuple(shape), offset, self.strides)

    def __repr__(self) -> str:
        return f"ToyTensor({self.dtype} {list(self.shape)})"

    __hash__ = object.__hash__


for _name in ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv",
              "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror",
              "xor", "rxor", "lshift", "rshift", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt",
              "ge"):  # fmt: skip
    setattr(ToyTensor, f"__{_name}__", _refuse("arithmetic"))
for _name in ("array", "bool", "int", "float", "index", "len", "iter", "setitem", "contains", "dlpack"):
    setattr(ToyTensor, f"__{_name}__", _refuse("values that the host can see"))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array without gaps."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _run(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The distance between neighbours if these dimensions can be walked with one, else None."""
    real = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if not real:
        return 1
    for (_, outer), (n, inner) in zip(real, real[1:], strict=False):
        if outer != n * inner:
            return None
    return real[-1][1]
