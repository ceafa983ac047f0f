"""A command whose options are made from the fields of settings (`elman.options`).

The fields lie in modules that import torch, so they are asked only when the command itself is:
`elman --help` does not wait for them.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from elman.cli.limits import a_path, as_typed, stoppable
from elman.options import Described, flag

BY_TEXT = "by the text"
"""Shown for an option whose default follows from the text."""


def command(make: Callable[[], Callable[..., Any]]) -> type[TyperCommand]:
    """A command that takes what the function made by `make` takes, and does what it does."""

    class Made(TyperCommand):
        @functools.cached_property
        def _made(self) -> Any:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(self.name)(make())
            return typer.main.get_command(app)

        def get_params(self, ctx: Any) -> Any:
            return self._made.get_params(ctx)

        def invoke(self, ctx: Any) -> Any:
            return self._made.invoke(ctx)

    return Made


def stand_in(function: Callable[..., Any]) -> Callable[[], None]:
    """What typer is shown until the command is asked: the name and the help, and no option.

    (Releases of typer before 0.28 refuse a function that takes `**options`.)
    """

    def command() -> None: ...

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def with_options(
    function: Callable[..., Any],
    options: Iterable[Described],
    defaults: dict[str, Any],
    **late: Any,
) -> Callable[..., Any]:
    """`function(…, **options)` with a signature that names every option.

    An option that is not typed arrives as None. `defaults` are what that stands for, to be shown.
    `late` is what typer is told of arguments of the function's own, where only a table knows it.
    """

    plain = inspect.signature(function)
    fixed = [
        p.replace(annotation=Annotated[p.annotation, late[p.name]]) if p.name in late else p
        for p in plain.parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    made = [*fixed, *(_parameter(option, defaults[option.name]) for option in options)]

    @functools.wraps(function)
    def called(**typed: Any) -> Any:
        with as_typed(typed), stoppable():
            return function(**typed)

    called.__dict__["__signature__"] = plain.replace(parameters=made)
    called.__annotations__ = {p.name: p.annotation for p in made}
    return called


def _parameter(option: Described, default: Any) -> inspect.Parameter:
    facts = option.option
    kind = str if facts.read else option.type
    info = typer.Option(
        facts.flag or flag(option.name),
        help=help_text(option),
        rich_help_panel=facts.panel,
        show_default=_shown(option, default),
        autocompletion=_completion(facts.known),
        parser=a_path if option.type is Path else None,
        metavar="PATH" if option.type is Path else None,
    )
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def help_text(option: Described) -> str:
    """The help with the choices or the range behind it."""
    facts = option.option
    if facts.known:
        return f"{facts.help}: {', '.join(facts.known)}"
    interesting = facts.range not in ("", "at least 0") and not facts.zero_is_none
    return f"{facts.help} ({facts.range})" if interesting else facts.help


def _shown(option: Described, default: Any) -> str | bool:
    if default == BY_TEXT:
        return BY_TEXT
    if option.type is bool:
        yes, _, no = option.option.flag.partition("/")
        return (yes if default else no).removeprefix("--") or False
    text = option.option.show(default)
    return text if default is not None and text else False


def _completion(choices: Iterable[str]) -> Callable[[str], list[str]] | None:
    known = list(choices)
    if not known:
        return None
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]
