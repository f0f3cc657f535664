"""What an import reads: tensors, their names in the model, and the side files, whatever form the model comes in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckptool.core.box import Box
from ckptool.core.interfaces import Source
from ckptool.errors import CkptoolError, name_some
from ckptool.formats.gguf_file import SUFFIX as GGUF_SUFFIX
from ckptool.formats.gguf_file import find_gguf
from ckptool.formats.hf_config import CONFIG_NAME, drop_quantisation, main_dtype, quantisation_of, weights_dtype
from ckptool.formats.hf_folder import SINGLE_NAME, HfSource, copy_side_files, model_folder, side_files, weight_kind
from ckptool.formats.meta_folder import ORIGINAL, find_meta
from ckptool.formats.sharded_safetensors import ShardedSafetensors, is_sharded_folder
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.sections import OPTIMIZER, read_sections
from ckptool.storage.files import Place, os_errors
from ckptool.storage.place import fetched

Stored = HfSource | ShardedSafetensors


class SideFiles(Protocol):
    """What lies beside the weights: config, tokenizer, code."""

    num_files: int
    num_bytes: int

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class ModelInput:
    """A model to import. `dtype` is what its config says, or should say, of its weights; `quantisation` is how they
    were stored, "" if plainly. `adapter` is for ckptool.json, not empty when there is one beside the layers; `also` is
    what the source reads beside the files of its manifest, in words that change with it."""

    source: Source
    names: NamePlan
    dtype: str | None
    side: SideFiles
    quantisation: str = ""
    notes: tuple[str, ...] = ()
    adapter: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def open_input(path: Place, cast: str | None) -> ModelInput:
    """Open a model's folder or file of weights. `cast` is the dtype that the weights will get (None: keep).

    A folder without weights of the Hub's kinds may hold a model in Meta's form, itself or in `original/`, or one GGUF
    file. The caller closes `source`. Raises a CkptoolError when it can't be read, or is not understood.
    """
    if path.suffix == GGUF_SUFFIX:
        path = fetched(path.parent, [path.name]) / path.name
        from ckptool.ops.input_gguf import open_gguf

        return open_gguf(path, cast)
    if path.is_dir():
        names = [file.name for file in path.iterdir()]
        if weight_kind(names) is None:
            original = path / ORIGINAL
            below = [f"{ORIGINAL}/{file.name}" for file in original.iterdir()] if original.is_dir() else []
            meta = find_meta([*names, *below])
            if meta is not None:
                from ckptool.ops.input_meta import open_meta

                return open_meta(path, meta, cast)
            if (gguf := find_gguf(names, str(path))) is not None:
                return open_input(path / gguf, cast)
    with contextlib.ExitStack() as stack:
        stored = open_weights(path)
        stack.callback(stored.close)
        opened = _open_folder(path, stored, cast)
        stack.pop_all()
    return opened


def weight_bytes(path: Place) -> int:
    """The size of the safetensors files of a folder; 0 for anything else."""
    if not path.is_dir():
        return 0
    return sum(file.stat().st_size for file in path.glob("*.safetensors") if file.is_file())


def guess_input(path: Place, cast: str | None) -> ModelInput | None:
    """What `open_input` most likely comes to for a folder of plain safetensors, without a look at the model: all
    tensors keep their names. None where that is unlikely, or something is wrong with the folder.

    Of a folder in a store the side files are left out: they are fetched by `open_input`.
    """
    if not path.is_dir() or is_sharded_folder(path) or not (path / CONFIG_NAME).exists():
        return None
    kind = weight_kind([file.name for file in path.iterdir()])
    try:
        if kind is None or kind.single != SINGLE_NAME or quantisation_of(path):
            return None
        source = HfSource(path)
    except CkptoolError:  # which `open_input` will say in full
        return None
    shapes = {name: entry.shape for name, entry in source.manifest.tensors.items()}
    dtype = main_dtype(source.manifest.tensors.values())
    side = CopiedFiles(path) if isinstance(path, Path) else MadeFiles({})
    return ModelInput(source, keep_names(shapes, cast, ""), dtype, side)


def open_weights(path: Place) -> Stored:
    """The weights of a folder or file as they are stored. Raises as `HfSource` and `ShardedSafetensors` do."""
    return ShardedSafetensors(path) if path.is_dir() and is_sharded_folder(path) else HfSource(path)


class CopiedFiles:
    """The side files of a folder, with its config made to say that the weights are plain ones of `plain_dtype`.

    Nothing is copied when it is not a model's: a single file of weights may lie among anything.
    """

    def __init__(self, folder: Path, plain_dtype: str | None = None, is_model: bool = True) -> None:
        self._folder = folder
        self._names = side_files(folder) if is_model else []
        self._plain_dtype = plain_dtype
        self.num_files = len(self._names)
        self.num_bytes = sum((folder / name).stat().st_size for name in self._names)

    def write(self, folder: Path) -> None:
        copy_side_files(self._folder, folder, self._names)
        if self._plain_dtype:
            drop_quantisation(folder, self._plain_dtype)


class MadeFiles:
    """Side files made for a model that came without (name -> content), and those that did come."""

    def __init__(self, files: Mapping[str, bytes], copied: CopiedFiles | None = None) -> None:
        self._files = files
        self._copied = copied
        self.num_files = len(files) + (copied.num_files if copied else 0)
        self.num_bytes = sum(len(content) for content in files.values()) + (copied.num_bytes if copied else 0)

    def write(self, folder: Path) -> None:
        if self._copied is not None:
            self._copied.write(folder)
        with os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._files.items():
                (folder / name).write_bytes(content)


def _open_folder(path: Place, stored: Stored, cast: str | None) -> ModelInput:
    if isinstance(stored, ShardedSafetensors):
        _take_model(stored)
    source: Source = stored
    is_model = path.is_dir() or (stored.folder / CONFIG_NAME).exists()
    folder = model_folder(stored.folder) if is_model else fetched(stored.folder, ())
    quantisation = quantisation_of(folder)
    notes = [*stored.notes]
    dtype, method = main_dtype(stored.manifest.tensors.values()), ""
    if quantisation:
        source, dropped, dtype = _dequantised(stored, folder, quantisation, cast)
        method = quantisation["quant_method"]
        notes.append(f"quantised with {method}: dequantised to {cast or dtype}, and exported so")
        if dropped:
            notes.append(f"left out, made for quantised weights only: {dropped}")
    names = name_tensors(folder, path.name, source, cast, dequantised=bool(method))
    side = CopiedFiles(folder, dtype if method else None, is_model)
    return ModelInput(source, names, dtype, side, method, tuple(notes))


def _take_model(stored: ShardedSafetensors) -> None:
    """Leave out the optimizer and what else was saved beside the model; the model's tensors get its own names."""
    manifest, sections = stored.manifest, read_sections(stored.manifest)
    if OPTIMIZER not in sections.of.values():
        return
    tensors = {name: dataclasses.replace(manifest.tensors[fqn], fqn=name) for name, fqn in sections.model.items()}
    stored.manifest = dataclasses.replace(manifest, tensors=tensors, paths={name: (name,) for name in tensors})
    taken = set(sections.model.values())
    rest = [fqn for fqn in manifest.tensors if fqn not in taken]
    stored.notes.append(f"left out, since only the model is read: {name_some(rest)}")


def _dequantised(
    stored: HfSource | ShardedSafetensors, folder: Path, quantisation: object, cast: str | None
) -> tuple[Source, str, str]:
    """The source of plain weights, the names of tensors it leaves out, and the dtype of the weights.

    Where a cast is wanted the weights come as float32, so that they are rounded once.
    """
    from ckptool.formats.quantised import find_quantised
    from ckptool.formats.recipe_source import RecipeSource

    found = find_quantised(stored.manifest.tensors, quantisation, str(stored.folder))
    dtype = weights_dtype(folder)
    dropped = name_some(list(found.dropped)) if found.dropped else ""
    return RecipeSource(stored, found, "float32" if cast else dtype), dropped, dtype


def name_tensors(folder: Path, name: str, source: Source, cast: str | None, *, dequantised: bool = False) -> NamePlan:
    """Names by the model of `folder`'s config.json; as they are when there is none, or only its own code knows it."""
    from ckptool.naming.meta_model import build_meta_model, is_custom_code, read_config

    config = read_config(folder, len(source.manifest.tensors), source.manifest.num_bytes, dequantised)
    shapes = {fqn: entry.shape for fqn, entry in source.manifest.tensors.items()}
    if config is None:
        return keep_names(shapes, cast, f"no config.json beside {name}: tensors keep their names")
    if is_custom_code(config):
        note = "the model is the repository's own code, which is not run: tensors keep their names"
        return keep_names(shapes, cast, note)
    from ckptool.naming.transformers_names import plan_import

    model = build_meta_model(folder, cast)
    return plan_import(model, source.manifest.tensors, cast, lambda a, b: same_bytes(source, a, b))


def same_bytes(source: Source, a: str, b: str, piece_bytes: int = 16 << 20) -> bool:
    """Compare two stored tensors piece by piece."""
    one, other = source.manifest.tensors[a], source.manifest.tensors[b]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows = max(1, piece_bytes // max(1, one.num_bytes // max(1, one.shape[0] if one.shape else 1)))
    for box in Box.whole(one.shape).split_rows(rows):
        first, second = (bytearray(box.num_elements * one.itemsize_bytes) for _ in range(2))
        source.read_into(a, box, memoryview(first))
        source.read_into(b, box, memoryview(second))
        if first != second:
            return False
    return True
