"""JSON that any reader takes: no NaN, no Infinity, no nesting that overflows a stack.

Python writes numbers that are not finite as `NaN` and `Infinity`, which are not JSON. Everything
elman writes as JSON is written here: such a number becomes null.
"""

import json
import math
from typing import Any


def dumps(value: Any, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """The value as strict JSON.

    >>> dumps({"nats": 1.5, "perplexity": float("inf")})
    '{"nats": 1.5, "perplexity": null}'
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    except ValueError:  # rare: only then is the value walked through
        plain = finite(value)
        return json.dumps(plain, indent=indent, ensure_ascii=ascii_only, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None for every number in it that is not finite.

    >>> finite([1.0, (float("nan"), {"a": -float("inf")})])
    [1.0, [None, {'a': None}]]
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def loads(data: str | bytes) -> Any:
    """What JSON stands for; a ValueError if it is not JSON, or nested too deeply.

    >>> loads("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
