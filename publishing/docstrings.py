"""A Griffe extension: the equations in docstrings, marked so that the site renders them."""

from typing import Any

import griffe

from publishing.maths import typeset


class Equations(griffe.Extension):
    """Typeset the equations of every docstring that the site shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = typeset(obj.docstring.value)
