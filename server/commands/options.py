"""What all commands share: options made from the settings, loading with progress, errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from device.config import DeviceConfig
from device.errors import JumarError
from device.schema import Setting, settings_of
from device.settings import Resolved
from runtime.config import EngineConfig
from server.config import ServerConfig, load_config

if TYPE_CHECKING:
    from runtime.engine import Engine

F = TypeVar("F", bound=Callable[..., Any])
ENGINE = (DeviceConfig, EngineConfig)


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists settings under the headings of their schema, its own options first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class SettingOption(click.Option):
    """An option whose text is parsed by the setting itself, with the other sources, so that errors name theirs."""

    def __init__(self, item: Setting) -> None:
        self.group = f"Settings: {item.group}"
        text = item.help if item.default in (None, "") else f"{item.help}  [default: {item.shown(item.default)}]"
        names = [f"{item.option}/--no-{item.option[2:]}"] if item.kind == "bool" else [item.option]
        if item.kind == "bool" and item.name.startswith("no_"):
            names = [item.option]
        super().__init__(
            [*names, item.name],
            is_flag=item.kind == "bool",
            default=None,
            metavar=_metavar(item),
            help=text.replace("\b", ""),
        )


def _metavar(item: Setting) -> str | None:
    if item.kind == "bool":
        return None
    kind = {"str": "text", "int": "number", "float": "number"}.get(item.kind, item.kind)
    return f"[{'|'.join(item.choices)}]" if item.choices else (item.unit or kind).upper().replace(" ", "_")


def with_settings(*schemas: type, leave_out: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Adds ``--config`` and one option for each setting; they arrive as keyword arguments, None where not given."""

    def decorate(fn: F) -> F:
        for item in reversed(settings_of(*schemas)):
            if item.name not in leave_out:
                fn = _add(fn, SettingOption(item))
        config = click.Option(
            ["--config", "config_file"],
            type=click.Path(dir_okay=False),
            help="Settings file. Default: $JUMAR_CONFIG, else jumar.toml in this directory when there is one.",
        )
        return _add(fn, config)

    return decorate


def _add(fn: F, option: click.Option) -> F:
    # what click's own decorator does, for an option object that is made already
    if not hasattr(fn, "__click_params__"):
        fn.__click_params__ = []  # type: ignore[attr-defined]
    fn.__click_params__.append(option)  # type: ignore[attr-defined]
    return fn


def resolve_settings(options: dict[str, Any], model: str | None = None) -> Resolved:
    """All sources together. ``options``: what ``with_settings`` gave, ``config_file`` among them."""
    given = dict(options)
    config_file = given.pop("config_file", None)
    if model is not None:
        given["model"] = model
    return load_config(config_file, given)


def chosen_model(options: dict[str, Any], model: str | None) -> str | None:
    """The model that the argument names; without one the settings decide, and without those the embedded model."""
    if model is not None:
        return model
    return None if resolve_settings(options).values["model"] else "smollm2-135m"


def say(text: str) -> None:
    """A notice for the operator: on stderr, so that stdout stays the command's result."""
    click.echo(text, err=True)


def teller(verbose: bool) -> Callable[[str], None]:
    """Where the notices of start-up go in a command whose result is something else."""
    return say if verbose else lambda text: None


def load(resolved: Resolved, notice: Callable[[str], None] = say) -> Engine:
    """The engine of the settings, not started; progress on stderr where that is a terminal."""
    from tqdm import tqdm

    from runtime.startup import build_engine

    for adjustment in resolved.adjustments:
        notice(str(adjustment))
    with tqdm(
        desc="loading", unit="part", total=1, file=sys.stderr, leave=False, disable=not sys.stderr.isatty()
    ) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        def tell(text: str) -> None:
            bar.clear()
            notice(text)

        return build_engine(
            resolved.of(DeviceConfig),
            resolved.of(EngineConfig),
            tell,
            progress,
            explicit_len=resolved.explicit("max_model_len"),
        )


def server_config(resolved: Resolved) -> ServerConfig:
    """The service's part of the settings."""
    return resolved.of(ServerConfig)


class Guarded(click.Group):
    """A group whose commands end with one clear line for an error that Jumar raised on purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except JumarError as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(str(error)) from None
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(f"{error.filename or 'input/output'}: {error.strerror or error}") from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            text = (
                f"internal error: {type(error).__name__}: {error} (jumar --debug {ctx.invoked_subcommand} shows more)"
            )
            raise click.ClickException(text) from None
