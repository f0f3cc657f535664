"""Does a state dict to be filled match a checkpoint? Decided from the checkpoint's metadata, before a byte is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptool.core.checkpoint import Manifest
from ckptool.core.dtypes import CASTABLE
from ckptool.errors import MismatchError, name_some

_MAX_COMPLAINTS = 8


class Template:
    """A state dict, flattened as DCP names things."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.values, self.paths = flatten_state_dict(state_dict)
        self.sections = {str(path[0]) for path in self.paths.values() if len(path) > 1}
        self.has_top_level_values = any(len(path) == 1 for path in self.paths.values())


@dataclass(frozen=True)
class TemplateCheck:
    """The rules of a load: see `ckptool.distributed.load` for what each allows."""

    allow_cast: bool = False
    allow_missing: Collection[str] = ()
    ignore: Collection[str] = ()

    def run(self, template: Template, manifest: Manifest) -> None:
        """Compare the template with a checkpoint. Raises MismatchError listing every difference."""
        stored = {*manifest.tensors, *manifest.objects}
        missing = {fqn for fqn in template.values if fqn not in stored and fqn not in self.allow_missing}
        unexpected = self._unexpected(template, manifest)
        complaints = [f"not in the checkpoint: {name_some(missing)}"] if missing else []
        if unexpected:
            complaints.append(f"in the checkpoint, but not asked for: {name_some(unexpected)}")
        for fqn, value in template.values.items():
            fault = self._fault(value, fqn, manifest) if fqn in stored else ""
            if fault:
                complaints.append(f"{fqn} {fault}")
        if complaints:
            more = f"; and {len(complaints) - _MAX_COMPLAINTS} more" if len(complaints) > _MAX_COMPLAINTS else ""
            raise MismatchError(f"{manifest.location} does not match: {'; '.join(complaints[:_MAX_COMPLAINTS])}{more}")

    def _unexpected(self, template: Template, manifest: Manifest) -> set[str]:
        """Stored names within the template's sections that nothing asks for; either name of a tie asks for both."""
        asked = {manifest.ties.get(fqn, fqn) for fqn in template.values}
        return {
            fqn
            for fqn in (*manifest.tensors, *manifest.objects)
            if manifest.ties.get(fqn, fqn) not in asked
            and _is_within(fqn, template, manifest)
            and not any(fqn == prefix or fqn.startswith(f"{prefix}.") for prefix in self.ignore)
        }

    def _fault(self, value: Any, fqn: str, manifest: Manifest) -> str:
        """What is wrong between a template's value and the stored one; "" when it can be loaded."""
        entry = manifest.tensors.get(fqn)
        if not isinstance(value, torch.Tensor):
            return "" if entry is None else "is a tensor in the checkpoint, a plain value here"
        if entry is None:
            return "is a plain value in the checkpoint, a tensor here"
        if tuple(value.shape) != entry.shape:
            return f"has shape {list(entry.shape)} in the checkpoint, {list(value.shape)} here"
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype == entry.dtype or (self.allow_cast and {dtype, entry.dtype} <= CASTABLE):
            return ""
        return f"is {entry.dtype} in the checkpoint, {dtype} here"


def _is_within(fqn: str, template: Template, manifest: Manifest) -> bool:
    """True for names below one of the template's top-level dicts, and for top-level values if the template has some."""
    if any(fqn.startswith(f"{section}.") for section in template.sections):
        return True
    is_top_level = len(manifest.paths[fqn]) == 1 if fqn in manifest.paths else "." not in fqn
    return is_top_level and template.has_top_level_values
