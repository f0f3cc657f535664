"""The reference road of import: transformers' `from_pretrained` on the CPU, then the state dict saved, whole."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.dtypes import CASTABLE
from ckptool.core.interfaces import Progress
from ckptool.core.parts import PlanItem, one_part
from ckptool.core.plan import Plan, Result
from ckptool.core.provenance import Naming
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import UnsupportedError, name_some
from ckptool.formats.casts import check_overflow
from ckptool.formats.hf_config import main_dtype
from ckptool.formats.hf_folder import copy_side_files, is_weight_file, side_files
from ckptool.hub import Located
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.targets import check_disk
from ckptool.storage.files import Place
from ckptool.storage.place import local_path
from ckptool.storage.staging import staged_directory


def import_through_transformers(
    located: Located,
    target: Place,
    cast: str | None,
    *,
    overwrite: bool,
    dry_run: bool,
    progress: Callable[[Plan], Progress] | None,
) -> Result:
    """Load the whole model as transformers does, in every weight format that it reads, and save it with DCP.

    With `cast` None the dtype is transformers' "auto" (what config.json says). Notes name parameters that the weights
    lack and transformers initialised.
    """
    import torch.distributed.checkpoint as dcp

    from ckptool.formats.dcp_adapters import SaveWriter

    start = time.monotonic()
    path = local_path(located.path, "the engine transformers")
    model, notes = _load(path, cast)
    ties = {alias: canonical for alias, canonical in model.all_tied_weights_keys.items()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ties}
    plan = _plan(located, target, state, notes)
    check_disk(target, plan)
    if dry_run:
        return Result("import-hf", str(target), plan, False, time.monotonic() - start, plan.notes)
    report = progress(plan) if progress else None
    with staged_directory(target, overwrite) as staging:
        copy_side_files(path, staging / "hf", side_files(path))
        write_provenance(staging, _provenance(located, model, ties, plan))
        writer = SaveWriter(staging, {f"model.{a}": f"model.{c}" for a, c in ties.items()})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({"model": state}, storage_writer=writer, no_dist=True)
        if report:
            report(plan.write_bytes)
    return Result("import-hf", str(target), plan, True, time.monotonic() - start, plan.notes)


def _load(folder: Path, cast: str | None) -> tuple[Any, tuple[str, ...]]:
    import torch

    from ckptool.naming.meta_model import build_meta_model, read_config

    # How many tensors the weights are is not known before they are loaded; a tensor has a byte at least.
    num_bytes = sum(file.stat().st_size for file in folder.glob("*") if is_weight_file(file.name))
    if not folder.is_dir() or read_config(folder, min(num_bytes, 10_000), num_bytes) is None:
        raise UnsupportedError(f"{folder}: --engine transformers needs a model folder with config.json")
    model_class: Any = type(build_meta_model(folder))
    wanted = getattr(torch, cast) if cast else "auto"
    model, info = model_class.from_pretrained(
        folder, dtype=wanted, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    _check_cast(model, folder)
    notes = []
    if missing := set(info["missing_keys"]):
        notes.append(f"NOT in the weights, initialised by transformers: {name_some(missing)}")
    if unexpected := set(info["unexpected_keys"]):
        notes.append(f"left out, the model doesn't use them: {name_some(unexpected)}")
    return model, tuple(notes)


def _check_cast(model: Any, folder: Path) -> None:
    """Raise MismatchError when transformers' cast made an infinity of a number in the weights of `folder`."""
    import torch

    floats = {n: t for n, t in model.state_dict().items() if str(t.dtype).removeprefix("torch.") in CASTABLE}
    if not any(bool(tensor.isinf().any()) for tensor in floats.values()):
        return
    # Which of these infinities the weights have themselves can only be seen in a dtype that holds all of them.
    wide = type(model).from_pretrained(folder, dtype=torch.float64, local_files_only=True, trust_remote_code=False)
    stored = wide.state_dict()
    for name, tensor in floats.items():
        check_overflow(name, stored[name], tensor)


def _plan(located: Located, target: Place, state: dict[str, Any], notes: tuple[str, ...]) -> Plan:
    entries = [_entry(f"model.{name}", tensor) for name, tensor in state.items()]
    num_bytes = sum(entry.num_bytes for entry in entries)
    parts = one_part(PlanItem((entry.fqn.removeprefix("model."),), (entry,)) for entry in entries)
    return Plan(
        "import-hf", str(located.path), str(target), tuple(parts), num_bytes, num_bytes, num_bytes, num_bytes, notes
    )


def _entry(fqn: str, tensor: Any) -> TensorEntry:
    shape = tuple(tensor.shape)
    return TensorEntry(fqn, str(tensor.dtype).removeprefix("torch."), shape, (Chunk(Box.whole(shape)),))


def _provenance(located: Located, model: Any, ties: dict[str, str], plan: Plan) -> Any:
    import transformers

    from ckptool.naming.transformers_names import NAMING, describe

    fired = tuple(describe(transform) for transform in getattr(model, "_weight_conversions", None) or ())
    written = [entry for item in plan.items for entry in item.targets]
    return new_provenance(
        source={**located.origin, "dtype": main_dtype(written)},
        naming=Naming(NAMING, type(model).__name__, fired, transformers.__version__),
        ties=ties,
    )
