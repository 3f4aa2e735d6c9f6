"""Builds ``_native.so`` in place: one object a source, and for ``kernels_*.cpp`` one object an instruction set.

    python -m cpu_kernels.build [--force] [--verbose]

Needs a C++17 compiler (``$CXX``, or g++, clang++, c++ on the path) and nothing else. What was built is known by the
hash of sources, flags and compiler, so a call with nothing to do takes milliseconds. Every object sees
``JK_HAVE_<SET>`` for each instruction set in the library; those of ``kernels_*.cpp`` also ``JK_ISA`` (the set's name,
for symbol suffixes) and ``JK_ISA_<SET>``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = "_native.so"

_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    # a contracted a*b+c would give a row other bits in one kernel than in another
    "-ffp-contract=off", "-Wall", "-Wextra", "-pthread",
    # gcc 12 warns of its own intrinsics
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",
)  # fmt: skip
_LINK = ("-shared", "-pthread", "-Wl,--no-undefined" if sys.platform == "linux" else "-Wl,-undefined,error")
_X86 = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
        "-mavx512bf16", "-mprefer-vector-width=512",
    ),
}  # fmt: skip
_ARM = {"baseline": (), "neon": ("-march=armv8.2-a+dotprod+fp16",)}


@dataclass(frozen=True, slots=True)
class Built:
    """Outcome: path of the library, or the reason why there is none; whether anything was compiled, and how long."""

    path: Path | None
    reason: str
    compiled: int = 0
    seconds: float = 0.0


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Compiler flags of each instruction set that is built for an architecture."""
    name = machine.lower()
    if name in ("x86_64", "amd64"):
        return _X86
    return _ARM if name in ("aarch64", "arm64") else {"baseline": ()}


def find_compiler() -> list[str] | None:
    """The C++ compiler as the start of a command line, or None."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["g++", "clang++", "c++"]:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    return None


def build(*, force: bool = False, verbose: bool = False, out: Path | None = None, machine: str | None = None) -> Built:
    """Brings the library up to date with the sources. ``out``: another place for it; ``machine``: cross-compiling.

    Never raises for a missing compiler or a source that it refuses: ``reason`` then says what was tried.
    """
    begin = time.monotonic()
    library = out or HERE / LIBRARY
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        tried = f"$CXX is {named!r}, which is not there" if named else "none of g++, clang++, c++ is on the path"
        return Built(None, f"no C++ compiler: {tried}; install one (Debian: apt install g++) and build again")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return Built(None, f"{shlex.join(compiler)} --version failed: {error}")
    objects = list(_objects(instruction_sets(machine or platform.machine())))
    digests = {name: _digest(version, source, flags) for name, source, flags in objects}
    want = hashlib.sha256(json.dumps([digests, _LINK, compiler]).encode()).hexdigest()
    note = library.with_suffix(".json")
    try:
        work = _work_folder()
        with _lock(work / "lock"):
            if not force and library.exists() and _noted(note, "hash") == want:
                return Built(library, "up to date")
            todo = [(n, s, f, work / f"{n}-{digests[n][:20]}.o") for n, s, f in objects]
            missing = [job for job in todo if force or not job[3].exists()]
            for complaint in _compile(compiler, missing, verbose):
                return Built(None, complaint, len(missing), time.monotonic() - begin)
            complaint = _link(compiler, [job[3] for job in todo], library, verbose)
            if complaint:
                return Built(None, complaint, len(missing), time.monotonic() - begin)
            note.write_text(json.dumps({"hash": want, "sources": _sources()}))
            _sweep(work, {job[3] for job in todo})
    except OSError as error:
        return Built(None, f"cannot write the native library: {error}")
    return Built(library, "built", len(missing), time.monotonic() - begin)


def made_from_these_sources() -> bool:
    """Whether the library in place was built of the sources as they are, whichever compiler did it."""
    library = HERE / LIBRARY
    return library.exists() and _noted(library.with_suffix(".json"), "sources") == _sources()


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _objects(sets: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """(object name, source, flags)."""
    have = tuple(f"-DJK_HAVE_{name.upper()}" for name in sets)
    for source in sorted(SOURCES.glob("*.cpp")):
        if not source.name.startswith("kernels_"):
            yield source.stem, source, (*_COMMON, *have)
            continue
        for name, flags in sets.items():
            yield f"{source.stem}-{name}", source, (
                *_COMMON, *have, *flags, f"-DJK_ISA={name}", f"-DJK_ISA_{name.upper()}"
            )  # fmt: skip


def _digest(version: str, source: Path, flags: Sequence[str]) -> str:
    """Of everything that decides an object: the source, the headers that it includes, the flags and the compiler."""
    digest = hashlib.sha256(version.encode())
    digest.update("\0".join(flags).encode())
    for path in _with_headers(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _with_headers(source: Path) -> list[Path]:
    """A source and what it includes of ours, directly or through another."""
    seen, todo = {source}, [source]
    while todo:
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', todo.pop().read_text(), re.MULTILINE):
            path = SOURCES / name
            if path.exists() and path not in seen:
                seen.add(path)
                todo.append(path)
    return sorted(seen)


def _work_folder() -> Path:
    """Where objects are kept: build/ of a checkout, otherwise a folder of the user's own."""
    root = HERE.parent
    if (root / "pyproject.toml").exists() and os.access(root, os.W_OK):
        folder = root / "build" / "cpu_kernels"
    else:
        folder = Path(tempfile.gettempdir()) / f"jumar-build-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _noted(path: Path, what: str) -> str | None:
    try:
        return str(json.loads(path.read_text())[what])
    except (OSError, ValueError, KeyError):
        return None


def _compile(compiler: list[str], jobs: list[tuple[str, Path, tuple[str, ...], Path]], verbose: bool) -> Iterator[str]:
    """Compiles side by side; yields the compiler's complaint of each that failed."""

    def one(job: tuple[str, Path, tuple[str, ...], Path]) -> str | None:
        name, source, flags, target = job
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [*compiler, *flags, "-c", str(source), "-o", str(partial)]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        if verbose:
            print(f"{time.monotonic() - begin:6.1f} s  {name}", file=sys.stderr)
            if done.stderr:
                print(done.stderr, file=sys.stderr)
        if done.returncode:
            return f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}"
        partial.replace(target)
        return None

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        yield from [error for error in pool.map(one, jobs) if error]


def _link(compiler: list[str], objects: list[Path], library: Path, verbose: bool) -> str:
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler, *_LINK, *map(str, objects), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if verbose and done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        partial.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}"
    # a new file, never bytes changed under a process that has the old one mapped
    partial.replace(library)
    return ""


def _sweep(work: Path, keep: set[Path]) -> None:
    """Objects of sources as they no longer are, after a day (another checkout's build may still want them)."""
    old = time.time() - 86400
    for path in work.glob("*.o"):
        if path not in keep and path.stat().st_mtime < old:
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="builds the native CPU kernels in place")
    parser.add_argument("--force", action="store_true", help="compile everything anew")
    parser.add_argument("--verbose", action="store_true", help="time of each object, warnings")
    options = parser.parse_args(arguments)
    done = build(force=options.force, verbose=options.verbose)
    print(f"{done.path or 'not built'}: {done.reason} ({done.compiled} objects, {done.seconds:.1f} s)")
    return 0 if done.path else 1


if __name__ == "__main__":
    sys.exit(main())
