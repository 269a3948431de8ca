"""The docstrings under the fields of a class, which Python itself does not keep."""

import ast
import functools
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class and its bases, read from the source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        body = _class_bodies(base.__module__).get(base.__name__, [])
        for line, below in itertools.pairwise(body):
            match line, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    source = getattr(sys.modules[module], "__file__", None) or ""
    tree = ast.parse(Path(source).read_text(encoding="utf-8") if source.endswith(".py") else "")
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def documented(cls: type[T]) -> type[T]:
    """Show the docstrings of a class's fields in `help`; a decorator above `@frozen`. Python keeps
    no docstrings of fields, and in a notebook `help` is the documentation of what plugins import.

    `help` takes them from `__slots__` if that is a dictionary. A class without slots, such as a
    protocol, gets them at the end of its docstring.
    """
    if "__slots__" in vars(cls):
        cls.__slots__ = _FieldDocs(cls)  # type: ignore[attr-defined]
    else:
        docs = field_docs(cls)  # type: ignore[arg-type]
        fields = (f"{name}: {text}" for name, text in docs.items())
        cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), *fields])
    return cls


class _FieldDocs(dict[str, str]):
    """The slots of a class with the docstrings of its fields, read once `help` wants them."""

    def __init__(self, cls: Any) -> None:
        super().__init__(dict.fromkeys(cls.__slots__, ""))
        self._cls = cls

    def __getitem__(self, name: str) -> str:
        return field_docs(self._cls).get(name, "")
