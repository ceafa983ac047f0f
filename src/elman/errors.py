"""The two ways elman says no.

A `UserError` is a request that cannot be served: a wrong argument, a missing file. It carries what
is wrong (the value and the rule) and a hint: what to try instead. The command line prints both and
exits with status 2. `WorkFailed` is a good request whose work went wrong (a loss that became NaN):
exit status 1. Anything else that escapes is a bug and shows its traceback.

Users read the names that they type. `message` and `hint` are for the command line and may name
options as it has them; the error itself, which Python shows, spells those as arguments.
(`elman.cli.limits.as_typed` does the reverse for settings in a message.)
"""

import re

_FLAG = re.compile(
    r"(?P<kept>\b(?:elman|python|pip|torchrun) [^;]*"  # a command, to be typed as it is
    r"|(?<!\w)(?P<quote>['\"]).*?(?P=quote)(?!\w))"  # and what somebody else wrote
    r"|(?<![^\s(])--(?P<name>[a-z]+(?:-[a-z]+)*)(?=[\s,;:)=]|\.(?!\w)|$)"
    r"(?P<value>[ =](?=['\"\d%A-Z]|-\d|\S*[\d/:]\w))?"
)


def as_arguments(text: str) -> str:
    """Options of a command line as Python spells them; whole commands stay as they are.

    So does what only looks like an option: a part of a name, or of what is quoted.

    >>> as_arguments("--top-k 0 must be at least 1; --top-k 5, or leave --top-k out")
    'top_k=0 must be at least 1; top_k=5, or leave top_k out'
    >>> as_arguments("no run there; elman train BOOK.txt --out RUN makes one")
    'no run there; elman train BOOK.txt --out RUN makes one'
    >>> as_arguments("there is no file draft--two.txt, nor '2024 --old'")
    "there is no file draft--two.txt, nor '2024 --old'"
    """

    def spelled(found: re.Match[str]) -> str:
        if found["kept"]:
            return found["kept"]
        return found["name"].replace("-", "_") + ("=" if found["value"] else "")

    return _FLAG.sub(spelled, text)


def counted(number: int, things: str) -> str:
    """A number of things in words.

    >>> counted(1, "tokens"), counted(1200, "tokens")
    ('1 token', '1,200 tokens')
    """
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


class UserError(ValueError):
    """A request that cannot be served, and what to try instead.

    >>> raise UserError("window=0 must be at least 1", hint="Full() never truncates")
    Traceback (most recent call last):
    elman.errors.UserError: window=0 must be at least 1; Full() never truncates
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(as_arguments(f"{message}; {hint}" if hint else message))
        self.message = message
        self.hint = hint


class MissingSource(UserError, FileNotFoundError):
    """A file, folder or run that is not there."""


class NotText(UserError):
    """Bytes that are not text in the encoding in which they were read."""


class Unreadable(UserError, OSError):
    """A file that is there and cannot be read: which says nothing about what is in it."""


class OutOfRange(UserError, IndexError):
    """An index that points outside what it indexes."""


class NotFitted(UserError, AttributeError):
    """What is asked of a model that has not learned anything yet."""


class Misfit(UserError, RuntimeError):
    """Tensors that do not fit a module or one another, which torch.nn answers with a
    `RuntimeError`: what catches that catches this, too."""


class WorkFailed(RuntimeError):
    """Work that was asked for rightly and went wrong on the way."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(as_arguments(f"{message}; {hint}" if hint else message))
        self.message = message
        self.hint = hint


class Diverged(WorkFailed):
    """A training whose loss or gradient became infinite or NaN: other options may prevent it."""
