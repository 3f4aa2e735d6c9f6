"""The doctor on pretended machines: what it calls wrong, what it advises, and what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device import toml
from device.doctor import Finding, format_doctor, install_command, run_doctor, worst
from device.machine import Command, Machine
from device.probe import Survey
from device.versions import matches, release, short, version_matrix
from tests.device.fake_machine import (
    A2_CHIPS,
    Tools,
    a2_server,
    a3_server,
    ascend_machine,
    cuda_machine,
    machine,
    mapping,
    npu_smi,
    table,
)

GOOD_CXX = "12.2.0\n"


def findings(m: Machine) -> dict[tuple[str, str], Finding]:
    found = run_doctor(Survey(m))
    named = {(f.section, f.name): f for f in found}
    assert len(named) == len(found), "two findings of one name"
    for f in found:
        assert bool(f.advice) == (f.level in ("warn", "error")), f
    return named


def bad(m: Machine, section: str | None = None) -> dict[str, str]:
    return {
        name: f.level
        for (where, name), f in findings(m).items()
        if f.level in ("warn", "error") and section in (None, where)
    }


def ascend(root: Path, *, driver: str = "25.5.0", cann: str = "9.1.0", **kwargs: Any) -> Machine:
    """An A2 server where everything fits."""
    tools = Tools(
        npu_smi=npu_smi(table(A2_CHIPS, "910B3"), mapping(A2_CHIPS, "Ascend")), bisheng="", **{"g++": GOOD_CXX}
    )
    files = {
        "usr/local/Ascend/driver/version.info": f"Version={driver}\n",
        "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": f"version={cann}\n",
    }
    environ = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann", **kwargs.pop("environ", {})}
    return ascend_machine(root, tools, files=files, environ=environ, **kwargs)


# ---------------------------------------------------------------- every machine


def test_a_plain_machine(tmp_path: Path) -> None:
    """No accelerator: nothing about accelerators is wrong, and no vendor's tool is run."""
    tools = Tools(**{"g++": GOOD_CXX})
    found = findings(machine(tmp_path, tools))
    assert worst(list(found.values())) == "ok"
    assert {f.section for f in found.values() if f.level == "absent"} == {"ascend", "mindspore", "cuda"}
    assert found["ascend", "Ascend NPU"].found == "not present: no npu-smi and no /dev/davinci*"
    assert {args[0] for args in tools.ran} == {"g++"}
    text = format_doctor(list(found.values()))
    assert text.endswith("0 error(s), 0 warning(s)\n") and "numpy 2.2.6" in text


def test_python_and_packages(tmp_path: Path) -> None:
    m = machine(tmp_path, Tools(**{"g++": GOOD_CXX}), python=(3, 9, 2), packages={"numpy": "1.24.0", "tqdm": ""})
    assert bad(m) == {"Python": "error", "numpy": "error", "tqdm": "error", "tomli": "error"}
    found = findings(m)
    assert found["core", "tqdm"].advice == "pip install 'tqdm>=4.66'"
    assert (found["core", "numpy"].found, found["core", "numpy"].expected) == ("1.24.0", ">=1.26")
    text = format_doctor(list(found.values()))
    assert re.search(r"^core +error +numpy: 1.24.0, expected >=1.26\n +-> pip install 'numpy>=1.26'$", text, re.M)
    assert text.endswith("4 error(s), 0 warning(s)\n")


@pytest.mark.parametrize(
    ("tools", "level", "found"),
    [
        ({"g++": "12.2.0\n"}, "ok", "12.2.0"),
        ({"clang++": "19.1.7\n"}, "ok", "19.1.7"),
        ({"g++": "8.5.0\n", "clang++": "19.1.7\n"}, "ok", "19.1.7"),
        ({"g++": "8.5.0\n"}, "warn", "g++ 8.5.0 too old"),
        ({}, "warn", "none"),
        ({"g++": Command("failed", "xcrun: error", 1)}, "warn", "none"),
        ({"g++": Command("timeout")}, "warn", "none"),
    ],
)
def test_compilers(tmp_path: Path, tools: dict[str, Any], level: str, found: str) -> None:
    m = machine(tmp_path, Tools(**tools), files={"etc/os-release": 'ID=ubuntu\nNAME="Ubuntu"\n'})
    cpu = [f for f in run_doctor(Survey(m)) if f.section == "cpu" and f.name != "CPU"]
    assert [(f.level, f.found) for f in cpu] == [(level, found)]
    assert ("sudo apt-get install g++" in cpu[0].advice) == (level == "warn")


@pytest.mark.parametrize(
    ("release_file", "system", "command"),
    [
        ("ID=debian\n", "Linux", "sudo apt-get install g++"),
        ('NAME="openEuler"\n', "Linux", "sudo dnf install gcc-c++"),
        ('ID_LIKE="suse"\n', "Linux", "sudo zypper install gcc-c++"),
        ("", "Darwin", "xcode-select --install"),
        ("ID=void\n", "Linux", "install g++ with the system's package manager"),
    ],
)
def test_how_to_install_a_compiler(tmp_path: Path, release_file: str, system: str, command: str) -> None:
    m = machine(tmp_path, files={"etc/os-release": release_file}, system=system)
    assert install_command(m, "g++") == command


# ---------------------------------------------------------------- Ascend


def test_a_good_ascend_server(tmp_path: Path) -> None:
    found = findings(ascend(tmp_path))
    assert bad(ascend(tmp_path)) == {"device": "warn"}, "only that this build has no Ascend device yet"
    assert found["ascend", "NPUs"].found == "8 visible (Ascend910B3)"
    assert found["ascend", "driver for CANN 9.1"].level == "ok"


@pytest.mark.parametrize(
    ("kwargs", "name", "level", "advice"),
    [
        ({"driver": "25.0.RC1"}, "driver for CANN 9.1", "error", "install driver (Ascend HDK) 26.2"),
        ({"driver": "25.4.0"}, "driver for CANN 9.1", "warn", "install driver (Ascend HDK) 26.2"),
        ({"cann": "10.0.0"}, "driver for CANN 10.0", "warn", "developer/download/compatibility"),
        ({"cann": "8.5.0"}, "CANN", "warn", "install CANN >=9.1"),
        ({"packages": {"torch-npu": ""}}, "torch-npu", "error", "pip install 'torch-npu==2.13.*'"),
        ({"packages": {"torch": ""}}, "torch", "error", "pip install 'torch==2.13.*' --index-url"),
        ({"packages": {"torch": "2.14.0+cpu"}}, "torch", "error", "pip install 'torch==2.13.*' --index-url"),
        ({"packages": {"torch-npu": "2.9.0", "torch": "2.9.1"}}, "torch-npu", "warn", "torch-npu==2.13.*"),
        ({"environ": {"ASCEND_RT_VISIBLE_DEVICES": "1, 2"}}, "NPUs", "error", "unset ASCEND_RT_VISIBLE_DEVICES"),
        ({"packages": {"triton": "3.7.1", "triton-ascend": "3.2.0"}}, "triton", "warn", "pip uninstall triton"),
    ],
)
def test_mismatches_on_ascend(tmp_path: Path, kwargs: dict[str, Any], name: str, level: str, advice: str) -> None:
    m = ascend(tmp_path, **kwargs)
    found = findings(m)["ascend", name]
    assert found.level == level and advice in found.advice
    assert bad(m) == {"device": "warn", name: level}


def test_a_driver_newer_than_the_table_is_fine(tmp_path: Path) -> None:
    assert bad(ascend(tmp_path, driver="27.0.1")) == {"device": "warn"}


def test_cann_of_another_torch_npu(tmp_path: Path) -> None:
    packages = {"torch-npu": "2.8.0.post4", "torch": "2.8.0"}
    found = findings(ascend(tmp_path, packages=packages))["ascend", "CANN for torch-npu 2.8"]
    assert (found.level, found.found, found.expected) == ("warn", "9.1.0", "one of 8.3, 8.5, 9.0")
    assert found.advice == "install CANN 9.0, or torch and torch-npu 2.12.*"


def test_torch_from_pypi_on_an_ascend_server(tmp_path: Path) -> None:
    """It works, and brings gigabytes of CUDA; the CPU build does not."""
    packages = {"torch": "2.13.0", "nvidia-cudnn-cu13": "9.20", "nvidia-nccl-cu13": "2.29", "cuda-toolkit": "13.0.3"}
    found = findings(ascend(tmp_path, packages=packages))["ascend", "torch build"]
    assert found.level == "warn" and "3 CUDA packages" in found.found
    assert "--index-url https://download.pytorch.org/whl/cpu" in found.advice and "nvidia-nccl-cu13" in found.advice
    assert "torch build" not in bad(ascend(tmp_path, packages={"torch": "2.13.0"}))
    assert "torch build" not in bad(ascend(tmp_path, packages={**packages, "torch": "2.13.0+cpu"}))


def test_an_ascend_server_without_anything(tmp_path: Path) -> None:
    tools = Tools(npu_smi=npu_smi("", mapping(A2_CHIPS, "Ascend910B3")), **{"g++": GOOD_CXX})
    m = machine(tmp_path, tools, arch="aarch64")
    assert bad(m) == {"device": "warn", "driver": "error", "CANN": "error", "torch-npu": "error", "torch": "error"}


def test_environment_and_compiler_of_cann(tmp_path: Path) -> None:
    m = a2_server(tmp_path)
    assert {"environment": "warn", "bisheng": "warn"}.items() <= bad(m, "ascend").items()
    assert "set_env.sh" in findings(m)["ascend", "environment"].advice


def test_ill_cards_are_named(tmp_path: Path) -> None:
    found = findings(a3_server(tmp_path))
    assert found["ascend", "ascend:5"].level == "error" and found["ascend", "NPUs"].found.startswith("16 visible")


def test_a_hanging_npu_smi_is_an_error_not_a_hang(tmp_path: Path) -> None:
    m = ascend_machine(tmp_path, Tools(npu_smi=Command("timeout"), **{"g++": GOOD_CXX}))
    assert findings(m)["ascend", "NPUs"].found == "npu-smi does not answer"


def test_torch_npu_where_there_is_no_cann(tmp_path: Path) -> None:
    """import torch itself fails then, also on a machine without an NPU."""
    m = machine(tmp_path, Tools(**{"g++": GOOD_CXX}), packages={"torch": "2.13.0", "torch-npu": "2.13.0"})
    assert bad(m) == {"torch-npu without CANN": "error"}
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in findings(m)["ascend", "torch-npu without CANN"].advice


def test_mindspore(tmp_path: Path) -> None:
    only = {"mindspore": "2.10.0", "torch": "", "torch-npu": "", "numpy": "1.26.4"}
    m = ascend(tmp_path, packages=only)
    assert bad(m, "ascend") == {"device": "warn"}, "without torch-npu MindSpore drives the card"
    assert bad(m, "mindspore") == {"CANN": "warn"}, "no pairing of 2.10 is published"
    m = ascend(tmp_path, packages={**only, "mindspore": "2.9.0", "numpy": "2.2.0"}, python=(3, 13, 1))
    assert bad(m, "mindspore") == {"mindspore": "warn", "Python": "error", "numpy": "error", "CANN": "warn"}
    found = findings(m)
    assert found["mindspore", "numpy"].advice == "pip install 'numpy<2'"
    assert found["mindspore", "CANN"].advice.startswith("install CANN 9.0")
    plain = machine(tmp_path / "plain", packages={"mindspore": "2.10.0", "numpy": "1.26.4"})
    assert bad(plain, "mindspore") == {}


# ---------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    ("packages", "wrong"),
    [
        ({}, {}),
        ({"torch": ""}, {"torch": "error"}),
        ({"torch": "2.13.0+cpu"}, {"torch build": "error"}),
        ({"triton": ""}, {"triton": "error"}),
        ({"triton": "3.5.0"}, {"triton": "warn"}),
        ({"torch": "2.14.1", "triton": "3.8.0"}, {"torch": "warn"}),
    ],
)
def test_cuda_packages(tmp_path: Path, packages: dict[str, str], wrong: dict[str, str]) -> None:
    assert bad(cuda_machine(tmp_path, packages=packages), "cuda") == {"device": "warn", **wrong}


@pytest.mark.parametrize(
    ("driver", "torch", "name", "level"),
    [
        ("570.10", "2.13.0", "driver for CUDA 13", "error"),
        ("580.95.05", "2.13.0", "driver for CUDA 13", "ok"),
        ("570.10", "2.9.0+cu128", "driver for CUDA 12", "ok"),
        ("470.57", "2.9.0+cu128", "driver for CUDA 12", "error"),
    ],
)
def test_cuda_driver(tmp_path: Path, driver: str, torch: str, name: str, level: str) -> None:
    answer = f"0, GPU-a, NVIDIA L4, 0:1, 23034, 22000, {driver}, 8.9\n"
    m = cuda_machine(tmp_path, answer, packages={"torch": torch})
    found = findings(m)["cuda", name]
    assert found.level == level and (level == "ok" or "install NVIDIA driver" in found.advice)


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("2.13.0+cpu", "==2.13.*", True), ("2.13", "==2.13.*", True), ("2.130.0", "==2.13.*", False),
        ("9.1.0-beta.1", ">=9.1", True), ("8.3.RC1", ">=8.3,<9", True), ("8.3.RC1", ">=8.5", False),
        ("2.0", "<2", False), ("1.26.4", "<2", True), ("1.26", "==1.26.0", True), ("1.26.1", "!=1.26.*", False),
        ("10.0", ">9.9", True), ("3.12.9", ">=3.9,<3.13", True), ("3.13.0", ">=3.9,<3.13", False),
        ("1.0", "<=1", True), ("1.0.1", "<=1", False), ("1.26.1", "==1.26", False), ("9.9.1", ">9.9", True),
        ("", ">=0", False), ("V100", ">=99", True), ("unknown", ">=0", False),
    ],
)  # fmt: skip
def test_matches(version: str, specifier: str, fits: bool) -> None:
    assert matches(version, specifier) is fits


@pytest.mark.parametrize("specifier", ["", "2.0", "~=2.0", ">=2.*", ">= a", ">=1,,<2"])
def test_specifiers_that_cannot_be_read(specifier: str) -> None:
    with pytest.raises(ValueError, match="not a version specifier"):
        matches("1.0", specifier)


numbers = st.lists(st.integers(0, 30), min_size=1, max_size=4)


@given(numbers, numbers)
def test_versions_order_like_their_numbers(a: list[int], b: list[int]) -> None:
    left, right = ".".join(map(str, a)), ".".join(map(str, b))
    width = max(len(a), len(b))
    below = a + [0] * (width - len(a)) < b + [0] * (width - len(b))
    assert matches(left, f"<{right}") == below
    assert matches(left, f">={right}") != below
    assert release(left) == tuple(a) and short(left) == ".".join(map(str, a[:2]))


def test_the_matrix_is_sound() -> None:
    """Every specifier can be read, pairings are lists of two-number versions, and the core is pyproject's."""
    matrix = version_matrix()
    project = toml.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert matrix["python"]["requires"] == project["requires-python"]
    core = {name + spec for name, spec in matrix["core"].items()}
    assert core == {d for d in project["dependencies"] if ";" not in d}
    extras = project["optional-dependencies"]
    assert {f"torch{matrix['ascend']['torch']}", f"torch-npu{matrix['ascend']['torch-npu']}"} == set(extras["ascend"])
    assert {f"mindspore{matrix['mindspore']['mindspore']}", f"numpy{matrix['mindspore']['numpy']}"} == set(
        extras["mindspore"]
    )
    for text in _specifiers(matrix):
        matches("1.0", text)
    for pairs in (matrix["ascend"]["torch_npu_cann"], matrix["ascend"]["cann_driver"], matrix["mindspore"]["cann"]):
        for key, values in pairs.items():
            assert short(key) == key and values == sorted({short(v) for v in values}, key=release)


def _specifiers(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [text for value in node.values() for text in _specifiers(value)]
    return [node] if isinstance(node, str) and re.match(r"[<>=!]", node) else []


def test_this_machine() -> None:
    """The environment that runs the tests has what Jumar needs."""
    found = run_doctor()
    assert [f for f in found if f.section in ("python", "core") and f.level != "ok"] == []
    assert "warning(s)" in format_doctor(found)
