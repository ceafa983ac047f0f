"""The two ways elman says no.

A `UserError` is a request that cannot be served: a wrong argument, a missing file. It carries what
is wrong (the value and the rule) and a hint: what to try instead. The command line prints both and
exits with status 2. `WorkFailed` is a good request whose work went wrong (a loss that became NaN):
exit status 1. Anything else that escapes is a bug and shows its traceback.
"""


class UserError(ValueError):
    """A request that cannot be served, and what to try instead.

    >>> raise UserError("window=0 must be at least 1", hint="Full() never truncates")
    Traceback (most recent call last):
    elman.errors.UserError: window=0 must be at least 1; Full() never truncates
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class MissingSource(UserError, FileNotFoundError):
    """A file, folder or run that is not there."""


class NotText(UserError):
    """Bytes that are no text in the encoding in which they were to be read."""


class Unreadable(UserError, OSError):
    """A file that is there and cannot be read: which says nothing about what is in it."""


class OutOfRange(UserError, IndexError):
    """An index that points outside what it indexes."""


class Misfit(UserError, RuntimeError):
    """Tensors that do not fit a module or one another, which torch.nn answers with a
    `RuntimeError`: who catches that catches this."""


class WorkFailed(RuntimeError):
    """Work that was asked for rightly and went wrong on the way."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint
