"""Settings of the REST service, and the one place that knows every schema: ``load_config`` and the example file.

``python -m server.config > scripts/jumar.example.toml`` writes the example anew after a setting changed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from device.config import DeviceConfig
from device.schema import setting, validate
from device.settings import Resolved, example_toml, resolve
from runtime.config import PROFILES, EngineConfig

_SERVICE, _LOG = "service", "logging"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """See the ``help`` of each field. InvalidSetting (a ConfigError) for values that are not possible."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. Any address but this machine's own needs api_key, or no_api_key = true.",
        group=_SERVICE,
    )
    port: int = setting(
        8000,
        "Port to listen on. 0 lets the system choose one, which is then printed.",
        group=_SERVICE,
        minimum=0,
        maximum=65535,
    )
    api_key: str | None = setting(
        None,
        "Key that clients must send as Authorization: Bearer KEY; it guards everything but /health. Prefer the"
        " environment or a file: a command line is visible to every user of the machine.",
        group=_SERVICE,
        secret=True,
    )
    no_api_key: bool = setting(
        False, "Serve on an address that others can reach without asking for a key.", group=_SERVICE
    )
    served_model_name: str = setting(
        "",
        "Name of the model in the API. Empty: the last part of the path, or the embedded model's name.",
        group=_SERVICE,
    )
    max_body_bytes: int = setting(
        2 << 20,
        "Largest request body. A larger one is refused with status 413 before it is read.",
        group=_SERVICE,
        unit="bytes",
        kind="size",
        minimum=1024,
    )
    drain_timeout: float = setting(
        30.0,
        "After SIGTERM, how long running requests may take to finish before they are ended with an error.",
        group=_SERVICE,
        unit="seconds",
        kind="duration",
        minimum=0,
    )
    watchdog_timeout: float = setting(
        120.0,
        "A step that takes longer counts as stuck: /health turns to 503 and the process ends with an error, so that a"
        " supervisor starts it again. 0 turns the watchdog off.",
        group=_SERVICE,
        unit="seconds",
        kind="duration",
        minimum=0,
    )
    vllm_metrics: bool = setting(
        False, "Repeat the metrics under the prefix vllm: for dashboards made for vLLM.", group=_SERVICE
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe message that is logged.", group=_LOG
    )
    log_json: bool = setting(False, "Log one JSON object a line instead of text.", group=_LOG)

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[tuple[list[str], str]]:
        """Values that do not go together: (names, text)."""
        if not self.host:
            yield ["host"], "host is empty; 127.0.0.1 is this machine only, 0.0.0.0 every address"
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""):
            yield ["api_key"], "an API key is ASCII text without spaces around it, and not empty"
        if self.api_key is not None and self.no_api_key:
            yield ["api_key", "no_api_key"], "there is a key, and a wish for none: set only one of the two"
        if not is_loopback(self.host) and self.api_key is None and not self.no_api_key:
            yield (
                ["host", "api_key"],
                f"{self.host} can be reached from other machines and no API key is set: set JUMAR_API_KEY, or say"
                " --no-api-key if everyone on the network may use the service",
            )


SCHEMAS = (DeviceConfig, EngineConfig, ServerConfig)
"""Every setting there is. All commands load all of them, so that one file serves for each."""


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only. A name other than localhost may resolve to anything: False."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_config(
    config_file: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Resolved:
    """``device.settings.resolve`` over every schema of Jumar, with its profiles. ConfigError names the source."""
    return resolve(SCHEMAS, profiles=PROFILES, config_file=config_file, options=options, environ=environ, cwd=cwd)


def example_config() -> str:
    """The text of ``scripts/jumar.example.toml``."""
    return example_toml(SCHEMAS, profiles=PROFILES, title=_TITLE)


_TITLE = "\n\n".join(
    [
        "Every setting of Jumar with its default. Copy this file to jumar.toml in the directory where you start jumar,"
        " or pass it with --config, and remove the # in front of what you want to change.",
        "The same names work in the environment (JUMAR_PORT=9000) and on the command line (--port 9000). The command"
        " line wins over the environment, that over this file, this file over the profile, the profile over the"
        " defaults. A name or value that is not known is an error. jumar serve --print-config shows what holds and"
        " where each value came from.",
        "This file is made by: python -m server.config > scripts/jumar.example.toml",
    ]
)


if __name__ == "__main__":
    print(example_config(), end="")
