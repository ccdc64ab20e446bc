"""An extension of griffe, which reads the sources for the API reference: docstrings become Markdown."""

from __future__ import annotations

from typing import Any

from griffe import Docstring, Extension, Object
from tools.reference import comment_above, markdown


class Docstrings(Extension):
    """Rewrites the docstring of each object; a name that is assigned has the comment above it for one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe when an object has been read."""
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
