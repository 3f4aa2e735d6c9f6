"""The command ``jumar``. Commands are imported when they are called, so that ``jumar --help`` is quick."""

from __future__ import annotations

import importlib
from typing import Any

import click

from server.commands.options import Guarded

_COMMANDS = {
    "serve": ("server.commands.serve", "serve", "Serve a model over the OpenAI API."),
    "generate": ("server.commands.generate", "generate", "Generate offline: one prompt, or a file of requests."),
    "chat": ("server.commands.chat", "chat", "Chat with a model in the terminal."),
    "devices": ("server.commands.info", "devices", "Show the devices of this machine."),
    "doctor": ("server.commands.info", "doctor", "Check versions and say what to install."),
    "verify": ("server.commands.info", "verify", "Check every op of a device against the reference."),
    "bench": ("server.commands.bench", "bench", "Measure speed and memory for a model."),
}


class _Lazy(Guarded):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[name]
        command: Any = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
@click.version_option(package_name="jumar", prog_name="jumar")
def main(debug: bool) -> None:
    """Jumar serves large language models: on Ascend NPUs, on NVIDIA GPUs, and by default on any CPU.

    \b
    jumar serve smollm2-135m        an OpenAI-compatible service on http://127.0.0.1:8000
    jumar serve PATH                any Hugging Face folder or .gguf file
    jumar chat smollm2-135m         in the terminal
    """


if __name__ == "__main__":
    main()
