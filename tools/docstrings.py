"""A griffe extension that converts docstrings to Markdown for the API reference."""

from __future__ import annotations

from typing import Any

from griffe import Docstring, Extension, Object
from tools.reference import comment_above, markdown


class Docstrings(Extension):
    """Converts the docstring of each object; for an assigned name it is the comment above."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
        elif (
            obj.is_attribute
            and obj.lineno is not None
            and isinstance(obj.lines_collection[obj.filepath], list)
        ):
            text = comment_above("\n".join(obj.lines_collection[obj.filepath]), obj.lineno)
            if text:
                obj.docstring = Docstring(markdown(text), parent=obj)
