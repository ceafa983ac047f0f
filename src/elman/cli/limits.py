"""What every verb refuses alike: numbers and paths that will not do, closed streams, no folder."""

import functools
import inspect
import io
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from elman.cli.console import silence, terminals
from elman.errors import UserError
from elman.options import LARGEST, Beside, as_flag, flag

LONGEST = 10**7
"""The longest text that a command writes, in tokens: at 50,000 a second, three minutes."""


def a_path(text: str) -> Path:
    """A path as it was typed; an empty one is refused, which `Path` would take for this folder.

    ~ is the home folder, as in a SOURCE: shells leave the one of `--out=~/runs` as it is. What
    begins with a dash is made absolute, or the command that a verb suggests would take it for an
    option: `Path` forgets the ./ before it.
    """
    if not text:
        raise typer.BadParameter("an empty path names nothing; . is this folder")
    try:
        path = Path(text).expanduser()
        return path.absolute() if text != "-" and str(path).startswith("-") else path
    except RuntimeError as unknown:  # ~nobody
        raise typer.BadParameter(f"{text}: {unknown}") from unknown


RunFolder = Annotated[
    Path, typer.Argument(help="Folder written by `elman train`", parser=a_path, metavar="RUN")
]


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, refusing numbers that no part of it could count with, and what means nothing.

    An option that needs another says so where it is described: `Annotated[…, Beside("generate")]`.
    """
    needs = dict(_needs(verb))

    @functools.wraps(verb)
    def called(*positional: Any, **options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, int) and abs(value) > LARGEST:
                raise UserError(
                    f"{flag(name)} {value} must fit into 64 bits", hint=f"at most {LARGEST:,}"
                )
            if isinstance(value, float) and math.isnan(value):
                raise UserError(f"{flag(name)} nan is not a number", hint="leave it out")
        for name, (beside, default) in needs.items():
            if options[name] != default:
                beside.refuse(name, options[name], options, as_flag)
        with as_typed(options), stoppable():
            return verb(*positional, **options)

    return called


def _needs(verb: Callable[..., Any]) -> Iterator[tuple[str, tuple[Beside, Any]]]:
    """The options of a verb that mean nothing without another, with that and their defaults."""
    hints = get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        for said in getattr(hints[name], "__metadata__", ()):
            if isinstance(said, Beside):
                yield name, (said, parameter.default)


class Stopped(Exception):
    """Ctrl-C, under a name that typer leaves alone: some of its releases end without a word."""


ENDED: list[signal.Signals] = []
"""SIGTERM or SIGHUP, once it has come: it ends a verb as Ctrl-C does."""
OVER: list[bool] = []
"""Whether the verb is over, and the process about to end by itself."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C reach `elman.cli.run`, which says so."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Stopped from stop


def end_tidily() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that is closed, end a verb as Ctrl-C does.

    By default they leave half a file under a hidden name. What is ignored stays so, as under nohup.
    Once the verb is over nothing is left to be ended: the first one only lets a second end it all.
    """
    screens = terminals()

    def end(number: int, frame: Any) -> None:
        if number == getattr(signal, "SIGHUP", None):
            for screen in screens:
                silence(screen)
        if OVER:
            signal.signal(number, signal.SIG_DFL)
            return
        ENDED.append(signal.Signals(number))
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):
        which = getattr(signal, name, None)
        if which is not None and signal.getsignal(which) is signal.SIG_DFL:
            signal.signal(which, end)


SETTING = re.compile(r"\b(?P<name>[a-z_]+)=(?P<quote>\"?)(?P<value>[\w.-]+)(?P=quote)")


@contextmanager
def as_typed(options: Mapping[str, Any]) -> Iterator[None]:
    """Let a refusal that begins with a setting and its value name the option that was typed.

    `clip=-1.0 must be positive; clip=None never clips` is for those who call from Python. Whoever
    typed `--clip -1` reads `--clip -1.0 must be positive`, and `--clip 0 never clips`.
    """

    def typed(setting: re.Match[str]) -> str:
        name, value = setting["name"], setting["value"]
        if name not in options:
            return setting[0]
        if value in ("True", "False"):
            return flag(name) if value == "True" else f"no {flag(name)}"
        return f"{flag(name)} {0 if value == 'None' else value}"

    try:
        yield
    except UserError as refusal:
        message, hint = refusal.message, SETTING.sub(typed, refusal.hint)
        name, is_setting, rest = message.partition("=")
        name = name.replace(" of ", "_")  # dropout of inputs=2
        if is_setting and name in options:
            message = f"{flag(name)} {SETTING.sub(typed, rest)}"
        raise type(refusal)(message, hint=hint) from refusal


def refused(refusal: Any) -> tuple[str, str]:
    """What is wrong with the words that were typed, and what to try.

    Releases of typer since 0.28 leave it to pydantic to say what a number should be, which names
    the rule and not the value.
    """
    verb = refusal.ctx.command_path if refusal.ctx else "elman"
    hint = f"{verb} --help lists what it takes"
    problems = getattr(refusal.__cause__, "errors", list)()
    if not problems:
        return refusal.format_message(), hint
    rule, limits = problems[0]["type"], problems[0].get("ctx", {})
    name = max(refusal.param.opts, key=len)
    if rule not in RULES:
        return f"{refusal.format_message()}, not {problems[0]['input']!r}", hint
    typed = problems[0]["input"].strip() or repr(problems[0]["input"])
    must = RULES[rule].format(**limits)
    nearest = limits.get("ge", limits.get("le"))
    return f"{name} {typed} must be {must}", _instead(name, must, nearest, refusal.param)


def _instead(name: str, must: str, nearest: float | None, param: Any) -> str:
    """What to type instead: what an option is when left out, else the nearest that will do."""
    default = param.show_default if isinstance(param.show_default, str) else param.default
    value = nearest if default is None or " " in str(default) else default
    try_it = f"leave {name} out, or give it {must}" if value is None else f"try {name} {value}"
    return f"{try_it} ({param.help})" if param.help else try_it


RULES = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:,.0f}",
}
"""What a value must be, by pydantic's name for the rule that it broke."""


def check_streams() -> None:
    """Refuse a closed stdout; make sure that no file is opened in a closed stream's place.

    A file opened while stderr is closed becomes stderr, and error messages are written into it.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(nowhere)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    if sys.stdout is None:
        raise UserError(
            "stdout is closed, so the result has nowhere to go", hint="> /dev/null discards it"
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what has no code there, an odd file name, is shown
            stream.reconfigure(errors="backslashreplace")


def check_folder() -> None:
    """Refuse a current folder that is gone: torch's products end the process there."""
    try:
        os.getcwd()
    except FileNotFoundError as gone:
        raise UserError("the current folder was deleted", hint="cd into another one") from gone
