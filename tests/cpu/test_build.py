"""Building the native library: what it says without a compiler, and that it builds only what changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cpu_kernels import build as native_build
from cpu_kernels import library
from device.cpu import CpuDevice
from device.errors import ConfigError


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    built = native_build.build(out=tmp_path / "x.so")
    assert built.path is None
    assert "no C++ compiler" in built.reason and "no-such-compiler" in built.reason
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install one" in native_build.build(out=tmp_path / "x.so").reason


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken-cxx"
    script.write_text("#!/bin/sh\n[ \"$1\" = --version ] && { echo 1.0; exit 0; }\necho 'error: tired' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(native_build, "_work_folder", lambda: tmp_path)
    built = native_build.build(out=tmp_path / "x.so")
    assert built.path is None and "error: tired" in built.reason


@pytest.mark.skipif(native_build.find_compiler() is None, reason="no C++ compiler")
def test_nothing_is_built_twice() -> None:
    first = native_build.build()
    assert first.path is not None, first.reason
    again = native_build.build()
    assert again.reason == "up to date" and again.compiled == 0 and again.path == first.path


@pytest.mark.skipif(native_build.find_compiler() is None, reason="no C++ compiler")
def test_a_library_of_other_sources_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native_build.build().path is not None
    assert native_build.made_from_these_sources()
    other = tmp_path / "src"
    shutil.copytree(native_build.SOURCES, other)
    (other / "call.h").write_text("// changed\n")
    monkeypatch.setattr(native_build, "SOURCES", other)
    assert not native_build.made_from_these_sources()


def test_without_a_library_the_portable_kernels_run_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", lambda: "no C++ compiler: none is on the path; install one")
    device = CpuDevice("float32", kernels="auto")
    try:
        assert {label for _, label, _ in device.report.ops} == {"numpy", "composed of plain ops"}
        (notice,) = device.report.notices
        assert notice.startswith("warning: the portable NumPy kernels run") and "install one" in notice
    finally:
        device.close()
    with pytest.raises(ConfigError, match="kernels = 'native': no C"):
        CpuDevice("float32", kernels="native")


def test_what_the_native_kernels_cannot_compute_in_the_portable_ones_do() -> None:
    device = CpuDevice("float64", kernels="auto")
    try:
        assert "float32, not float64" in device.report.notices[0] and device.dtype == "float64"
    finally:
        device.close()
