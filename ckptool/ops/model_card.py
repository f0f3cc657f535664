"""The card (README.md) of a model that is pushed to the Hub: where its weights come from.

Its metadata: https://huggingface.co/docs/hub/model-cards. What is written about the training are numbers only: names of
files and folders on the trainer's machine stay there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptool
from ckptool.core.position import DataPosition
from ckptool.errors import NotFoundError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.ops.data_read import read_position
from ckptool.storage.files import Place

CARD_NAME = "README.md"
_BEGIN, _END = "<!-- ckptool: begin -->", "<!-- ckptool: end -->"
_SECTION = re.compile(rf"{_BEGIN}.*?{_END}\n*", re.DOTALL)

#: What is true of a model trained on from another, too, of what that one's card says.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")


@dataclass(frozen=True)
class Origin:
    """Where the weights of a checkpoint come from. `base` is a Hub id, "" when it is none or not known."""

    checkpoint: str
    base: str = ""
    base_commit: str = ""
    step: int | None = None
    position: DataPosition | None = None


def read_origin(path: Place) -> Origin:
    """What a checkpoint says of itself; one of another trainer's may say nothing. Raises as `read_manifest` does."""
    provenance = read_manifest(path).provenance
    if provenance is None:
        return Origin(path.name)
    try:
        position = read_position(path).position
    except NotFoundError:
        position = None
    base, commit = provenance.source.get("repo"), provenance.source.get("commit")
    return Origin(
        path.name,
        base if isinstance(base, str) else "",
        commit if isinstance(commit, str) else "",
        provenance.step,
        position,
    )


def make_card(repo: str, folder: Path, origin: Origin | None, present: str | None) -> str:
    """The card for `folder` in the repository `repo`, whose own card is `present`, if it has one.

    A present card is kept, but for the section that is ours. Else the folder's own, which is the base model's, follows
    ours. Without an `origin` nothing is known that a card could say: the present one, or the folder's, stays as it is.
    """
    own = folder / CARD_NAME
    brought = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else ""
    is_adapter = (folder / "adapter_config.json").is_file()
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if origin is None:
        return present or brought or _joined(metadata, f"# {repo.rpartition('/')[2]}\n")
    if origin.base and origin.base != repo:
        metadata["base_model"] = origin.base
        if is_adapter or origin.step:
            metadata["base_model_relation"] = "adapter" if is_adapter else "finetune"
    section = _section(origin)
    if present is not None:
        kept, text = _taken_apart(present)
        text = _SECTION.sub(lambda match: section, text) if _SECTION.search(text) else f"{text.rstrip()}\n\n{section}"
        return _joined({**kept, **metadata}, text.lstrip("\n"))
    kept, text = _taken_apart(brought)
    inherited = {key: kept[key] for key in _INHERITED if key in kept}
    text = _SECTION.sub("", text).strip()
    below = f"\n## The base model's card\n\n{text}\n" if text else ""
    return _joined({**inherited, **metadata}, f"# {repo.rpartition('/')[2]}\n\n{section}{below}")


def _section(origin: Origin) -> str:
    rows = []
    if origin.base:
        commit = f" at commit `{origin.base_commit}`" if origin.base_commit else ""
        rows.append(("base model", f"[{origin.base}](https://huggingface.co/{origin.base}){commit}"))
    if origin.step is not None:
        rows.append(("optimizer steps", f"{origin.step:,}" if origin.step else "none: the base model's own weights"))
    if origin.position is not None:
        position = origin.position
        units = f"{position.consumed:,} units of {position.segment.seq_len:,} tokens"
        rows.append(("data position", f"{units}, seed {position.segment.seed}, history `{position.history}`"))
    rows.append(("exported by", f"ckptool {ckptool.__version__}, from the checkpoint `{origin.checkpoint}`"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"{_BEGIN}\n## Where these weights come from\n\n| | |\n|---|---|\n{table}\n{_END}\n"


def _taken_apart(card: str) -> tuple[dict[str, Any], str]:
    """A card's metadata and its text; of metadata that can't be read, the text alone."""
    import yaml
    from huggingface_hub import ModelCard

    if not card:
        return {}, ""
    try:
        found = ModelCard(card, ignore_metadata_errors=True)
    except (ValueError, TypeError, yaml.YAMLError):
        return {}, re.sub(r"\A\s*---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return found.data.to_dict(), found.text


def _joined(metadata: dict[str, Any], text: str) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(ignore_metadata_errors=True, **metadata)
    return f"---\n{data.to_yaml()}\n---\n\n{text}"
