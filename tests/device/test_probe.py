"""Probing and selection on pretended servers: visibility, broken tools, and that a named device is never replaced."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device import probe_ascend, probe_cuda
from device.config import DeviceConfig
from device.errors import DeviceError
from device.machine import Command, Machine, execute, installed_packages
from device.probe import IMPLEMENTED, Survey, candidates, select
from device.probe_cpu import instruction_sets
from device.table import device_table, format_devices
from tests.device.fake_machine import (
    A2_CHIPS,
    BANNER,
    GPUS,
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

GiB = 1 << 30
MiB = 1 << 20
ALL = frozenset({"ascend", "cuda", "cpu"})


def chosen(m: Machine, device: str = "auto", **config: str) -> str:
    return select(DeviceConfig(device=device, **config), Survey(m), implemented=ALL).name  # type: ignore[arg-type]


def refusal(m: Machine, device: str, **config: str) -> str:
    with pytest.raises(DeviceError) as caught:
        chosen(m, device, **config)
    return str(caught.value)


# ---------------------------------------------------------------- Ascend


def test_eight_cards_of_which_two_are_visible(tmp_path: Path) -> None:
    """Three numbers for a card: the process's own, the one the variable counts, and the driver's."""
    m = a2_server(tmp_path, environ={"ASCEND_RT_VISIBLE_DEVICES": "3,5"})
    rows = [r for r in device_table(Survey(m)) if r.kind == "ascend"]
    assert [(r.logical, r.visible, r.physical) for r in rows[:2]] == [("ascend:0", "3", "11"), ("ascend:1", "5", "13")]
    assert [r.logical for r in rows[2:]] == ["-"] * 6 and {r.usable for r in rows[2:]} == {"hidden"}
    assert {(r.model, r.arch, r.dtypes) for r in rows} == {("Ascend910B3", "A2", ("bfloat16", "float16", "float32"))}
    assert (rows[1].memory_total, rows[1].memory_free) == (64 * GiB, (65536 - 3405) * MiB)
    text = format_devices(Survey(m))
    assert "driver 25.5.0, CANN 9.1.0, torch 2.13.0+cpu, torch-npu 2.13.0, mindspore -" in text
    assert "6 more hidden by ASCEND_RT_VISIBLE_DEVICES=3,5" in text
    assert chosen(m) == "ascend:0" and chosen(m, "ascend:1") == "ascend:1"
    card = select(DeviceConfig(device="ascend:1"), Survey(m), implemented=ALL).card
    assert (card.index, card.visible, card.physical) == (1, 5, 13)
    assert (
        "there is no ascend:2, the visible cards are ascend:0 to ascend:1 (ASCEND_RT_VISIBLE_DEVICES=3,5)"
        in refusal(m, "ascend:2")
    )


def test_sixteen_dies_of_an_a3_one_ill(tmp_path: Path) -> None:
    m = a3_server(tmp_path)
    probe = probe_ascend.probe_ascend(m)
    assert [c.index for c in probe.visible] == list(range(16))
    assert {(c.arch, c.memory_total) for c in probe.cards} == {("A3", 64 * GiB)}
    assert [c.bus for c in probe.cards][:2] == ["0000:80:00.0", "0000:81:00.0"]
    found = candidates(Survey(m), implemented=ALL)
    assert [c.name for c in found if c.kind == "ascend" and not c.usable] == ["ascend:5"]
    assert "health is Alarm" in refusal(m, "ascend:5")
    hidden = a3_server(tmp_path, environ={"ASCEND_RT_VISIBLE_DEVICES": "5,6"})
    assert chosen(hidden) == "ascend:1"


def test_old_drivers_without_physical_ids(tmp_path: Path) -> None:
    tools = Tools(npu_smi=npu_smi(table(A2_CHIPS, "910B4"), mapping(A2_CHIPS, "Ascend 910B4", physical=False)))
    rows = [r for r in device_table(Survey(ascend_machine(tmp_path, tools))) if r.kind == "ascend"]
    assert [(r.visible, r.physical) for r in rows] == [(str(n), "-") for n in range(8)]


def test_310p(tmp_path: Path) -> None:
    chips = [(2, 0, 0, 4), (2, 1, 1, 5)]
    tools = Tools(npu_smi=npu_smi(table(chips, "310P3", hbm=False), mapping(chips, "Ascend")))
    cards = probe_ascend.probe_ascend(ascend_machine(tmp_path, tools)).cards
    assert [(c.arch, c.physical, c.memory_total, c.memory_free) for c in cards] == [
        ("310P", 4, 44280 * MiB, (44280 - 1500) * MiB),
        ("310P", 5, 44280 * MiB, (44280 - 1501) * MiB),
    ]
    assert "bfloat16" not in cards[0].dtypes
    old = Tools(npu_smi=npu_smi(table(chips, "310P3", hbm=False), mapping(chips, "Ascend", physical=False)))
    cards = probe_ascend.probe_ascend(ascend_machine(tmp_path, old)).cards
    assert [c.physical for c in cards] == [None, None], "its column Device is not the physical id"


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("", "is set and empty, which hides every NPU"),
        ("3, 5", r"is not a list of ids: CANN would see \[3\] and ignore the rest"),
        ("a", "is not a list of ids: CANN would see none"),
        ("-1", "is not a list of ids"),
        ("1,2,", r"CANN would see \[1, 2\]"),
        ("0,8", r"names NPU 8, which is not there \(ids: 0 to 7\)"),
        ("5,3", "does not ascend"),
        ("3,3", "does not ascend"),
        ("0-3", r"CANN would see \[0\]"),
    ],
)
def test_wrong_lists_of_npus_are_no_guesswork(tmp_path: Path, listed: str, said: str) -> None:
    m = a2_server(tmp_path, environ={"ASCEND_RT_VISIBLE_DEVICES": listed})
    probe = probe_ascend.probe_ascend(m)
    assert probe.present and not probe.visible and len(probe.cards) == 8
    with pytest.raises(DeviceError, match=said):
        chosen(m, "ascend")
    selection = select(DeviceConfig(), Survey(m), implemented=ALL)
    assert selection.name == "cpu" and "ASCEND_RT_VISIBLE_DEVICES" in selection.report()
    assert "what to do: unset ASCEND_RT_VISIBLE_DEVICES" in format_devices(Survey(m))


@given(st.lists(st.integers(0, 20), max_size=6))
def test_visible_lists_against_the_rule(ids: list[int]) -> None:
    """Exactly the ascending lists of ids that are there are accepted, and then seen as written."""
    seen, trouble = probe_ascend.parse_visible(",".join(map(str, ids)), range(16))
    right = bool(ids) and ids == sorted(set(ids)) and max(ids) < 16
    assert (trouble == "") == right
    assert seen == ids if right else ids[: len(seen)] == seen


@pytest.mark.parametrize(
    ("mapped", "said"),
    [
        (Command("timeout"), "npu-smi does not answer"),
        (Command("failed", "\n  Segmentation fault\n", 139), r"npu-smi failed \(exit code 139\): Segmentation fault"),
        ("dcmi module initialize failed. ret is -8005\n", "-8005: the container has not got the NPU devices"),
        (
            Command("failed", "dcmi model initialized failed, because the device is used. ret is -8020", 1),
            "another cont",
        ),
        ("", "unknown form"),
        ("Hello\nWorld", "unknown form: 'Hello'"),
        ("NPU ID  Chip ID  Chip Logic ID  Chip Name\n0 0 zero Ascend\n", "unknown form"),
        ("NPU ID  Chip ID  Chip Logic ID  Chip Name\n0 0\n", "unknown form"),
        ("NPU ID  Chip ID\n0 0\n", "unknown form"),
        ("NPU ID  Chip ID  Chip Logic ID  Chip Name\n0 1 - Mcu\n", "lists no chip"),
    ],
)
def test_an_npu_smi_that_does_not_help(tmp_path: Path, mapped: Command | str, said: str) -> None:
    tools = Tools(npu_smi=npu_smi("", mapped))
    m = ascend_machine(tmp_path, tools)
    with pytest.raises(DeviceError, match=said):
        chosen(m, "ascend")
    assert len(tools.ran) == 1 or "lists no chip" in said, "after a failure it is not asked again"
    assert chosen(m) == "cpu"


@pytest.mark.parametrize("info", [Command("timeout"), Command("failed", "x", 1), "garbage | 1 | 2\n| 0 | 1 |", ""])
def test_cards_stay_usable_without_the_second_table(tmp_path: Path, info: Command | str) -> None:
    m = ascend_machine(tmp_path, Tools(npu_smi=npu_smi(info, mapping(A2_CHIPS, "Ascend910B3"))))
    card = probe_ascend.probe_ascend(m).cards[0]
    assert (card.model, card.arch, card.memory_total, card.memory_free, card.health) == (
        "Ascend910B3",
        "A2",
        None,
        None,
        "?",
    )
    assert chosen(m) == "ascend:0"


def test_garbage_never_raises(tmp_path: Path) -> None:
    @settings(max_examples=50, deadline=None)
    @given(st.text(), st.text())
    def check(info: str, mapped: str) -> None:
        header = "NPU ID  Chip ID  Chip Logic ID  Chip Phy-ID  Chip Name\n"
        for text in (mapped, header + mapped, header + "0 0 0 0 Ascend\n"):
            survey = Survey(ascend_machine(tmp_path, Tools(npu_smi=npu_smi(info, text), nvidia_smi=info)))
            format_devices(survey)
            assert select(survey=survey).name == "cpu"

    check()


def test_npus_in_a_container_without_npu_smi(tmp_path: Path) -> None:
    m = machine(tmp_path, files={"dev/davinci3": ""})
    assert "/usr/local/dcmi" in refusal(m, "ascend") and "davinci3 is there but npu-smi is not" in refusal(m, "ascend")


def test_what_software_ascend_needs(tmp_path: Path) -> None:
    m = a2_server(tmp_path, packages={"torch-npu": ""})
    assert "torch-npu not installed. What to do: pip install -e '.[ascend]'" in refusal(m, "ascend")
    assert "mindspore not installed" in refusal(m, "ascend", framework="mindspore")
    assert chosen(a2_server(tmp_path, packages={"mindspore": "2.10.0"}), "ascend", framework="mindspore") == "ascend:0"
    (tmp_path / "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info").unlink()
    (tmp_path / "usr/local/Ascend/cann/aarch64-linux").rmdir()
    tools = Tools(npu_smi=npu_smi("", mapping(A2_CHIPS, "Ascend910B3")))
    bare = machine(tmp_path, tools, arch="aarch64", packages={"torch": "2.13.0", "torch-npu": "2.13.0"})
    assert "CANN is not installed" in refusal(bare, "ascend")


TOP = "usr/local/Ascend"


@pytest.mark.parametrize(
    ("file", "environ", "version"),
    [
        ("opt/cann/x86_64-linux/ascend_toolkit_install.info", {"ASCEND_HOME_PATH": "/opt/cann"}, "9.2.0"),
        (f"{TOP}/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info", {}, "8.1.RC1"),
        ("home/u/Ascend/cann/x86_64-linux/ascend_toolkit_install.info", {"HOME": "/home/u"}, "9.0.0"),
        (f"{TOP}/nnrt/latest/x86_64-linux/ascend_nnrt_install.info", {}, "8.0.0"),
        (f"{TOP}/cann/aarch64-linux/ascend_toolkit_install.info", {"ASCEND_HOME_PATH": "/opt/cann"}, None),
    ],
)
def test_where_cann_is_found(tmp_path: Path, file: str, environ: dict[str, str], version: str | None) -> None:
    m = machine(tmp_path, files={file: f"package_name=x\nversion={version or 'other'}\n"}, environ=environ)
    assert probe_ascend.cann_version(m) == version


@pytest.mark.parametrize(
    ("model", "arch"),
    [("910B1", "A2"), ("Ascend910B2C", "A2"), ("Ascend910", "A3"), ("Ascend910_9391", "A3"), ("310P3", "310P"),
     ("910A", "910A"), ("910ProB", "910A"), ("Ascend950PR", "950"), ("Kirin", "?")],
)  # fmt: skip
def test_families(model: str, arch: str) -> None:
    assert probe_ascend.family(model)[0] == arch


# ---------------------------------------------------------------- CUDA


def test_a_cuda_box(tmp_path: Path) -> None:
    m = cuda_machine(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "2,0"})
    rows = [r for r in device_table(Survey(m)) if r.kind == "cuda"]
    assert [(r.logical, r.visible, r.physical, r.model, r.arch) for r in rows] == [
        ("cuda:0", "2", "2", "Tesla T4", "sm_75"),
        ("cuda:1", "0", "0", "NVIDIA H200", "sm_90"),
        ("-", "1", "1", "NVIDIA H200", "sm_90"),
    ]
    assert rows[0].dtypes == ("float16", "float32") and rows[1].dtypes[0] == "bfloat16"
    assert (rows[1].memory_total, rows[1].memory_free) == (143771 * MiB, 140000 * MiB)
    text = format_devices(Survey(m))
    assert "cuda: driver 580.95.05, CUDA 13.0, torch 2.13.0, triton 3.7.1" in text
    assert "CUDA_DEVICE_ORDER is not PCI_BUS_ID" in text and "1 more hidden by CUDA_VISIBLE_DEVICES=2,0" in text
    assert chosen(m, "cuda:1") == "cuda:1"


@pytest.mark.parametrize(
    ("listed", "ids"),
    [("0,1,2", [0, 1, 2]), ("1", [1]), (" 2 , 1", [2, 1]), ("GPU-cccc,GPU-aaaa", [2, 0]), ("0,2,-1,1", [0, 2])],
)
def test_visible_gpus(tmp_path: Path, listed: str, ids: list[int]) -> None:
    probe = probe_cuda.probe_cuda(cuda_machine(tmp_path, environ={"CUDA_VISIBLE_DEVICES": listed}))
    assert [c.visible for c in probe.visible] == ids and not probe.trouble


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("", "hides every GPU"),
        ("-1", "hides every GPU"),
        ("NoDevFiles", "hides every GPU"),
        ("0,7", r"'7' names no GPU; CUDA would see \[0\]"),
        ("abc", "'abc' names no GPU; CUDA would see none"),
        ("GPU-aaa", "'GPU-aaa' names more than one GPU"),
        ("0,0", "names GPU 0 twice"),
        ("MIG-1234", "names a MIG slice"),
    ],
)
def test_wrong_lists_of_gpus(tmp_path: Path, listed: str, said: str) -> None:
    m = cuda_machine(tmp_path, environ={"CUDA_VISIBLE_DEVICES": listed})
    assert probe_cuda.probe_cuda(m).visible == ()
    with pytest.raises(DeviceError, match=said):
        chosen(m, "cuda")
    assert chosen(m) == "cpu"


@pytest.mark.parametrize(
    ("answer", "said", "present"),
    [
        (Command("timeout"), "nvidia-smi does not answer", True),
        (
            Command("failed", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
            "commun",
            True,
        ),
        ("No devices were found\n", "No devices were found", True),
        ("what?\n", "unknown form: 'what?'", True),
    ],
)
def test_an_nvidia_smi_that_does_not_help(tmp_path: Path, answer: Command | str, said: str, present: bool) -> None:
    m = cuda_machine(tmp_path, answer)
    assert said in refusal(m, "cuda") and probe_cuda.probe_cuda(m).present == present


def test_old_drivers_without_compute_capability(tmp_path: Path) -> None:
    def smi(args: list[str]) -> Command | str:
        if args and "compute_cap" in args[0]:
            return Command("failed", 'Field "compute_cap" is not a valid field to query.\n', 2)
        return "0, GPU-a, Tesla T4, 0:1, 15360, [N/A], 450.80.02\n" if args else BANNER

    card = probe_cuda.probe_cuda(cuda_machine(tmp_path, tools=Tools(nvidia_smi=smi))).cards[0]
    assert (card.arch, card.dtypes, card.memory_total, card.memory_free) == ("?", (), 15360 * MiB, None)


def test_what_software_cuda_needs(tmp_path: Path) -> None:
    assert "triton not installed" in refusal(cuda_machine(tmp_path, packages={"triton": ""}), "cuda")
    assert "the build without CUDA" in refusal(cuda_machine(tmp_path, packages={"torch": "2.13.0+cpu"}), "cuda")
    assert "nvidia0 is there but nvidia-smi is not" in refusal(machine(tmp_path), "cuda")


# ---------------------------------------------------------------- selection


def test_auto_prefers_ascend_then_cuda_then_cpu(tmp_path: Path) -> None:
    tools = Tools(npu_smi=npu_smi(table(A2_CHIPS, "910B3"), mapping(A2_CHIPS, "Ascend")), nvidia_smi=GPUS)
    both = ascend_machine(tmp_path, tools, packages={"triton": "3.7.1", "torch": "2.13.0"})
    assert chosen(both) == "ascend:0"
    assert chosen(cuda_machine(tmp_path)) == "cuda:0"
    assert chosen(machine(tmp_path)) == "cpu"


def test_this_build_says_that_it_has_only_the_cpu(tmp_path: Path) -> None:
    assert sorted(IMPLEMENTED) == ["cpu"], "a new device changes this line and what is expected of its kind below"
    tools = Tools(npu_smi=npu_smi(table(A2_CHIPS, "910B3"), mapping(A2_CHIPS, "Ascend")), nvidia_smi=GPUS)
    survey = Survey(ascend_machine(tmp_path, tools))
    selection = select(survey=survey)
    assert selection.name == "cpu" and selection.kind == "cpu"
    report = selection.report().splitlines()
    assert report[0].split(None, 3)[:3] == ["ascend:0", "..", "ascend:7"]
    assert report[0].endswith("not used: Ascend910B3 is present, but this build has no Ascend device yet")
    assert "NVIDIA H200 is present, but this build has no CUDA device yet" in report[1]
    assert report[-1].split()[:2] == ["cpu", "taken:"] and "8.0 GiB of 16.0 GiB free" in report[-1]
    for device in ("ascend", "cuda:1"):
        with pytest.raises(DeviceError, match=f"device {device} was asked for .* no (Ascend|CUDA) device yet"):
            select(DeviceConfig(device=device), survey)
    text = format_devices(survey)
    assert "no (1)" in text and "(1) Ascend910B3 is present, but this build has no Ascend device yet" in text


def test_only_the_named_kind_is_looked_at(tmp_path: Path) -> None:
    """device = cpu must start at once where npu-smi hangs."""
    tools = Tools(npu_smi=Command("timeout"), nvidia_smi=Command("timeout"))
    m = ascend_machine(tmp_path, tools)
    assert select(DeviceConfig(device="cpu"), Survey(m)).report().strip().startswith("cpu")
    assert tools.ran == []


def test_a_machine_is_asked_once(tmp_path: Path) -> None:
    tools = Tools(npu_smi=npu_smi(table(A2_CHIPS, "910B3"), mapping(A2_CHIPS, "Ascend")), nvidia_smi=GPUS)
    survey = Survey(ascend_machine(tmp_path, tools))
    format_devices(survey)
    select(survey=survey)
    assert [args[0] for args in tools.ran] == ["npu-smi", "npu-smi", "nvidia-smi", "nvidia-smi"]


def test_the_cpu_of_a_machine(tmp_path: Path) -> None:
    row = device_table(Survey(machine(tmp_path)))[-1]
    assert (row.logical, row.model, row.arch, row.usable) == ("cpu", "Test CPU @ 2GHz, 4 cores", "avx512 vnni", "yes")
    assert (row.memory_free, row.memory_total) == (8 * GiB, 16 * GiB)
    assert instruction_sets({"asimd", "asimddp", "avx2"}, "aarch64") == ["neon", "dotprod"]
    assert instruction_sets(set(), "arm64") == ["neon"]
    (tmp_path / "proc/meminfo").unlink()
    (tmp_path / "proc/cpuinfo").write_text("isa : rv64imafdc\n")
    other = Survey(Machine(root=tmp_path, arch="riscv64", affinity=1, find=lambda name: None)).cpu.cards[0]
    assert (other.arch, other.model) == ("riscv64", "riscv64 CPU, 1 cores")


def test_this_machine() -> None:
    survey = Survey()
    assert select(DeviceConfig(device="cpu"), survey).name == "cpu"
    assert "cpu" in format_devices(survey)


# ---------------------------------------------------------------- commands


def test_execute(tmp_path: Path) -> None:
    said = execute([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], 30)
    assert said.status == "failed" and said.code == 3 and set(said.text.split()) == {"out", "err"}
    assert execute([sys.executable, "-c", "print('x\\xe9')"], 30).status == "ok"
    assert execute([str(tmp_path / "nothing")], 1).status == "missing"
    (tmp_path / "plain").write_text("no program")
    assert execute([str(tmp_path / "plain")], 1).status == "failed"


def test_a_hanging_command_holds_nobody() -> None:
    """Not even through a grandchild in a session of its own, which the kill misses and which keeps the output open."""
    child = "import time; time.sleep(8)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True).wait()"
    started = time.monotonic()
    assert execute([sys.executable, "-c", code], 1.0).status == "timeout"
    assert time.monotonic() - started < 5


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "lived"
    code = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    assert execute([sys.executable, "-c", code], 0.3).status == "timeout"
    time.sleep(2)
    assert not mark.exists()


def test_first_line_is_short() -> None:
    assert Command("ok", "\n| --- |\n| hello |").first_line == "hello"
    assert len(Command("ok", "x" * 1000).first_line) == 160


def test_installed_packages() -> None:
    found = installed_packages()
    assert found["numpy"].count(".") >= 1 and "prometheus-client" in found
