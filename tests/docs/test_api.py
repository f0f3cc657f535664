"""The public door: every name is described, and every command is one call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import ckptool
from ckptool.cli.main import cli
from tests.docs.pages import TOP

PAGE = (TOP / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
NAMES = [name for name in ckptool.__all__ if name != "__version__"]


def test_the_page_describes_every_name_once() -> None:
    assert sorted(re.findall(r"^::: ckptool\.(\w+)$", PAGE, re.MULTILINE)) == sorted(NAMES)


def test_every_command_is_one_call() -> None:
    rows = dict(re.findall(r"^\| `ckptool ([a-z-]+(?: [a-z]+)?)` \| `(\w+)`", PAGE, re.MULTILINE))
    commands = {name for name in cli.commands if name not in ("completion", "data")}
    commands |= {f"data {name}" for name in cli.commands["data"].commands}  # type: ignore[attr-defined]
    assert rows.keys() == commands
    assert set(rows.values()) <= set(NAMES)


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that the class itself defines."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and (callable(member) or isinstance(member, (property, classmethod, staticmethod))):
            yield name, member


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_types_and_a_docstring(name: str) -> None:
    value = getattr(ckptool, name)
    assert inspect.getdoc(value)
    assert [member for member, found in members(value) if not inspect.getdoc(found)] == []
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert untyped == [] and signature.return_annotation is not inspect.Signature.empty
