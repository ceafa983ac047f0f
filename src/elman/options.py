"""An option is said once: on the field of the settings that it belongs to.

    @dataclass(frozen=True)
    class Settings:
        epochs: int = option(10, "Passes over the text", panel="Updates", at_least=1, later=True)

        def __post_init__(self) -> None:
            check(self)

What is said there (help, range, choices, whether a resume may change it) is what the check
enforces, what `elman train --help` shows, and what a page or a report can read with `described`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from operator import index
from typing import Any, get_args, get_type_hints

from elman.errors import UserError

DEVICES = "auto, cpu, cuda, cuda:1, mps or another of torch"
"""What `--device` may be, for people: any name of a device that PyTorch knows and finds."""

KEY = "option"
_OWN = {int, float, bool, str, type(None)}
LARGEST = 2**63 - 1
"""The largest whole number an option can have: more would not fit into 64 bits."""
KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a word"),
    bool: (bool, "true or false"),
}
"""What is accepted as a value of each type, and how to say so."""


@dataclass(frozen=True)
class Beside:
    """What another option must be for an option to mean anything: `value`, or not `but`, or given.

    >>> Beside("average", "ema").met(0.9, {"average": "none"}), Beside("k").met(1, {"k": 4})
    (False, True)
    >>> Beside("level", but="byte").met("latin-1", {"level": "byte"})
    False
    """

    name: str
    value: Any = None
    but: Any = None
    such_as: Any = None  # what to try, where that is not `value`
    only: Any = None  # the value that needs it, where others do not
    unless: "Beside | None" = None  # another that does instead

    def known(self, options: Mapping[str, Any]) -> bool:
        """Whether these options say what it asks about."""
        return self.name in options and (self.unless is None or self.unless.known(options))

    def met(self, value: Any, options: Mapping[str, Any]) -> bool:
        """Whether an option of this value means anything beside these."""
        now = options[self.name]
        if self.only not in (None, value) or (self.unless and self.unless.met(value, options)):
            return True
        if self.but is not None:
            return now != self.but
        return bool(now) if self.value is None else now == self.value

    def refuse(
        self,
        name: str,
        value: Any,
        options: Mapping[str, Any],
        spelled: Callable[[str, Any], str] | None = None,
    ) -> None:
        """Raise a UserError for an option that changes nothing beside these, unless it is met."""
        if self.met(value, options):
            return
        spelled, now = spelled or as_setting, options[self.name]
        nothing = now is None or now is False or now == ""
        other = f"out {spelled(self.name, True)}" if nothing else f" {spelled(self.name, now)}"
        instead = self.such_as if self.value is None else self.value
        raise UserError(
            f"{spelled(name, value)} means nothing with{other}",
            hint=f"{spelled(self.name, instead)}, or leave it out",
        )


DECODED = Beside("level", but="byte", such_as="char", unless=Beside("clean", "letters"))
"""What an option needs that says how bytes spell text: that they are read as text."""


@dataclass(frozen=True)
class Option:
    """What there is to know about one option, besides its type and default."""

    help: str
    panel: str
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: int | None = None
    choices: Collection[str] | Callable[[], Collection[str]] = ()  # asked each time, if it can be
    hint: str = ""  # what to try instead of a value out of range
    name: str = ""  # as one types it, where that is not the field's name
    flag: str = ""  # as one types it on a command line, where that is not --name
    other: type | None = None  # objects that do instead of a word or number, and check themselves
    zero_is_none: bool = False  # one types 0 for None
    read: Callable[[str], Any] | None = None  # from the word that is typed to the value
    show: Callable[[Any], str] = str  # and back
    later: bool = False  # a training may be continued with another value
    beside: Beside | None = None  # without which it means nothing

    def refuse_outside(
        self, name: str, value: Any, kinds: Sequence[type] = (object,), *, default: Any
    ) -> None:
        """Raise a UserError for a value that is not one of the choices, or out of range.

        `kinds` are the types of the field; a value of another type is refused, too. `default` is
        what to try instead, unless there is a hint.
        """
        if self.other is not None and isinstance(value, self.other):
            return
        if self.known:
            if value not in self.known:
                raise UserError(f"unknown {name} {value!r}", hint=f"one of {', '.join(self.known)}")
            return
        if value is None and (self.zero_is_none or type(None) in kinds or object in kinds):
            return
        rule = _other_type(value, kinds) or (None if self._inside(value) else self.range)
        rule = "finite" if rule and value == math.inf else rule
        if rule is not None:
            hint = self.hint or f"try {name}={self.show(default)} ({self.help})"
            raise UserError(f"{name}={_short(value)} must be {rule}", hint=hint)

    @property
    def known(self) -> Collection[str]:
        """The choices that there are now; none: any value."""
        return self.choices() if callable(self.choices) else self.choices

    def _inside(self, value: Any) -> bool:
        if self.at_least is self.above is self.below is self.at_most is None:
            return True
        low = self.at_least is None or value >= self.at_least
        return (
            low
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and value < (math.inf if self.below is None else self.below)
        )

    @property
    def range(self) -> str:
        """The range in words.

        >>> Option("", "", at_least=0, below=1).range, Option("", "", above=0).range
        ('at least 0 and below 1', 'positive')
        """
        words = [] if self.at_least is None else [f"at least {self.at_least:g}"]
        if self.above is not None:
            words.append("positive" if self.above == 0 else f"above {self.above:g}")
        if self.below is not None:
            words.append(f"below {self.below:g}")
        if self.at_most is not None:
            words.append(f"at most {self.at_most:,}")
        return " and ".join(words)


def option(default: Any, help: str, *, panel: str, **facts: Any) -> Any:
    """A dataclass field that describes itself; `facts` are the fields of `Option`."""
    return field(default=default, metadata={KEY: Option(help, panel, **facts)})


def as_number(value: Any) -> Any:
    """A number of whatever library as Python's own; anything else as it is.

    >>> import numpy as np
    >>> as_number(np.int64(64)), as_number(np.float32(0.5)), as_number(np.True_), as_number("64")
    (64, 0.5, True, '64')
    """
    if type(value) in _OWN:
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # NumPy's, torch's
        value = value.item()
    if isinstance(value, int | float):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def hold_numbers(settings: Any) -> None:
    """Hold the numbers of a dataclass, frozen or not, as Python's own."""
    for name, value in list(vars(settings).items()):
        if (own := as_number(value)) is not value:
            object.__setattr__(settings, name, own)


def whole_number(name: str, value: Any, *, at_least: int | None = None, hint: str) -> int:
    """A whole number of 64 bits that a caller has passed, of whatever library; else a UserError.

    >>> whole_number("length", 6.0, at_least=0, hint="length=200 writes 200 tokens")
    Traceback (most recent call last):
    elman.errors.UserError: length=6.0 must be a whole number; length=200 writes 200 tokens
    """
    if type(value) is int and (at_least is None or value >= at_least) and abs(value) < LARGEST:
        return value  # as nearly always: what follows finds words, and takes ten times as long
    value = as_number(value)
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # of whatever else counts
            value = index(value)
    Option("", "", at_least=at_least, hint=hint).refuse_outside(name, value, (int,), default=None)
    return value


def check(settings: Any, label: str = "{}") -> None:
    """Refuse any field of a dataclass that breaks the rule stated on it, or is of another type.

    And one that means nothing beside the others, those of settings inside it included. Numbers of
    other libraries are held as Python's own.
    """
    hold_numbers(settings)
    kinds = _kinds(type(settings))
    for f in fields(settings):
        if KEY in f.metadata:
            rule: Option = f.metadata[KEY]
            value, default = getattr(settings, f.name), f.default
            rule.refuse_outside(label.format(f.name), value, kinds[f.name], default=default)
    options, fields_of = _all_options(settings)
    for o, needed in _idle(described(type(settings)), options):
        needed.refuse(o.name, options[o.name], options, lambda n, v: as_setting(fields_of[n], v))


def _all_options(settings: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a dataclass and of those in its fields, and the fields they are called by."""
    inside = [getattr(settings, f.name) for f in fields(settings)]
    options = [
        (o, getattr(each, o.field))
        for each in [settings, *(i for i in inside if is_dataclass(i) and not isinstance(i, type))]
        for o in described(type(each))
    ]
    return {o.name: value for o, value in options}, {o.name: o.field for o, _ in options}


def _idle(
    owned: Iterable["Described"], options: Mapping[str, Any]
) -> list[tuple["Described", Beside]]:
    """Those of some options that mean nothing beside all of them, and are not as usual."""
    return [
        (o, needed)
        for o in owned
        if (needed := o.option.beside) is not None
        and options[o.name] != o.default
        and needed.known(options)
        and not needed.met(options[o.name], options)
    ]


def heeded(
    owner: type, arguments: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of a dataclass, the default standing for each that means nothing.

    So a preset may have what one of the user's own options makes idle, and what was written down
    before that was refused can be read. `others` are options of other dataclasses.
    """
    owned, kept = described(owner), dict(arguments)
    options = {**(others or {}), **{o.name: kept.get(o.field, o.default) for o in owned}}
    while idle := _idle(owned, options):  # what meant something beside these may mean nothing now
        kept |= {o.field: o.default for o, _ in idle}
        options |= {o.name: o.default for o, _ in idle}
    return kept


@functools.cache
def _kinds(owner: type) -> dict[str, tuple[type, ...]]:
    """The types of each field: (int, NoneType) of int | None."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(owner).items()}


def _other_type(value: Any, kinds: Sequence[type]) -> str | None:
    """What a value must be that is of none of these types, or a number beyond 64 bits; or None."""
    known = [KINDS[kind] for kind in kinds if kind in KINDS]
    fits = any(isinstance(value, kind) and _is_bool(value) == (kind is bool) for kind, _ in known)
    if known and not fits:
        return " or ".join(words for _, words in known)
    if isinstance(value, Integral) and not -LARGEST - 1 <= int(value) <= LARGEST:
        return f"at most {LARGEST:,}, which fits into 64 bits"
    return None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _short(value: Any) -> str:
    """
    >>> _short(12), _short(10**50), _short("12")
    ('12', '1000000000000000000000000000000000000000…', "'12'")
    """
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


@dataclass(frozen=True)
class Described:
    """An option, found on the field of a dataclass."""

    name: str  # among all options
    owner: type  # the dataclass
    field: str  # its name there
    type: type
    default: Any
    option: Option

    def as_typed(self, value: Any) -> Any:
        """The value as one types it: 0 where None is stored."""
        return self.type(0) if value is None and self.option.zero_is_none else value

    def as_stored(self, value: Any) -> Any:
        """The value as its field holds it: None where 0 is typed."""
        return None if self.option.zero_is_none and not value else value


def described(owner: type, prefix: str = "") -> list[Described]:
    """The options among the fields of a dataclass, in their order."""
    kinds = _kinds(owner)
    options = []
    for f in fields(owner):
        if KEY in f.metadata:
            facts: Option = f.metadata[KEY]
            name = facts.name or prefix + f.name
            options.append(Described(name, owner, f.name, kinds[f.name][0], f.default, facts))
    return options


def stored(options: Iterable[Described], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataclass, from all options as typed."""
    return {o.field: o.as_stored(values[o.name]) for o in options}


def typed(options: Iterable[Described], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All options as typed, from the fields of a dataclass: `stored` read backwards."""
    return {o.name: o.as_typed(settings[o.field]) for o in options}


def as_setting(name: str, value: Any) -> str:
    """How Python spells an option with its value; True: the option alone.

    >>> as_setting("chunks", 4), as_setting("chunks", True)
    ('chunks=4', 'chunks')
    """
    return name if value is True else f"{name}={value}"


def as_flag(name: str, value: Any) -> str:
    """How a command line spells it.

    >>> as_flag("top_k", 4), as_flag("top_k", True)
    ('--top-k 4', '--top-k')
    """
    return flag(name) if value is True else f"{flag(name)} {value}"


def flag(name: str) -> str:
    """
    >>> flag("hidden_size")
    '--hidden-size'
    """
    return "--" + name.replace("_", "-")
