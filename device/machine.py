"""What the probes may look at: files, environment, vendor commands, installed packages. Tests put their own in place.

No probe imports a framework: ``import torch`` takes seconds, fails by itself on some machines (torch-npu without CANN)
and opens the cards it finds. Versions come from package metadata, cards from the vendor's command line tools.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

_OUTPUT_LIMIT = 1 << 20
_EXTRA_DIRS = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/usr/lib/wsl/lib", "/opt/bin")


@dataclass(frozen=True, slots=True)
class Command:
    """How a command ended. ``text``: stdout and stderr together. ``code``: exit status where it ended by itself."""

    status: Literal["ok", "missing", "timeout", "failed"]
    text: str = ""
    code: int = 0

    @property
    def first_line(self) -> str:
        """The first line that says anything, shortened; for messages."""
        lines = [line.strip(" |+-=\t") for line in self.text.splitlines()]
        line = next((line for line in lines if line), "")
        return line if len(line) <= 160 else line[:157] + "..."


def execute(argv: Sequence[str], timeout: float) -> Command:
    """Run a command for at most ``timeout`` seconds.

    A vendor tool can hang inside the driver where no signal reaches it. So its output goes to a file instead of a
    pipe, and after the kill nobody waits for its end: the caller goes on whatever the driver does.
    """
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except FileNotFoundError:
            return Command("missing")
        except OSError as error:
            return Command("failed", error.strerror or str(error), error.errno or 1)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            return Command("timeout")
        out.seek(0)
        text = out.read(_OUTPUT_LIMIT).decode("utf-8", "replace")
    return Command("ok" if code == 0 else "failed", text, code)


def installed_packages() -> dict[str, str]:
    """Distribution name (lower case, hyphens) -> version, of this Python."""
    found: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        about = dist.metadata  # read and parsed each time that it is asked for
        name = about["Name"] if about else None
        if name:  # a half-removed package has none
            found.setdefault(package_key(name), about["Version"])
    return found


def package_key(name: str) -> str:
    """The normal form of a distribution's name (https://packaging.python.org/specifications/name-normalization/)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, eq=False)
class Machine:
    """This machine, or a pretended one.

    root: where ``/dev``, ``/proc`` and ``/usr`` are looked for. find: path of a command or None. execute: runs one.
    packages: what is installed. timeout: seconds that a vendor tool may take.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find: Callable[[str], str | None] | None = None
    execute: Callable[[Sequence[str], float], Command] = execute
    packages: Callable[[], Mapping[str, str]] = installed_packages
    python: tuple[int, int, int] = sys.version_info[:3]
    arch: str = field(default_factory=platform.machine)
    system: str = field(default_factory=platform.system)
    affinity: int | None = None
    timeout: float = 10.0

    def which(self, name: str) -> str | None:
        """Path of a command: from PATH, else from where vendors put their tools."""
        if self.find is not None:
            return self.find(name)
        return shutil.which(name, path=self.environ.get("PATH")) or shutil.which(
            name, path=os.pathsep.join(_EXTRA_DIRS)
        )

    def run(self, name: str, *args: str) -> Command:
        """Run a command by name; status "missing" when there is none."""
        path = self.which(name)
        return Command("missing") if path is None else self.execute([path, *args], self.timeout)

    def path(self, name: str) -> Path:
        """An absolute path, under ``root``."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Text of a file under ``root``, empty when it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def devices(self, prefix: str) -> list[str]:
        """Device nodes ``/dev/<prefix><number>``, by number."""
        with suppress(OSError):
            names = [p.name for p in self.path("/dev").iterdir() if re.fullmatch(re.escape(prefix) + r"\d+", p.name)]
            return sorted(names, key=lambda n: int(n[len(prefix) :]))
        return []

    @cached_property
    def _packages(self) -> Mapping[str, str]:
        return self.packages()

    def version(self, package: str) -> str | None:
        """Version of an installed distribution, None when it is not installed. Nothing is imported."""
        return self._packages.get(package_key(package))

    def installed(self, prefix: str) -> list[str]:
        """Names of installed distributions that begin with ``prefix``."""
        return sorted(name for name in self._packages if name.startswith(prefix))
