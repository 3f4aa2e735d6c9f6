"""Every device that the conformance suite runs on. A new device is one line in ``DEVICES``."""

from __future__ import annotations

from collections.abc import Callable

from cpu_kernels.build import find_compiler
from device.contract import Device
from device.cpu import CpuDevice
from tests.conformance.rounding import RoundingDevice
from tests.support.toy_device import make_toy_device

DEVICES: dict[str, Callable[[], Device]] = {
    "cpu-float32": lambda: CpuDevice("float32"),
    "cpu-float64": lambda: CpuDevice("float64"),
    "rounding-bfloat16": lambda: RoundingDevice("bfloat16"),
    "rounding-float16": lambda: RoundingDevice("float16"),
    "toy-float64": lambda: make_toy_device("float64", jitter=1e-4),
    "toy-float32": lambda: make_toy_device("float32", jitter=1e-4),
    "toy-float64-composed": lambda: make_toy_device("float64", fusion=False),
}
if find_compiler() is not None:
    DEVICES["cpu-native"] = lambda: CpuDevice("float32", kernels="native")
    DEVICES["cpu-native-float"] = lambda: CpuDevice("float32", kernels="native", activations="float")

REFUSES: dict[str, tuple[str, ...]] = {}
"""Parts of the names of cases that a device may refuse (weights, caches), by the device's name here."""
