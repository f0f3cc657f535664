"""A checkpoint's model as a DCP checkpoint of another trainer, under that trainer's names."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from ckptool.core.cuts import cut_tensor
from ckptool.core.plan import Plan
from ckptool.errors import NotFoundError, UnsupportedError
from ckptool.formats.dcp_sink import DcpSink, dcp_parts
from ckptool.formats.hf_config import main_dtype, match_config
from ckptool.formats.hf_folder import copy_side_files
from ckptool.naming.groups import NamePlan
from ckptool.naming.name_table import Dialect
from ckptool.ops.export_job import ExportJob
from ckptool.ops.import_hf import CHUNK_OVERHEAD_BYTES, DIGEST_RECORD_BYTES


class DialectForm:
    """A DCP folder that the trainer loads as a model to start from, config and tokenizer in its `hf/`."""

    def __init__(self, job: ExportJob, dialect: Dialect) -> None:
        self._job = job
        self._dialect = dialect
        self._prefix = "".join(f"{key}." for key in dialect.keys)

    def name_tensors(self) -> NamePlan:
        """Raises NotFoundError without a config, UnsupportedError for a model of a repository's own code, MismatchError
        for a model that the dialect has no names for."""
        from ckptool.naming.composition import compose, made_entries
        from ckptool.naming.live_names import plan_live
        from ckptool.naming.meta_model import DtypeRule, build_meta_model, is_custom_code
        from ckptool.naming.name_table import groups_from_live

        job, dialect = self._job, self._dialect
        config = job.read_config()
        if config is None:
            raise NotFoundError(
                f"{job.path} has no config.json, without which {dialect.name}'s names can't be made",
                hint="--config HF_FOLDER_OR_ID names a Hugging Face model like it",
            )
        if is_custom_code(config):
            raise UnsupportedError(f"{job.path}: {dialect.name} has no names for a model of a repository's own code")
        model = build_meta_model(job.config.path, job.cast)
        first = plan_live(model, job.own, job.same_bytes)
        live = made_entries(first, job.own)
        rule = DtypeRule(model, job.cast)
        groups = [
            dataclasses.replace(group, cast=rule.of(group.sources[0]))
            for group in groups_from_live(dialect, live, model.config)
        ]
        aliases = {alias: dataclasses.replace(live[canonical], fqn=alias) for alias, canonical in first.ties.items()}
        tied = groups_from_live(dialect, aliases, model.config)
        theirs = {group.sources[0]: next(iter(group.targets)) for group in (*groups, *tied)}
        names = compose(first, NamePlan(tuple(groups), dataclasses.replace(first.naming, name=dialect.name)))
        ties = {theirs[alias]: theirs[canonical] for alias, canonical in first.ties.items()}
        return dataclasses.replace(names, ties=ties)

    def likely_names(self) -> None:
        return None

    def plan(self, names: NamePlan) -> Plan:
        job = self._job
        return job.plan(
            names,
            partial(dcp_parts, num_ranks=job.num_ranks),
            cut_tensor,
            target_prefix=self._prefix,
            extra_disk_bytes=job.config.num_bytes + len(job.live) * DIGEST_RECORD_BYTES,
            chunk_overhead_bytes=CHUNK_OVERHEAD_BYTES,
        )

    def open_sink(self, content: Path, plan: Plan, names: NamePlan) -> DcpSink:
        """A tie is listed under both names, since the trainer asks for both, and stored once."""
        tensors = {entry.fqn: entry for item in plan.items for entry in item.targets}
        ties = {self._prefix + alias: self._prefix + canonical for alias, canonical in names.ties.items()}
        ties = {alias: canonical for alias, canonical in ties.items() if canonical in tensors}
        paths = {fqn: (*self._dialect.keys, fqn.removeprefix(self._prefix)) for fqn in (*tensors, *ties)}
        return DcpSink(content, tensors, paths, ties)

    def put_beside(self, content: Path, plan: Plan, names: NamePlan) -> list[str]:
        """The config and tokenizer in `hf/`, where the way back finds them; they say what the tensors are."""
        job = self._job
        if not job.config.side:
            return []
        copy_side_files(job.config.path, content / "hf", job.config.side)
        written = [entry for item in plan.items for entry in item.targets]
        provenance = job.provenance
        return match_config(
            content / "hf", main_dtype(written), None, bool(names.untied or (provenance and provenance.untied))
        )
