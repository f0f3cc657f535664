"""A checkpoint's adapter as a folder for peft."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ckptool.core.cuts import stream_tensor
from ckptool.core.parts import one_part
from ckptool.core.plan import Plan
from ckptool.core.provenance import Naming
from ckptool.formats.dcp_metadata import MODEL_PREFIX
from ckptool.formats.hf_sink import HfSink, layout
from ckptool.naming.adapter_names import PEFT_PREFIX
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.ops.adapters import Adapter
from ckptool.ops.export_job import PIECE_BYTES, ExportJob
from ckptool.planner import plan_conversion
from ckptool.storage.files import write_json

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"


class AdapterForm:
    """`adapter_model.safetensors` and `adapter_config.json`, as peft's own save_pretrained writes them."""

    def __init__(self, job: ExportJob, adapter: Adapter) -> None:
        self._job = job
        self._adapter = adapter

    def name_tensors(self) -> NamePlan:
        """What is no adapter's is left out, with a note."""
        live, cast = self._job.live, self._job.cast
        groups = [
            NameGroup((name,), {f"{PEFT_PREFIX}{module}.lora_{side}.weight": live[name].shape}, cast=cast)
            for module, low_rank in self._adapter.layers.items()
            for side, name in (("A", low_rank.a), ("B", low_rank.b))
        ]
        num_others = len(live) - len(groups)
        notes = (f"left out: {num_others} tensors that are not the adapter's",) if num_others else ()
        return NamePlan(tuple(groups), Naming("peft"), notes=notes)

    def plan(self, names: NamePlan) -> Plan:
        job = self._job
        return plan_conversion(
            "export",
            job.manifest,
            names,
            str(job.target),
            cut=stream_tensor,
            piece_bytes=PIECE_BYTES,
            source_prefix=MODEL_PREFIX,
            lay_out=lambda items: one_part(layout(items), WEIGHTS_NAME),
            num_workers=job.num_workers,
            memory_bytes=job.memory_bytes,
        )

    def open_sink(self, content: Path, plan: Plan, names: NamePlan) -> HfSink:
        return HfSink(content, plan.parts)

    def put_beside(self, content: Path, plan: Plan, names: NamePlan) -> list[str]:
        write_json(content / CONFIG_NAME, self._config())
        return []

    def _config(self) -> dict[str, Any]:
        """peft scales each layer by the one alpha / the layer's own rank, as is done here."""
        ranks = {module: low_rank.rank for module, low_rank in self._adapter.layers.items()}
        ((usual, _),) = Counter(ranks.values()).most_common(1)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._adapter.record.get("base"),
            "r": usual,
            "lora_alpha": self._adapter.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "rank_pattern": {module: rank for module, rank in ranks.items() if rank != usual},
            "target_modules": sorted(ranks),
        }
