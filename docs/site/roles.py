"""Sphinx roles in docstrings (``:class:`Recipe```) as plain code, for pages made of them by mkdocstrings."""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


class Roles(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
