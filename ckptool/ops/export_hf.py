"""A checkpoint's model as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from ckptool.core.plan import Plan
from ckptool.core.text import natural_order
from ckptool.errors import DamagedError, NotFoundError
from ckptool.formats.hf_config import main_dtype, match_config
from ckptool.formats.hf_folder import copy_side_files
from ckptool.formats.hf_sink import HfSink, hf_parts
from ckptool.naming.dialects import find_dialect
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.selection import untie_all
from ckptool.ops.export_job import ExportJob


class HfForm:
    """safetensors shards under the Hub's names, config and tokenizer beside them."""

    def __init__(self, job: ExportJob) -> None:
        self._job = job

    def name_tensors(self) -> NamePlan:
        """Raises NotFoundError when only a config could say what another library's names mean."""
        from ckptool.naming.meta_model import build_meta_model, is_custom_code

        job = self._job
        shapes = {fqn: entry.shape for fqn, entry in job.live.items()}
        config = job.read_config()
        if config is None:
            self._refuse_without_config()
            note = "no hf/config.json in the checkpoint: tensors keep their names, no config"
            return keep_names(shapes, job.cast, note)
        if is_custom_code(config):
            return keep_names(shapes, job.cast, "the model is the repository's own code: tensors keep their names")
        from ckptool.naming.composition import compose, made_entries
        from ckptool.naming.live_names import plan_live
        from ckptool.naming.transformers_names import plan_export

        model = build_meta_model(job.config.path, job.cast)
        if job.provenance is None:
            first = plan_live(model, job.live, job.same_bytes)
            first = untie_all(first) if job.untie else first
            return compose(first, plan_export(model, made_entries(first, job.live), None, job.cast))
        names = plan_export(model, job.own, job.provenance, job.cast)
        extra = keep_names({fqn: job.live[fqn].shape for fqn in job.source.extra}, None, "")
        return dataclasses.replace(names, groups=(*names.groups, *extra.groups))

    def likely_names(self) -> NamePlan | None:
        """The names as they are, for a model that was imported without a transform."""
        job = self._job
        naming = job.provenance.naming if job.provenance else None
        if naming is None or naming.name != "transformers" or naming.transforms:
            return None
        own = {name: job.own[name].shape for name in sorted(job.own, key=natural_order)}
        extra = {name: job.live[name].shape for name in job.source.extra}
        return keep_names(own | extra, job.cast, "")

    def plan(self, names: NamePlan) -> Plan:
        job = self._job
        lay_out = partial(hf_parts, max_shard_bytes=job.max_shard_bytes)
        return job.plan(names, lay_out, extra_disk_bytes=job.config.num_bytes)

    def open_sink(self, content: Path, plan: Plan, names: NamePlan) -> HfSink:
        return HfSink(content, plan.parts)

    def put_beside(self, content: Path, plan: Plan, names: NamePlan) -> list[str]:
        """Side files, and a config that agrees with the tensors."""
        job = self._job
        copy_side_files(job.config.path, content, job.config.side)
        written = [entry for item in plan.items for entry in item.targets]
        provenance = job.provenance
        source_dtype = provenance.source.get("dtype") if provenance else None
        untied = bool(job.untie or names.untied or (provenance and provenance.untied))
        quantised = provenance.source.get("quantization") if provenance else None
        notes = [f"the source was quantised with {quantised}; these weights are not"] if quantised else []
        return notes + match_config(content, main_dtype(written), source_dtype, untied)

    def _refuse_without_config(self) -> None:
        job = self._job
        if job.provenance and job.provenance.naming and job.provenance.naming.transforms:
            raise DamagedError(
                f"{job.config.path} has no config.json, without which the Hub's names can't be made",
                hint="put the model's config.json there",
                kind="missing",
            )
        if dialect := find_dialect(job.live):
            raise NotFoundError(
                f"{job.path} has the names of {dialect.name}, and no config.json says which model it is",
                hint="--config HF_FOLDER_OR_ID names a Hugging Face model like it",
            )
