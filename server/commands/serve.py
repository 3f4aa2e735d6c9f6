"""``jumar serve``: a model over the OpenAI API."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import click

from device.errors import ConfigError
from device.settings import format_config
from server.commands.options import GroupedCommand, load, resolve_settings, say, with_settings
from server.config import SCHEMAS, ServerConfig


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--print-config", is_flag=True, help="Show every setting, its value and where it came from, and end.")
@with_settings(*SCHEMAS, leave_out=("model",))
def serve(model: str | None, print_config: bool, **options: Any) -> None:
    """Serve MODEL over the OpenAI API: a folder in Hugging Face layout, a .gguf file, or smollm2-135m.

    \b
    jumar serve smollm2-135m                          on http://127.0.0.1:8000/v1
    JUMAR_API_KEY=secret jumar serve PATH --host 0.0.0.0
    jumar serve PATH --profile throughput --print-config

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /metrics, /version, and
    without a key /health (200 while new requests are taken: for load balancers) and /health/live (200 unless the
    service has failed: for supervisors). Ctrl-C or SIGTERM lets running requests finish (--drain-timeout); a second one
    ends at once.

    Every setting has the same name here, in jumar.toml and, as JUMAR_NAME, in the environment; later ones win.
    """
    resolved = resolve_settings(options, model)
    if print_config:
        click.echo(format_config(resolved), nl=False)
        return
    if not resolved.values["model"]:
        raise ConfigError("no model given; name a folder, a .gguf file or smollm2-135m: jumar serve smollm2-135m")
    from server.service import Service, open_port, signals, warnings_for

    config = resolved.of(ServerConfig)
    start_logging(config)
    sock = open_port(config)  # before the model is loaded: a taken port is told at once
    engine = load(resolved)
    if engine.tokenizer is None:
        raise ConfigError(f"{resolved.values['model']} has no tokenizer; name one with --tokenizer")
    engine.start()
    service = Service(engine, config, sock)
    with signals(service.request_stop):
        service.start()
        for warning in warnings_for(config):
            say(f"warning: {warning}")
        say(f"serving {service.model} on {service.url}/v1 (Ctrl-C ends)")
        code = service.run()
    sys.stdout.flush()
    sys.exit(code)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def start_logging(config: ServerConfig) -> None:
    """Log to stderr, as text or JSON."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if config.log_json else text)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # waitress tells of each client that hung up; at info that is noise
    logging.getLogger("waitress").setLevel(max(logging.WARNING, logging.getLogger().level))
