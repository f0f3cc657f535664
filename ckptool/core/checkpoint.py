"""Manifest: everything a checkpoint says about itself, without its tensor bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptool.core.box import exact_cover_fault
from ckptool.core.findings import Finding, Kind
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import Locator, ObjectEntry, TensorEntry
from ckptool.errors import DamagedError


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    `paths` gives, per fqn, the keys that lead to it in the nested state dict it was saved from
    (DCP's `planner_data`); `ties` maps an alias fqn to the fqn whose bytes it shares; `save_id` is DCP's, which covers
    `digests.json` in checkpoints of ours. `whole_rows` says that tensors can only be read in whole rows of dim 0, since
    they are made while they are read.
    """

    location: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    provenance: Provenance | None = None
    save_id: str = ""
    whole_rows: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor payload, a tie counted once."""
        return sum(t.num_bytes for fqn, t in self.tensors.items() if fqn not in self.ties)

    @property
    def num_chunks(self) -> int:
        """Stored boxes of all tensors."""
        return sum(len(t.chunks) for t in self.tensors.values())

    def check_cover(self) -> None:
        """Every element of every tensor in exactly one chunk, every locator inside its file.

        Raises DamagedError naming the first tensor at fault.
        """
        for fault in self.faults():
            raise DamagedError(f"{self.location}: {fault.message}", kind=fault.kind)

    def faults(self) -> Iterator[Finding]:
        """All that `check_cover` objects to: first tensors that are not covered, then bytes that aren't there."""
        for entry in self.tensors.values():
            fault = exact_cover_fault([chunk.box for chunk in entry.chunks], entry.shape)
            if fault:
                yield Finding(_cover_kind(fault), f"tensor {entry.fqn}: {fault}", tensor=entry.fqn)
        for fqn, locators in self._all_locators():
            for locator in locators:
                if not 0 <= locator.offset <= locator.offset + locator.length <= self.files.get(locator.file, -1):
                    yield self._locator_fault(fqn, locator)

    def _locator_fault(self, fqn: str, locator: Locator) -> Finding:
        file, offset = locator.file, locator.offset
        size = self.files.get(file)
        if size is None:
            return Finding("missing", f"{fqn} needs {file}, which is not there", fqn, file)
        message = f"{fqn} lies at {offset}+{locator.length} of {file}, which ends at {size} (truncated?)"
        return Finding("truncated" if min(offset, locator.length) >= 0 else "corrupt", message, fqn, file, offset)

    def _all_locators(self) -> Iterator[tuple[str, list[Locator]]]:
        for entry in self.tensors.values():
            yield entry.fqn, [chunk.locator for chunk in entry.chunks if chunk.locator]
        for item in self.objects.values():
            yield item.fqn, [item.locator] if item.locator else []


def _cover_kind(fault: str) -> Kind:
    if fault.endswith("overlap"):
        return "overlapping"
    return "missing" if fault.startswith("chunks cover") else "corrupt"
