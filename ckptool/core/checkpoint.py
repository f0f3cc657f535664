"""Manifest: everything a checkpoint says about itself, without its tensor bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptool.core.box import exact_cover_fault
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import Locator, ObjectEntry, TensorEntry
from ckptool.errors import DamagedError


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    `paths` gives, per fqn, the keys that lead to it in the nested state dict it was saved from
    (DCP's `planner_data`); `ties` maps an alias fqn to the fqn whose bytes it shares; `save_id` is DCP's, which covers
    `digests.json` in checkpoints of ours.
    """

    location: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    provenance: Provenance | None = None
    save_id: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor payload, a tie counted once."""
        return sum(t.num_bytes for fqn, t in self.tensors.items() if fqn not in self.ties)

    @property
    def num_chunks(self) -> int:
        return sum(len(t.chunks) for t in self.tensors.values())

    def check_cover(self) -> None:
        """Every element of every tensor in exactly one chunk, every locator inside its file.

        Raises DamagedError naming the first tensor at fault.
        """
        for entry in self.tensors.values():
            fault = exact_cover_fault([chunk.box for chunk in entry.chunks], entry.shape)
            if fault:
                raise DamagedError(f"{self.location}: tensor {entry.fqn}: {fault}")
        self._check_locators()

    def _check_locators(self) -> None:
        for fqn, locators in self._all_locators():
            for locator in locators:
                size = self.files.get(locator.file)
                if size is None:
                    raise DamagedError(f"{self.location}: {fqn} needs {locator.file}, which is not there")
                if locator.offset < 0 or locator.length < 0 or locator.offset + locator.length > size:
                    raise DamagedError(
                        f"{self.location}: {fqn} lies at {locator.offset}+{locator.length} of {locator.file}, "
                        f"which ends at {size} (truncated?)"
                    )

    def _all_locators(self) -> Iterator[tuple[str, list[Locator]]]:
        for entry in self.tensors.values():
            yield entry.fqn, [chunk.locator for chunk in entry.chunks if chunk.locator]
        for item in self.objects.values():
            yield item.fqn, [item.locator] if item.locator else []
