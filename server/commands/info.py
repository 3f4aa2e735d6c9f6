"""``jumar devices``, ``doctor`` and ``verify``: what this machine has, what it lacks, whether its ops are right."""

from __future__ import annotations

import sys
from typing import Any

import click

from device.config import DeviceConfig
from server.commands.options import GroupedCommand, resolve_settings, say, with_settings


@click.command()
def devices() -> None:
    """Show every device that can be found, and why one cannot be used.

    Cards are listed as logical -> visible -> physical id under ASCEND_RT_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES,
    with SoC or compute capability, memory, dtypes, and the versions of driver, CANN and CUDA.
    """
    from device.table import format_devices

    click.echo(format_devices())


@click.command()
def doctor() -> None:
    """Check versions (Python, NumPy, torch, torch-npu, CANN, driver, MindSpore, compilers) against what fits together.

    For each mismatch it says what to install. Exit code 1 when something would keep Jumar from running.
    """
    from device.doctor import format_doctor, run_doctor, worst

    findings = run_doctor()
    click.echo(format_doctor(findings))
    sys.exit(1 if worst(findings) == "error" else 0)


@click.command(cls=GroupedCommand)
@click.option("--op", "ops", multiple=True, help="Verify only this op; may be given several times.")
@click.option("--seed", default=0, help="Seed of the generated cases.", show_default=True)
@click.option("--bench/--no-bench", default=True, help="Also time each op and print its share of the roofline.")
@with_settings(DeviceConfig)
def verify(ops: tuple[str, ...], seed: int, bench: bool, **options: Any) -> None:
    """Run every op of the device on generated cases against the float64 reference.

    Prints op by op: implementation, largest error against its tolerance, time, share of the roofline. Exit code 1
    when an op is wrong.
    """
    from device.conformance import format_verify
    from device.conformance import verify as run
    from device.open import open_device
    from device.probe import select

    config = resolve_settings(options).of(DeviceConfig)
    selection = select(config)
    say(f"device: {selection.name}\n{selection.report()}")
    device = open_device(selection, config)
    reports = run(device, ops=list(ops) or None, seed=seed, bench=bench)
    click.echo(format_verify(reports))
    sys.exit(0 if all(report.ok for report in reports) else 1)
