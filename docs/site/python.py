"""Reference of the public Python package, by Sphinx' autodoc: the names of each module's ``__all__``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import penstock


def document() -> str:
    parts: list[str] = []
    described: dict[int, str] = {}
    for module in sorted(part.name for part in pkgutil.iter_modules(penstock.__path__, "penstock.")):
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", ())
        if not names:
            continue
        parts += [
            f"## {module}\n\n",
            "```{eval-rst}\n",
            f".. automodule:: {module}\n   :no-members:\n   :no-index:\n\n",
        ]
        for name in names:
            value = getattr(loaded, name)
            if first := described.get(id(value)):
                parts.append(f"``{name}`` is :py:obj:`{first}`.\n\n")
                continue
            described[id(value)] = f"{module}.{name}"
            parts.append(f".. {_directive(value)}:: {module}.{name}\n\n")
        parts.append("```\n\n")
    return "".join(parts)


def _directive(value: object) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) and hasattr(value, "__code__") else "autodata"
