"""Pretended machines: NPU and GPU servers made of files in a folder and canned answers of the vendor's tools.

The answers have the columns and spacing of real ones (see the sources named in ``device.probe_ascend``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from device.machine import Command, Machine

Answer = Command | str
BASE_PACKAGES = {
    "numpy": "2.2.6", "safetensors": "0.6.0", "gguf": "0.17.0", "tokenizers": "0.22.0", "jinja2": "3.1.6",
    "flask": "3.1.0", "waitress": "3.0.2", "click": "8.1.8", "prometheus-client": "0.22.0", "tqdm": "4.67.0",
    "threadpoolctl": "3.6.0",
}  # fmt: skip
CPUINFO = "processor : 0\nmodel name : Test CPU  @ 2GHz\nflags : fpu sse4_2 avx f16c fma avx2 avx512f avx512_vnni\n"


class Tools:
    """Commands by name: a fixed answer, or a function of the arguments. Counts what was run."""

    def __init__(self, **answers: Answer | Callable[[Sequence[str]], Answer]) -> None:
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.ran: list[list[str]] = []

    def find(self, name: str) -> str | None:
        return f"/fake/{name}" if name in self.answers else None

    def execute(self, argv: Sequence[str], timeout: float) -> Command:
        name, args = argv[0].removeprefix("/fake/"), list(argv[1:])
        self.ran.append([name, *args])
        answer = self.answers[name]
        if callable(answer):
            answer = answer(args)
        return Command("ok", answer) if isinstance(answer, str) else answer


def machine(root: Path, tools: Tools | None = None, **kwargs: Any) -> Machine:
    """A machine whose files are under ``root``, with one plain CPU unless files say otherwise."""
    tools = tools or Tools()
    files = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n", "proc/cpuinfo": CPUINFO}
    for name, text in {**files, **kwargs.pop("files", {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    packages = {**BASE_PACKAGES, **kwargs.pop("packages", {})}
    settings: dict[str, Any] = {"environ": {}, "arch": "x86_64", "system": "Linux", "affinity": 4, "python": (3, 11, 9)}
    return Machine(
        root=root,
        find=tools.find,
        execute=tools.execute,
        packages=lambda: {k: v for k, v in packages.items() if v},
        **{**settings, **kwargs},
    )


# ---------------------------------------------------------------- Ascend


def mapping(chips: Sequence[tuple[int, int, int, int]], name: str, *, physical: bool = True) -> str:
    """``npu-smi info -m`` for chips (npu, chip, logical id, physical id); every NPU ends with its controller."""
    labels = ["NPU ID", "Chip ID", "Chip Logic ID", *(["Chip Phy-ID"] if physical else []), "Chip Name"]
    rows = ["".join(f"{label:<31}" for label in labels)]
    npus = sorted({npu for npu, *_ in chips})
    for npu in npus:
        mine = [c for c in chips if c[0] == npu]
        for _, chip, logical, phy in mine:
            cells: list[Any] = [npu, chip, logical, *([phy] if physical else []), name]
            rows.append("".join(f"{cell:<31}" for cell in cells))
        cells = [npu, len(mine), "-", *(["-"] if physical else []), "Mcu"]
        rows.append("".join(f"{cell:<31}" for cell in cells))
    return "\n".join("\t" + row for row in rows) + "\n"


def table(
    chips: Sequence[tuple[int, int, int, int]],
    name: str,
    *,
    physical: bool = False,
    hbm: bool = True,
    health: dict[int, str] | None = None,
) -> str:
    """``npu-smi info`` for the same chips: 64 GiB each, 3400 MiB and more in use."""
    second = "Chip  Phy-ID" if physical else ("Chip" if hbm else "Chip    Device")
    lines = [
        "+------------------------------------------------------------------------------------------------+",
        "| npu-smi 25.5.0                   Version: 25.5.0                                               |",
        "+---------------------------+---------------+----------------------------------------------------+",
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        f"| {second:<26}| Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
        "+===========================+===============+====================================================+",
    ]
    for npu, chip, logical, phy in chips:
        state = (health or {}).get(logical, "OK")
        lines.append(f"| {npu:<6}{name:<20}| {state:<14}| 93.9        41                0    / 0             |")
        first = f"{chip:<6}{phy if physical else ('' if hbm else chip)}"
        memory = f"0    / 0          {3400 + logical} / 65536" if hbm else f"{1500 + logical} / 44280"
        lines.append(f"| {first:<26}| 0000:{0x80 + logical:02X}:00.0  | 0           {memory:<39}|")
        lines.append(
            "+===========================+===============+====================================================+"
        )
    lines += [
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
        f"| {chips[0][0]}       0                 | 1234          | python                   | 56000  |",
    ]
    return "\n".join(lines) + "\n"


def npu_smi(info: Answer, mapped: Answer) -> Callable[[Sequence[str]], Answer]:
    return lambda args: mapped if "-m" in args else info


A2_CHIPS = [(n, 0, n, n + 8) for n in range(8)]
"""Eight cards in a container that calls them 0 to 7 where the host says 8 to 15."""
A3_CHIPS = [(n // 2, n % 2, n, n) for n in range(16)]


def a2_server(root: Path, **kwargs: Any) -> Machine:
    tools = Tools(npu_smi=npu_smi(table(A2_CHIPS, "910B3"), mapping(A2_CHIPS, "Ascend")))
    return ascend_machine(root, tools, **kwargs)


def a3_server(root: Path, **kwargs: Any) -> Machine:
    info = table(A3_CHIPS, "Ascend910", physical=True, health={5: "Alarm"})
    return ascend_machine(root, Tools(npu_smi=npu_smi(info, mapping(A3_CHIPS, "Ascend910"))), **kwargs)


def ascend_machine(root: Path, tools: Tools, **kwargs: Any) -> Machine:
    files = {
        "dev/davinci0": "",
        "dev/davinci_manager": "",
        "usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": "package_name=x\nversion=9.1.0\n",
    }
    kwargs["files"] = {**files, **kwargs.get("files", {})}
    kwargs["packages"] = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0", **kwargs.get("packages", {})}
    kwargs.setdefault("arch", "aarch64")
    return machine(root, tools, **kwargs)


# ---------------------------------------------------------------- CUDA

GPUS = """\
0, GPU-aaaa1111-0000-0000-0000-000000000000, NVIDIA H200, 00000000:0F:00.0, 143771, 140000, 580.95.05, 9.0
1, GPU-aaab2222-0000-0000-0000-000000000000, NVIDIA H200, 00000000:1F:00.0, 143771, 143000, 580.95.05, 9.0
2, GPU-cccc3333-0000-0000-0000-000000000000, Tesla T4, 00000000:2F:00.0, 15360, 15000, 580.95.05, 7.5
"""
BANNER = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |\n"


def cuda_machine(root: Path, answer: Answer = GPUS, **kwargs: Any) -> Machine:
    tools = kwargs.pop("tools", None) or Tools(nvidia_smi=lambda args: answer if args else BANNER)
    kwargs["packages"] = {"torch": "2.13.0", "triton": "3.7.1", **kwargs.get("packages", {})}
    return machine(root, tools, files={"dev/nvidia0": "", "dev/nvidiactl": ""}, **kwargs)
