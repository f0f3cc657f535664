"""A GGUF file as a model to import: dequantised tensors, and the config and tokenizer that transformers makes of it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from ckptool.core.config_limits import check_config
from ckptool.core.interfaces import Source
from ckptool.formats.gguf_file import GgufSource
from ckptool.formats.recipe_source import RecipeSource
from ckptool.naming.groups import NamePlan
from ckptool.ops.inputs import MadeFiles, ModelInput, same_bytes

_DTYPE = "float32"


def open_gguf(path: Path, cast: str | None) -> ModelInput:
    """Open one GGUF file. Its tensors come as float32, whatever they were stored as.

    The caller closes `source`. Raises a CkptoolError when the file is damaged or not understood.
    """
    with contextlib.ExitStack() as stack:
        stored = GgufSource(path)
        stack.callback(stored.close)
        source, names, config = _named(path, stored, cast)
        files, notes = _tokenizer(path)
        files["config.json"] = config
        stack.pop_all()
    stored_as = f"GGUF {stored.types}" if stored.num_quantised else ""
    what = f"{stored.types} became {cast or _DTYPE}; an export is not quantised" if stored_as else ""
    notes = [*([what] if what else []), *notes]
    return ModelInput(source, names, cast or _DTYPE, MadeFiles(files), stored_as, tuple(notes))


def _named(path: Path, stored: GgufSource, cast: str | None) -> tuple[Source, NamePlan, bytes]:
    """The tensors under the live names of the model that the file implies, and that model's config.json."""
    from ckptool.naming.gguf_names import gguf_config, plan_gguf_import
    from ckptool.naming.meta_model import build_from_config

    config = gguf_config(path)
    manifest = stored.manifest
    check_config(config.to_dict(), str(path), num_tensors=len(manifest.tensors), num_bytes=manifest.num_bytes)
    model = build_from_config(config, str(path), cast)
    names, found = plan_gguf_import(
        model, path, stored.architecture, manifest.tensors, cast, lambda a, b: same_bytes(stored, a, b)
    )
    model.config.architectures = [type(model).__name__]
    model.config.dtype = cast or _DTYPE
    return RecipeSource(stored, found, _DTYPE), names, model.config.to_json_string().encode()


def _tokenizer(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The files of the tokenizer that transformers makes of the file's vocabulary, or a note that it makes none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            made = {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
    except Exception as error:  # a strange vocabulary makes transformers raise nearly anything
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return {}, [f"transformers makes no tokenizer of this file ({detail}): put one into the checkpoint's hf/"]
    return made, []
