"""Settings of the device: which one, in which precision, and whether it may use portable versions of ops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from device.errors import ConfigError
from device.schema import setting, validate

KINDS = ("ascend", "cuda", "cpu")
"""In the order in which ``auto`` tries them."""

_DEVICE = re.compile(r"(auto|cpu)|(ascend|cuda)(?::(\d{1,4}))?")
_GROUP = "device"


def parse_device(text: str) -> tuple[str, int]:
    """("auto" | "cpu" | "cuda" | "ascend", index among the visible cards). ``cuda`` is ``cuda:0``. ConfigError."""
    found = _DEVICE.fullmatch(text)
    if not found:
        raise ConfigError(f"device = {text!r}: expected auto, cpu, cuda, cuda:N, ascend or ascend:N")
    return found[1] or found[2], int(found[3] or 0)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """See the ``help`` of each field. InvalidSetting (a ConfigError) for a value that is not possible."""

    device: str = setting(
        "auto",
        "Where the model runs: auto, cpu, cuda, cuda:N, ascend or ascend:N, N counting the cards that"
        " CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES leave visible. auto takes the first usable of Ascend, CUDA"
        " and CPU and says why; a device that is named is used or is an error, never replaced.",
        group=_GROUP,
    )
    framework: Literal["torch", "mindspore"] = setting(
        "torch", "The framework that drives an Ascend NPU. The CPU needs none.", group=_GROUP
    )
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type of the activations and of weights that are not quantised. auto is the device's own choice: float32 on"
        " the CPU. float64 is the slow, exact mode of the tests.",
        group=_GROUP,
    )
    threads: int = setting(
        0,
        "CPU threads for the kernels. 0: as many as the affinity mask and the container's CPU quota allow.",
        group=_GROUP,
        minimum=0,
        maximum=4096,
    )
    kernels: Literal["auto", "native", "numpy"] = setting(
        "auto",
        "Kernels of the CPU. native: C++, built at their first use (a minute, with g++ or clang++); run on x86-64"
        " (baseline, AVX2, AVX-512), on aarch64 only in an emulator so far. numpy: the portable ones, several times"
        " slower, which need no compiler. auto: native where they can be had, and where not, numpy with a warning.",
        group=_GROUP,
    )
    activations: Literal["auto", "float"] = setting(
        "auto",
        "What the native CPU kernels multiply quantised weights with. auto: activations rounded to int8 by row and"
        " group of 32, the fastest. float: float32 activations, equal to the portable kernels but for rounding.",
        group=_GROUP,
    )
    strict: bool = setting(
        False,
        "Refuse to start when any op would run in its portable version instead of the device's own kernel.",
        group=_GROUP,
    )
    fusion: bool = setting(
        True,
        "Use the device's fused kernels. false takes the plain ops, to tell a fault of one from the other.",
        group=_GROUP,
    )
    capture: bool = setting(
        True,
        "Record a step once and replay it as one call, where the device can (the native CPU kernels do). false calls"
        " its ops one by one, which is slower, to tell a fault of one from the other.",
        group=_GROUP,
    )

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[tuple[list[str], str]]:
        """Values that are not possible: (names, text)."""
        try:
            parse_device(self.device)
        except ConfigError as error:
            yield ["device"], str(error)
