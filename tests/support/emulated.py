"""The native library built for another architecture, run by an emulator, in the place of this process's own.

    python -m tests.support.emulated EMULATOR_COMMAND MODULE [ARGUMENT ...]

runs a module (pytest, server.cli) whose calls of the native library go to ``tests/cpu/emulated_host.cpp``, started by
the command (one string, split like a shell's). So whatever tests the library here tests it there, with the same inputs,
references and bounds: what a call reads and writes is copied to the other process and back.

Whatever is written outside the operands of a call, up to 64 bytes beside them, is an error here.
"""

from __future__ import annotations

import ctypes
import runpy
import shlex
import struct
import subprocess
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from cpu_kernels import library

FUNCTIONS = (
    "alloc", "free", "write", "read", "isa", "isa_runs", "team_new", "team_free", "pack", "weight_free",
    "weight_bytes", "weight_rows", "weight_columns", "linear_scratch", "linear_run", "embed_run", "call_scratch", "run",
)  # fmt: skip
"""By number, as in emulated_host.cpp."""

_GUARD = 64
_FILLER = b"\xa5"
_KV_OPS = ("store_kv", "read_kv", "paged_attention", "qkv_rope_store")
_WHOLE_BYTES = {0: 4, 1: 2, 2: 2, 3: 1}
"""Bytes of an element by ``JK_F32`` … ``JK_I8``; the others have half a byte."""


class Host:
    """The other process: its memory and its functions."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self._later: deque[tuple[str, int]] = deque()

    def call(self, name: str, *args: int) -> int:
        """What a function returns."""
        with self._lock:
            while self._later:
                self._exchange(self._request(*self._later.popleft()), 8)
            (result,) = struct.unpack("<q", self._exchange(self._request(name, *args), 8))
        return int(result)

    def later(self, name: str, handle: int) -> None:
        """The call of a finaliser, which may come in the middle of another one: made before the next."""
        self._later.append((name, handle))

    def write(self, address: int, data: bytes) -> None:
        with self._lock:
            self._exchange(self._request("write", address, len(data)) + data, 8)

    def read(self, address: int, size: int) -> bytes:
        with self._lock:
            return self._exchange(self._request("read", address, size), size)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    @staticmethod
    def _request(name: str, *args: int) -> bytes:
        return struct.pack("<13q", FUNCTIONS.index(name), *args, *[0] * (12 - len(args)))

    def _exchange(self, data: bytes, size: int) -> bytes:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(data)
            pipe_in.flush()
            answer = pipe_out.read(size)
        except BrokenPipeError:
            answer = b""
        if len(answer) != size:
            raise RuntimeError(f"the emulated process ended with {self._process.wait(30)} (negative: a signal)")
        return answer


class Mirror:
    """Pieces of this process's memory, copied into one block of the other's and back after a call."""

    def __init__(self, host: Host, block: Block) -> None:
        self._host, self._block = host, block
        self._pieces: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._places: list[int] = []
        self._size = 0

    def add(self, address: int | None, size: int) -> None:
        """What a call may touch; nothing where there is no address."""
        if address and size > 0:
            self._pieces.append((address, address + size))

    def place(self) -> None:
        """Gives all pieces their places, those that overlap a common one. Alignment within 64 bytes is kept."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(self._pieces):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        at = 0
        for begin, end in merged:
            at += _GUARD + (begin - at) % 64
            self._places.append(at)
            at += end - begin
        self._pieces, self._starts = merged, [begin for begin, _ in merged]
        self._size = at + _GUARD
        self._block.ensure(self._size)

    def of(self, address: int | None) -> int:
        """Where a placed address lies in the other process; 0 for none."""
        if not address:
            return 0
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address > self._pieces[i][1]:
            raise KeyError(f"{address:#x} was not added")
        return self._block.address + self._places[i] + address - self._starts[i]

    def send(self) -> None:
        self._sent = bytearray(_FILLER * self._size)
        for (begin, end), at in zip(self._pieces, self._places, strict=True):
            self._sent[at : at + end - begin] = ctypes.string_at(begin, end - begin)
        self._host.write(self._block.address, bytes(self._sent))

    def fetch(self) -> None:
        """Copies back what has changed: an operand that is only read may lie in memory that cannot be written."""
        got = self._host.read(self._block.address, self._size)
        checked = 0
        for (begin, end), at in [*zip(self._pieces, self._places, strict=True), ((0, 0), self._size)]:
            if got[checked:at] != bytes(self._sent[checked:at]):
                raise RuntimeError("a native call wrote beside its operands")
            checked = at + end - begin
            if got[at:checked] != self._sent[at:checked]:
                ctypes.memmove(begin, got[at:checked], end - begin)


class Block:
    """Memory of the other process that grows; its contents are lost when it does. What stands behind it is watched."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.address = self.size = 0

    def ensure(self, size: int) -> None:
        if size > self.size:
            if self.address:
                self._host.call("free", self.address)
            self.address, self.size = self._host.call("alloc", size + _GUARD), size
            self._host.write(self.address + size, _FILLER * _GUARD)

    def check(self) -> None:
        """RuntimeError where something was written behind it."""
        if self.size and self._host.read(self.address + self.size, _GUARD) != _FILLER * _GUARD:
            raise RuntimeError("a native call wrote beyond its scratch")


class Emulated:
    """What ``ctypes.CDLL`` is to the callers of the native library, for a library in another process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._block, self._scratch = Block(host), Block(host)
        self._pools: list[tuple[int, int]] = []
        self._most_scratch = 0

    def own_pools(self) -> None:
        """Remembers where caches lie: a layer does not say how many blocks it has. To be called before
        ``cpu_kernels.cache`` is imported."""
        assert "cpu_kernels.cache" not in sys.modules
        huge = library.huge

        def remembered(size: int) -> Any:
            memory = huge(size)
            self._pools.append((memory.ctypes.data, size))
            return memory

        library.huge = remembered

    # ------------------------------------------------------------ functions of the library

    def jk_isa(self) -> int:
        return self._host.call("isa")

    def jk_isa_runs(self, number: int) -> int:
        return self._host.call("isa_runs", number)

    def jk_team_new(self, threads: int, cpus: Any) -> int:
        return self._host.call("team_new", threads)

    def jk_team_free(self, team: int) -> None:
        self._host.later("team_free", team)

    def jk_weight_free(self, weight: int) -> None:
        self._host.later("weight_free", weight)

    def jk_weight_bytes(self, weight: int) -> int:
        return self._host.call("weight_bytes", weight)

    def jk_linear_scratch(self, weight: int, rows: int) -> int:
        return self._host.call("linear_scratch", weight, rows)

    def jk_pack(self, parts: Any, n: int, use: int, activations: int, isa: int, out: Any) -> int:
        mirror = Mirror(self._host, self._block)
        copies = type(parts).from_buffer_copy(parts)
        mirror.add(ctypes.addressof(copies), ctypes.sizeof(copies))
        for part in parts:
            groups = part.k // part.group if part.group else 0
            row = part.k * _WHOLE_BYTES[part.dtype] if part.dtype in _WHOLE_BYTES else (part.k + 1) // 2
            mirror.add(part.q, (part.n - 1) * part.q_stride + row)
            mirror.add(part.scale, 4 * ((part.n - 1) * part.scale_stride + groups))
            mirror.add(part.offset, 4 * ((part.n - 1) * part.offset_stride + groups))
            mirror.add(part.perm, 4 * part.k)
        mirror.place()
        for part in copies:
            for name in ("q", "scale", "offset", "perm"):
                setattr(part, name, mirror.of(getattr(part, name)))
        mirror.send()
        result = self._host.call("pack", mirror.of(ctypes.addressof(copies)), n, use, activations, isa)
        if result < 0:
            return -result
        out._obj.value = result
        return 0

    def jk_linear_run(
        self, team: int, weights: Any, n: int, x: int, ldx: int, rows: int, y: int, ldy: int, bias: int | None,
        scratch: int, repeat: int,
    ) -> None:  # fmt: skip
        columns = max(self._host.call("weight_columns", w) for w in weights)
        outputs = max(self._host.call("weight_rows", w) for w in weights)
        mirror = Mirror(self._host, self._block)
        mirror.add(ctypes.addressof(weights), ctypes.sizeof(weights))
        mirror.add(x, 4 * ((rows - 1) * ldx + columns))
        mirror.add(y, 4 * ((rows - 1) * ldy + outputs))
        mirror.add(bias, 4 * outputs)
        mirror.place()
        room = Block(self._host)
        room.ensure(max(self.jk_linear_scratch(w, rows) for w in weights))
        mirror.send()
        self._host.call(
            "linear_run", team, mirror.of(ctypes.addressof(weights)), n, mirror.of(x), ldx, rows, mirror.of(y), ldy,
            mirror.of(bias), room.address, repeat,
        )  # fmt: skip
        mirror.fetch()
        if room.address:
            room.check()
            self._host.call("free", room.address)

    def jk_embed_run(self, team: int, table: int, ids: int, n: int, scale: float, y: int, ldy: int) -> None:
        mirror = Mirror(self._host, self._block)
        mirror.add(ids, 4 * n)
        mirror.add(y, 4 * ((n - 1) * ldy + self._host.call("weight_columns", table)))
        mirror.place()
        mirror.send()
        (bits,) = struct.unpack("<i", struct.pack("<f", scale))
        self._host.call("embed_run", team, table, mirror.of(ids), n, bits, mirror.of(y), ldy)
        mirror.fetch()

    def jk_call_scratch(self, call: Any, threads: int, bounds: Any) -> int:
        mirror = Mirror(self._host, self._block)
        copy = type(call._obj).from_buffer_copy(call._obj)
        mirror.add(ctypes.addressof(copy), ctypes.sizeof(copy))
        if bounds is not None:
            mirror.add(ctypes.addressof(bounds), ctypes.sizeof(bounds))
        layer = self._layer(copy, mirror)
        mirror.place()
        if layer is not None:
            copy.ptr[0] = mirror.of(ctypes.addressof(layer))
        mirror.send()
        limits = 0 if bounds is None else mirror.of(ctypes.addressof(bounds))
        size = self._host.call("call_scratch", mirror.of(ctypes.addressof(copy)), threads, limits)
        self._most_scratch = max(size, self._most_scratch)
        return size

    def jk_run(self, team: int, calls: Any, n: int, counts: int, bases: Any, scratch: int, times: int | None) -> int:
        mirror = Mirror(self._host, self._block)
        copies = (type(calls[0]) * max(n, 1))(*[calls[i] for i in range(n)])
        places = type(bases).from_buffer_copy(bases)
        for thing in (copies, places):
            mirror.add(ctypes.addressof(thing), ctypes.sizeof(thing))
        used = max((a.count for call in copies for a in call.arg), default=-1) + 1
        mirror.add(counts, 4 * used)
        mirror.add(times, 8 * n)
        layers = [self._layer(call, mirror) for call in copies]
        self._operands(copies, (ctypes.c_int32 * used).from_address(counts), bases, mirror)
        mirror.place()
        for call, layer in zip(copies, layers, strict=True):
            if layer is not None:
                for name in ("k", "v", "k_scale", "v_scale"):
                    setattr(layer, name, mirror.of(getattr(layer, name)))
                call.ptr[0] = mirror.of(ctypes.addressof(layer))
            for a in call.arg:
                if a.space == 0:
                    a.at = mirror.of(a.at)
        for space in range(len(places)):
            with_operands = any(a.space == space for call in copies for a in call.arg)
            places[space] = mirror.of(bases[space]) if space and with_operands else 0
        self._scratch.ensure(self._most_scratch)
        mirror.send()
        result = self._host.call(
            "run", team, mirror.of(ctypes.addressof(copies)), n, mirror.of(counts) if used else 0,
            mirror.of(ctypes.addressof(places)), self._scratch.address, mirror.of(times),
        )  # fmt: skip
        mirror.fetch()
        self._scratch.check()
        return result

    # ------------------------------------------------------------ what a call points at

    def _layer(self, call: Any, mirror: Mirror) -> Any:
        """A copy of the cache layer that a call works on, and its pool among what is mirrored; None for other ops."""
        from cpu_kernels.native import OPS, KVLayerStruct

        if OPS[call.op] not in _KV_OPS:
            return None
        layer = KVLayerStruct.from_buffer_copy(KVLayerStruct.from_address(call.ptr[0]))
        mirror.add(ctypes.addressof(layer), ctypes.sizeof(layer))
        at, size = next((at, size) for at, size in reversed(self._pools) if at <= layer.k < at + size)
        mirror.add(at, size)
        return layer

    @staticmethod
    def _operands(calls: Any, counts: Any, bases: Any, mirror: Mirror) -> None:
        """Operands at addresses one by one; those in a space all together, from its beginning to the last of them."""
        ends: dict[int, int] = {}
        for call in calls:
            for a in call.arg:
                rows = a.rows if a.count < 0 else counts[a.count] + a.extra
                size = ((rows - 1) * a.stride + a.cols) * a.size if rows > 0 else 0
                if a.space == 0:
                    mirror.add(a.at, max(size, 1))
                elif a.space > 0:
                    ends[a.space] = max(ends.get(a.space, 1), a.at + size)
        for space, end in ends.items():
            mirror.add(bases[space], end)


def main(command: str, module: str, *arguments: str) -> None:
    host = Host(shlex.split(command))
    emulated = Emulated(host)
    emulated.own_pools()
    library._load = lambda: emulated
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
