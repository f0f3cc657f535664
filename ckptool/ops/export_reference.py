"""The reference road of export: torch's own conversion, transformers' own renaming, whole model in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ckptool.core.interfaces import Progress
from ckptool.ops.export_job import ExportJob
from ckptool.planner import cast_dtype
from ckptool.storage.place import local_path


def export_through_torch(job: ExportJob, staging: Path, report: Progress | None) -> None:
    """`dcp_to_torch_save`, then `revert_weight_conversion` over the whole state dict, then the safetensors library."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from ckptool.formats.hf_folder import EXTRA_NAME

    path = local_path(job.path, "--engine torch")
    with tempfile.TemporaryDirectory(dir=staging.parent, prefix=f"{staging.name}-") as scratch:
        single = Path(scratch, "all.pt")
        # Its raw unpickling of .metadata is safe here: the allow-list has already read the same file.
        dcp_to_torch_save(path, single)
        everything = torch.load(single, mmap=True, weights_only=True)
        state = {name: everything["model"][name] for name in job.live if name not in job.source.extra}
        extra = load_file(path / "hf" / EXTRA_NAME) if job.source.extra else {}
        _save_shards({**_to_hub_names(job, state), **extra}, staging, job.max_shard_bytes)
    if report:
        report(sum(entry.num_bytes for entry in job.live.values()))


def _to_hub_names(job: ExportJob, state: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from ckptool.formats.casts import check_overflow
    from ckptool.formats.dcp_metadata import MODEL_PREFIX
    from ckptool.naming.meta_model import DtypeRule, build_meta_model, is_custom_code
    from ckptool.naming.transformers_names import recorded_transforms
    from ckptool.naming.vocabulary import find_padded

    def cast(name: str, wanted: str | None) -> Any:
        stored = str(state[name].dtype).removeprefix("torch.")
        made = state[name].to(getattr(torch, cast_dtype(stored, wanted)))
        check_overflow(MODEL_PREFIX + name, state[name], made)
        return made

    config = job.read_config()
    if config is None or is_custom_code(config):
        return {name: cast(name, job.cast) for name in state}
    model: Any = build_meta_model(job.config.path, job.cast)
    padded = find_padded(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    state = {name: tensor[: padded[name][1]] if name in padded else tensor for name, tensor in state.items()}
    rule = DtypeRule(model, job.cast)
    model._weight_conversions = recorded_transforms(model, job.provenance) or None
    return revert_weight_conversion(model, {name: cast(name, rule.of(name)) for name in state})


def _save_shards(tensors: dict[str, Any], folder: Path, max_shard_bytes: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from ckptool.formats.hf_folder import INDEX_NAME
    from ckptool.storage.files import write_json

    split = split_torch_state_dict_into_shards(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, max_shard_size=max_shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        # Clones, because the library refuses tensors that share memory, as a tie stored under two names does.
        save_file({name: tensors[name].clone().contiguous() for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX_NAME, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
