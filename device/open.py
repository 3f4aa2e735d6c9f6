"""From a selection to a device object: the one place that knows which class drives which kind."""

from __future__ import annotations

from device.config import DeviceConfig
from device.contract import Device
from device.errors import DeviceError
from device.probe import Selection


def open_device(selection: Selection, config: DeviceConfig) -> Device:
    """The device of a selection, with its ops bound. DeviceError, ConfigError as its class says."""
    if selection.kind == "cpu":
        from device.cpu import CpuDevice

        dtype = "float32" if config.dtype == "auto" else config.dtype
        return CpuDevice(
            dtype,
            fusion=config.fusion,
            strict=config.strict,
            threads=config.threads,
            kernels=config.kernels,
            activations=config.activations,
            capture=config.capture,
        )
    raise DeviceError(f"{selection.name}: this build of Jumar has no {selection.kind} device")
