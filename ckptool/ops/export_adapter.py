"""A checkpoint's adapter as a folder for peft."""

from __future__ import annotations

from pathlib import Path

from ckptool.core.parts import one_part
from ckptool.core.plan import Plan
from ckptool.core.provenance import Naming
from ckptool.formats.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from ckptool.formats.hf_sink import HfSink, layout
from ckptool.naming.adapter_names import PEFT_PREFIX, matrix_names
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.ops.adapters import Adapter
from ckptool.ops.export_job import ExportJob
from ckptool.storage.files import os_errors


class AdapterForm:
    """`adapter_model.safetensors` and `adapter_config.json`, as peft's own save_pretrained writes them."""

    def __init__(self, job: ExportJob, adapter: Adapter) -> None:
        self._job = job
        self._adapter = adapter

    def name_tensors(self) -> NamePlan:
        """What is no adapter's is left out, with a note."""
        live, cast = self._job.live, self._job.cast
        groups = []
        for module, low_rank in self._adapter.layers.items():
            names = matrix_names(PEFT_PREFIX + module)
            groups.append(NameGroup((low_rank.a,), {names["A"]: live[low_rank.a].shape}, cast=cast))
            groups.append(NameGroup((low_rank.b,), {names["B"]: live[low_rank.b].shape}, cast=cast))
        num_others = len(live) - len(groups)
        notes = (f"left out: {num_others} tensors that are not the adapter's",) if num_others else ()
        return NamePlan(tuple(groups), Naming("peft"), notes=notes)

    def likely_names(self) -> None:
        return None

    def plan(self, names: NamePlan) -> Plan:
        return self._job.plan(names, lay_out=lambda items: one_part(layout(items), WEIGHTS_NAME))

    def open_sink(self, content: Path, plan: Plan, names: NamePlan) -> HfSink:
        return HfSink(content, plan.parts)

    def put_beside(self, content: Path, plan: Plan, names: NamePlan) -> list[str]:
        with os_errors(content):
            (content / CONFIG_NAME).write_bytes(self._adapter.config.to_bytes())
        return []
