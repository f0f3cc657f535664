"""Imports that other libraries make and never use on a CPU: GPU kernels, drivers of clouds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Absent(ModuleType):
    """Has whatever is asked for, so that decorators and annotations of a module can be evaluated; does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


class _Finder(MetaPathFinder, Loader):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{module}.") for module in self._modules)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def doing_without(*modules: str) -> Iterator[None]:
    """While this lasts, `modules` can be imported although they are not there."""
    finder = _Finder(modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
