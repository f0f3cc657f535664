"""Other libraries' names: every module of this package is one, with a `DIALECT`. Adding one is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection

from ckptool.naming.name_table import Dialect


def dialect_names() -> list[str]:
    """The names of the modules, which are those of the dialects; none of them is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_dialect(name: str) -> Dialect:
    return importlib.import_module(f"{__name__}.{name}").DIALECT


def find_dialect(names: Collection[str]) -> Dialect | None:
    """The dialect whose marks are among a model's `names`; None for names of transformers, or unknown ones."""
    known = set(names)
    return next((d for d in map(load_dialect, dialect_names()) if set(d.marks) <= known), None)
