"""What an export of a model works from, and what each form that it can be written in has to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import stream_tensor
from ckptool.core.interfaces import Sink
from ckptool.core.parts import Part, PlanItem
from ckptool.core.plan import Plan
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import TensorEntry
from ckptool.formats.dcp_metadata import MODEL_PREFIX, is_checkpoint
from ckptool.naming.groups import NamePlan
from ckptool.ops.inputs import same_bytes
from ckptool.ops.model_source import ConfigFolder, ModelSource, find_config
from ckptool.ops.side_files_kept import check_hf_files
from ckptool.ops.vocabulary import check_tokens
from ckptool.planner import Cut, plan_conversion
from ckptool.storage.digests_file import read_digests
from ckptool.storage.files import Place

PIECE_BYTES = 32 << 20

#: How items are distributed over files.
LayOut = Callable[[list[PlanItem]], list[Part]]


@dataclasses.dataclass(frozen=True)
class ExportJob:
    """The checkpoint, what it is to become, and the config it goes with.

    `live` are the model's tensors by the model's own names, a tie under those that the source stored; `cast` is the
    wanted dtype (None: keep). `num_ranks`, `num_workers` and `memory_bytes` are for the planner.
    """

    path: Place
    target: Place
    source: ModelSource
    live: Mapping[str, TensorEntry]
    config: ConfigFolder
    cast: str | None = None
    untie: bool = False
    max_shard_bytes: int = 5_000_000_000
    num_ranks: int = 1
    num_workers: int | None = None
    memory_bytes: int | None = None

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    @property
    def provenance(self) -> Provenance | None:
        return self.manifest.provenance

    @property
    def own(self) -> dict[str, TensorEntry]:
        """`live` without the tensors that an import kept aside, since the model has no use for them."""
        return {name: entry for name, entry in self.live.items() if name not in self.source.extra}

    def read_config(self) -> dict[str, Any] | None:
        """The model's config; None where there is none. Raises as `naming.meta_model.read_config` does."""
        from ckptool.naming.meta_model import read_config

        return read_config(self.config.path, len(self.live), sum(entry.num_bytes for entry in self.live.values()))

    def same_bytes(self, a: str, b: str) -> bool:
        return same_bytes(self.source, MODEL_PREFIX + a, MODEL_PREFIX + b)

    def plan(self, names: NamePlan, lay_out: LayOut, cut: Cut = stream_tensor, **options: Any) -> Plan:
        """The plan of `names` with the job's own limits; `options` are further ones of `plan_conversion`.

        Raises as that does, and as `check_tokens` does.
        """
        check_tokens(names, self.config.path)
        return plan_conversion(
            "export",
            self.manifest,
            names,
            str(self.target),
            cut=cut,
            piece_bytes=PIECE_BYTES,
            source_prefix=MODEL_PREFIX,
            lay_out=lay_out,
            num_workers=self.num_workers,
            memory_bytes=self.memory_bytes,
            **options,
        )


class Form(Protocol):
    """A form in which a model can be written: its names, its files, and what lies beside them."""

    def name_tensors(self) -> NamePlan: ...

    def likely_names(self) -> NamePlan | None:
        """What `name_tensors` most likely comes to, without a look at the model; None where that can't be said."""
        ...

    def plan(self, names: NamePlan) -> Plan: ...

    def open_sink(self, content: Path, plan: Plan, names: NamePlan) -> Sink: ...

    def put_beside(self, content: Path, plan: Plan, names: NamePlan) -> list[str]:
        """Write what belongs beside the tensors; returns notes."""
        ...


def open_job(path: Place, target: Place, source: ModelSource, config: str, untie: bool, **options: Any) -> ExportJob:
    """Raises as `find_config` does, and as `check_hf_files` where the checkpoint's own config is taken."""
    manifest = source.manifest
    if not config and is_checkpoint(path):
        check_hf_files(path, read_digests(path, manifest.save_id))
    own_names = {fqn: fqn.removeprefix(MODEL_PREFIX) for fqn in manifest.tensors}
    live = {name: dataclasses.replace(manifest.tensors[fqn], fqn=name) for fqn, name in own_names.items()}
    if not untie:
        live = _choose_tied(live, manifest)
    return ExportJob(path, target, source, live, find_config(path, config), untie=untie, **options)


def _choose_tied(live: Mapping[str, TensorEntry], manifest: Manifest) -> dict[str, TensorEntry]:
    """One name per tie, unless the source stored more: then the same ones as there."""
    provenance = manifest.provenance
    ties = {a.removeprefix(MODEL_PREFIX): c.removeprefix(MODEL_PREFIX) for a, c in manifest.ties.items()}
    stored = set(provenance.stored_tied_names) if provenance else set()
    chosen = dict(live)
    for canonical in set(ties.values()):
        names = {canonical, *(alias for alias, target in ties.items() if target == canonical)}
        keep = names & stored or {canonical}
        for fqn in names - keep:
            chosen.pop(fqn, None)
    return chosen
