"""What to type after a finding."""

from __future__ import annotations

import shlex
from typing import Any

from ckptool.core.checkpoint import Manifest
from ckptool.storage.files import Place


def another_copy(folder: Place, manifest: Manifest | None) -> str:
    """For bytes that are lost: fetch them again where they came from, else see which other checkpoints there are."""
    source: dict[str, Any] = manifest.provenance.source if manifest and manifest.provenance else {}
    step = manifest.provenance.step if manifest and manifest.provenance else 0
    if step == 0 and isinstance(source.get("repo"), str):
        commit = ["--revision", str(source["commit"])] if source.get("commit") else []
        return _command("import-hf", source["repo"], f"{folder.name}-again", *commit)
    return _command("ls", folder.absolute().parent)


def compare(one: str | Place, other: str | Place, fqn: str = "") -> str:
    return _command("diff", one, other, *(["--keys", fqn] if fqn else []))


def look_at_file(path: Place) -> str:
    return shlex.join(["ls", "-l", str(path)])


def _command(*words: str | Place) -> str:
    return shlex.join(["ckptool", *map(str, words)])
