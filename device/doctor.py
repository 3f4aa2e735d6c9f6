"""``jumar doctor``: compares this machine with the version matrix and says for each mismatch what to install.

Only what concerns the machine is judged: without an NPU the Ascend section is one line, "not present".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from device.cards import Probe, readable_bytes
from device.machine import Machine
from device.probe import BROKEN_HEALTH, IMPLEMENTED, Survey
from device.versions import matches, release, short, version_matrix

Level = Literal["ok", "warn", "error", "absent"]
_SECTIONS = ("python", "core", "cpu", "ascend", "mindspore", "cuda")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``level``: ok; warn: works, but not as meant or not as tested; error: does not work; absent: does not
    concern this machine. ``advice`` says what to do and is empty only when nothing is."""

    section: str
    name: str
    level: Level
    found: str
    expected: str = ""
    advice: str = ""


def run_doctor(survey: Survey | None = None, matrix: Mapping[str, Any] | None = None) -> list[Finding]:
    """Every finding, section by section. Runs the vendors' tools where they are installed; imports nothing heavy."""
    survey = survey or Survey()
    matrix = matrix or version_matrix()
    return [
        *_python(survey.machine, matrix),
        *_core(survey.machine, matrix["core"]),
        *_cpu(survey, matrix["compilers"]),
        *_ascend(survey, matrix["ascend"]),
        *_mindspore(survey, matrix["mindspore"]),
        *_cuda(survey, matrix["cuda"]),
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level; ``jumar doctor`` ends with an error when it is "error"."""
    levels = {f.level for f in findings}
    return "error" if "error" in levels else "warn" if "warn" in levels else "ok"


def format_doctor(findings: Sequence[Finding]) -> str:
    """Text for people: what is fine on one line a section, everything else with what is expected and what to do."""
    lines: list[str] = []
    for section in _SECTIONS:
        mine = [f for f in findings if f.section == section]
        fine = [f"{f.name} {f.found}" for f in mine if f.level == "ok"]
        lines += [f"{section:<10} ok     {', '.join(fine)}"] if fine else []
        for f in mine:
            if f.level == "absent":
                lines.append(f"{section:<10} -      {f.name}: {f.found}")
            elif f.level != "ok":
                expected = f", expected {f.expected}" if f.expected else ""
                lines.append(f"{section:<10} {f.level:<6} {f.name}: {f.found}{expected}")
                lines.append(f"{'':<17} -> {f.advice}")
    counts = {level: sum(f.level == level for f in findings) for level in ("error", "warn")}
    lines.append(f"{counts['error']} error(s), {counts['warn']} warning(s)")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- every machine


def _python(machine: Machine, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    version, wanted = ".".join(map(str, machine.python)), matrix["python"]["requires"]
    good = matches(version, wanted)
    advice = "" if good else f"make the environment with a newer Python ({wanted}), as in python3.12 -m venv .venv"
    yield Finding("python", "Python", "ok" if good else "error", version, wanted, advice)


def _core(machine: Machine, wanted: Mapping[str, str]) -> Iterator[Finding]:
    needed = dict(wanted)
    if machine.python < (3, 11):
        needed["tomli"] = ">=2.0"
    for package, specifier in needed.items():
        yield _package(machine, "core", package, specifier, missing="error", wrong="error")


def _package(machine: Machine, section: str, package: str, specifier: str, *, missing: Level, wrong: Level) -> Finding:
    version = machine.version(package)
    advice = f"pip install '{package}{specifier}'"
    if version is None:
        return Finding(section, package, missing, "not installed", specifier, advice)
    if not matches(version, specifier):
        return Finding(section, package, wrong, version, specifier, advice)
    return Finding(section, package, "ok", version, specifier)


def _cpu(survey: Survey, compilers: Mapping[str, str]) -> Iterator[Finding]:
    card = survey.cpu.cards[0]
    memory = f"{readable_bytes(card.memory_free)} of {readable_bytes(card.memory_total)} free"
    yield Finding("cpu", "CPU", "ok", f"{card.model}, {card.arch}, {memory}")
    found = {name: compiler_version(survey.machine, name) for name in compilers}
    for name, version in found.items():
        if version is not None and matches(version, compilers[name]):
            yield Finding("cpu", name, "ok", version, compilers[name])
            return
    expected = " or ".join(f"{name} {spec}" for name, spec in compilers.items())
    old = [f"{name} {version}" for name, version in found.items() if version is not None]
    yield Finding(
        "cpu",
        "C++ compiler",
        "warn",
        f"{' and '.join(old)} too old" if old else "none",
        expected,
        f"{install_command(survey.machine, 'g++')}; without it no kernels are compiled on this machine",
    )


def compiler_version(machine: Machine, name: str) -> str | None:
    """Version of an installed C++ compiler, None without it (or when it does not run)."""
    ended = machine.run(name, "-dumpfullversion", "-dumpversion")
    version = ended.text.strip().splitlines()[0].strip() if ended.status == "ok" and ended.text.strip() else ""
    return version if release(version) else None


def install_command(machine: Machine, package: str) -> str:
    """How this system installs a C++ compiler."""
    text = machine.read("/etc/os-release").lower()
    if machine.system == "Darwin":
        return "xcode-select --install"
    if any(name in text for name in ("debian", "ubuntu")):
        return f"sudo apt-get install {package}"
    if any(name in text for name in ("fedora", "rhel", "centos", "openeuler", "rocky", "kylin")):
        return f"sudo dnf install {package.replace('g++', 'gcc-c++')}"
    if "suse" in text:
        return f"sudo zypper install {package.replace('g++', 'gcc-c++')}"
    return f"install {package} with the system's package manager"


# ---------------------------------------------------------------- Ascend


def _ascend(survey: Survey, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    probe, machine = survey.ascend, survey.machine
    if machine.version("torch-npu") and probe.versions["CANN"] is None:
        yield Finding(
            "ascend",
            "torch-npu without CANN",
            "error",
            "import torch fails on its own here",
            "CANN, or no torch-npu",
            "install CANN, or pip uninstall torch-npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    if not probe.present:
        yield Finding("ascend", "Ascend NPU", "absent", probe.trouble)
        return
    yield from _cards(probe, "NPUs")
    yield from _driver_and_cann(probe, machine, matrix)
    if machine.version("mindspore") and not machine.version("torch-npu"):
        return  # the other framework drives the card: its section says the rest
    yield from _torch_npu(probe, machine, matrix)
    yield from _torch_build(machine, matrix)
    if machine.version("triton-ascend") and machine.version("triton"):
        yield Finding(
            "ascend",
            "triton",
            "warn",
            "triton and triton-ascend are both installed",
            "one of them: they install the same module",
            "pip uninstall triton triton-ascend, then install the one you need in an environment of its own",
        )


def _cards(probe: Probe, what: str) -> Iterator[Finding]:
    kind = probe.kind
    if probe.trouble:
        yield Finding(kind, what, "error", probe.trouble, "at least one visible card", probe.advice)
    else:
        models = sorted({c.model for c in probe.visible})
        yield Finding(kind, what, "ok", f"{len(probe.visible)} visible ({', '.join(models)})")
    for card in probe.visible:
        if card.health.lower() in BROKEN_HEALTH:
            advice = f"see npu-smi info -t health -i {card.visible}; hide the card with the *_VISIBLE_DEVICES variable"
            yield Finding(kind, card.name, "error", f"health is {card.health}", "OK", advice)
        elif card.health == "Warning":
            yield Finding(kind, card.name, "warn", "health is Warning", "OK", "see npu-smi info -t health")
    if kind not in IMPLEMENTED:
        yield Finding(
            kind, "device", "warn", f"this build has no {kind} device yet", "", "use device = cpu until a later version"
        )


def _driver_and_cann(probe: Probe, machine: Machine, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    driver, cann = probe.versions["driver"], probe.versions["CANN"]
    site = "https://www.hiascend.com/cann/download"
    if driver is None:
        advice = "install the Ascend HDK driver and firmware; in a container mount /usr/local/Ascend/driver"
        yield Finding("ascend", "driver", "error", "no /usr/local/Ascend/driver/version.info", "a driver", advice)
    if cann is None:
        advice = f"install toolkit and ops from {site}, then source set_env.sh"
        yield Finding("ascend", "CANN", "error", "not found", matrix["cann"], advice)
        return
    good = matches(cann, matrix["cann"])
    advice = "" if good else f"install CANN {matrix['cann']} from {site}"
    yield Finding("ascend", "CANN", "ok" if good else "warn", cann, matrix["cann"], advice)
    if "ASCEND_HOME_PATH" not in machine.environ:
        advice = "source the set_env.sh of CANN before starting jumar (/usr/local/Ascend/cann/set_env.sh)"
        yield Finding("ascend", "environment", "warn", "ASCEND_HOME_PATH is not set", "set by set_env.sh", advice)
    if machine.which("bisheng") is None and machine.which("ccec") is None:
        advice = "source CANN's set_env.sh, or install the toolkit package and not only the runtime"
        yield Finding("ascend", "bisheng", "warn", "not on PATH", "the compiler for Ascend C kernels", advice)
    if driver is not None:
        yield _driver_for_cann(driver, cann, matrix["cann_driver"].get(short(cann)))


def _driver_for_cann(driver: str, cann: str, drivers: Sequence[str] | None) -> Finding:
    name = f"driver for CANN {short(cann)}"
    if drivers is None:
        advice = "see https://www.hiascend.com/developer/download/compatibility"
        return Finding("ascend", name, "warn", driver, "no pairing is known for this CANN", advice)
    newest, oldest = max(map(release, drivers)), min(map(release, drivers))
    if short(driver) in drivers or release(driver)[:2] > newest:
        return Finding("ascend", name, "ok", driver, ", ".join(drivers))
    advice = f"install driver (Ascend HDK) {drivers[-1]} or another of those, or a CANN that pairs with {driver}"
    level: Level = "error" if release(driver)[:2] < oldest else "warn"
    return Finding("ascend", name, level, driver, "one of " + ", ".join(drivers), advice)


def _torch_npu(probe: Probe, machine: Machine, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    torch, npu, cann = machine.version("torch"), machine.version("torch-npu"), probe.versions["CANN"]
    yield _package(machine, "ascend", "torch-npu", matrix["torch-npu"], missing="error", wrong="warn")
    if torch is None:
        advice = f"pip install 'torch{matrix['torch']}' --index-url {matrix['torch_cpu_index']}"
        yield Finding("ascend", "torch", "error", "not installed", matrix["torch"], advice)
    elif npu is not None:
        same = short(torch) == short(npu)
        advice = f"pip install 'torch=={short(npu)}.*' --index-url {matrix['torch_cpu_index']}"
        yield Finding(
            "ascend", "torch", "ok" if same else "error", torch, f"{short(npu)} like torch-npu", "" if same else advice
        )
    if npu is None or cann is None:
        return
    paired = matrix["torch_npu_cann"].get(short(npu))
    name = f"CANN for torch-npu {short(npu)}"
    if paired is None:
        # Too new for the published table: the range that Jumar names has been checked above.
        return
    good = short(cann) in paired
    advice = "" if good else f"install CANN {paired[-1]}, or torch and torch-npu {_npu_for(cann, matrix)}"
    yield Finding("ascend", name, "ok" if good else "warn", cann, "one of " + ", ".join(paired), advice)


def _npu_for(cann: str, matrix: Mapping[str, Any]) -> str:
    """The newest torch-npu that is paired with this CANN; for a CANN after the table, the one that Jumar names."""
    fitting = [npu for npu, canns in matrix["torch_npu_cann"].items() if short(cann) in canns]
    return max(fitting, key=release) + ".*" if fitting else str(matrix["torch-npu"])


def _torch_build(machine: Machine, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    torch = machine.version("torch")
    extra = [name for name in machine.installed("nvidia-") if "cu" in name] + machine.installed("cuda-toolkit")
    if torch is not None and extra and "+cpu" not in torch:
        yield Finding(
            "ascend",
            "torch build",
            "warn",
            f"PyPI's torch with {len(extra)} CUDA packages, gigabytes that an NPU does not use",
            "the CPU build",
            f"pip uninstall torch {' '.join(extra)}, then"
            f" pip install 'torch=={short(torch)}.*' --index-url {matrix['torch_cpu_index']}",
        )


def _mindspore(survey: Survey, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    machine = survey.machine
    version = machine.version("mindspore")
    if version is None:
        yield Finding("mindspore", "MindSpore", "absent", "not installed")
        return
    yield _package(machine, "mindspore", "mindspore", matrix["mindspore"], missing="error", wrong="warn")
    python = ".".join(map(str, machine.python))
    if not matches(python, matrix["python"]):
        advice = "make the environment with Python 3.12 or older"
        yield Finding("mindspore", "Python", "error", python, matrix["python"], advice)
    yield _package(machine, "mindspore", "numpy", matrix["numpy"], missing="error", wrong="error")
    cann = survey.ascend.versions["CANN"]
    if not survey.ascend.present or cann is None:
        return
    paired = matrix["cann"].get(short(version))
    if paired is None:
        advice = "see https://www.mindspore.cn/install"
        yield Finding("mindspore", "CANN", "warn", cann, f"no pairing is known for MindSpore {version}", advice)
    else:
        good = short(cann) in paired
        advice = "" if good else f"install CANN {paired[-1]}, or a MindSpore made for CANN {cann}"
        yield Finding("mindspore", "CANN", "ok" if good else "warn", cann, "one of " + ", ".join(paired), advice)


# ---------------------------------------------------------------- CUDA


def _cuda(survey: Survey, matrix: Mapping[str, Any]) -> Iterator[Finding]:
    probe, machine = survey.cuda, survey.machine
    if not probe.present:
        yield Finding("cuda", "NVIDIA GPU", "absent", probe.trouble)
        return
    yield from _cards(probe, "GPUs")
    yield _package(machine, "cuda", "torch", matrix["torch"], missing="error", wrong="warn")
    torch, driver = machine.version("torch"), probe.versions["driver"]
    if torch is not None and "+cpu" in torch:
        advice = f"pip uninstall torch, then pip install 'torch{matrix['torch']}' from PyPI"
        yield Finding("cuda", "torch build", "error", f"{torch} has no CUDA", "a CUDA build", advice)
    wanted = matrix["torch_triton"].get(short(torch)) if torch is not None else None
    yield _package(machine, "cuda", "triton", wanted or matrix["triton"], missing="error", wrong="warn")
    major = _cuda_major(torch, matrix) if torch is not None else None
    if major is not None and driver is not None:
        least = matrix["driver"].get(major, ">=0")
        good = matches(driver, least)
        advice = "" if good else f"install NVIDIA driver {least[2:]} or newer, or a torch for an older CUDA"
        yield Finding("cuda", f"driver for CUDA {major}", "ok" if good else "error", driver, least, advice)


def _cuda_major(torch: str, matrix: Mapping[str, Any]) -> str | None:
    """CUDA major that this torch was built for: in its local version (``2.9.0+cu128``), else by PyPI's pairing."""
    local = torch.partition("+")[2]
    if local.startswith("cu") and local[2:].isdigit():
        return local[2:-1]
    return None if local else matrix["torch_cuda"].get(short(torch))
