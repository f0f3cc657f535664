"""A GGUF file as a model to import: dequantised tensors, and the config and tokenizer that transformers makes of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.config_limits import check_config
from ckptool.core.interfaces import Source
from ckptool.errors import UnsupportedError
from ckptool.formats.gguf_file import GgufSource
from ckptool.formats.recipe_source import RecipeSource
from ckptool.naming.groups import NamePlan
from ckptool.ops.inputs import MadeFiles, ModelInput, same_bytes
from ckptool.storage.scratch import scratch_folder

_DTYPE = "float32"
_HINT = "import the model's safetensors, whose config.json says it"


def open_gguf(path: Path, cast: str | None) -> ModelInput:
    """Open one GGUF file. Its tensors come as float32, whatever they were stored as.

    The caller closes `source`. Raises a CkptoolError when the file is damaged or not understood.
    """
    with contextlib.ExitStack() as stack:
        stored = GgufSource(path)
        stack.callback(stored.close)
        source, names, config, notes = _named(path, stored, cast)
        files, more_notes = _tokenizer(path)
        files["config.json"] = config
        stack.pop_all()
    stored_as = f"GGUF {stored.types}" if stored.num_quantised else ""
    what = f"{stored.types} became {cast or _DTYPE}; an export is not quantised" if stored_as else ""
    notes = [*([what] if what else []), *notes, *more_notes]
    return ModelInput(source, names, cast or _DTYPE, MadeFiles(files), stored_as, tuple(notes))


def _named(path: Path, stored: GgufSource, cast: str | None) -> tuple[Source, NamePlan, bytes, list[str]]:
    """The tensors under the live names of the model that the file implies, that model's config.json, and notes."""
    from ckptool.naming.gguf_names import gguf_config, plan_gguf_import
    from ckptool.naming.gguf_rope import ROPE_FREQS
    from ckptool.naming.meta_model import build_from_config

    config = gguf_config(path)
    manifest = stored.manifest
    check_config(config.to_dict(), str(path), num_tensors=len(manifest.tensors), num_bytes=manifest.num_bytes)
    scaled = _scale_rope(path, stored, config)
    tensors = {name: entry for name, entry in manifest.tensors.items() if not (scaled and name == ROPE_FREQS)}
    model = build_from_config(config, str(path), cast)
    names, found = plan_gguf_import(
        model, path, stored.architecture, tensors, cast, lambda a, b: same_bytes(stored, a, b)
    )
    model.config.architectures = [type(model).__name__]
    model.config.dtype = cast or _DTYPE
    notes = [f"{ROPE_FREQS} became rope_parameters in config.json: {scaled}"] if scaled else []
    return RecipeSource(stored, found, _DTYPE), names, model.config.to_json_string().encode(), notes


def _scale_rope(path: Path, stored: GgufSource, config: Any) -> str:
    """Put into the config what transformers leaves out of it: how RoPE is scaled. Returns what that is, "" for not.

    Raises UnsupportedError for a scaling that is not understood: the model would compute something else in silence.
    """
    from ckptool.naming.gguf_rope import ROPE_FREQS, llama3_rope

    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default":
        return ""
    if ROPE_FREQS in stored.manifest.tensors:
        entry = stored.manifest.tensors[ROPE_FREQS]
        data = bytearray(entry.num_bytes)
        stored.read_into(ROPE_FREQS, Box.whole(entry.shape), memoryview(data))
        scaled = llama3_rope(memoryview(data).cast("f").tolist(), parameters.get("rope_theta", 10000.0))
        if scaled is None:
            raise UnsupportedError(f"{path}: {ROPE_FREQS} scales RoPE in a way that is not known", hint=_HINT)
        config.rope_parameters = scaled
        return f"{scaled['rope_type']}, factor {scaled['factor']:g}"
    if stored.rope_scaling not in ("", "none"):
        raise UnsupportedError(
            f"{path}: its RoPE is scaled ({stored.rope_scaling[:100]}), which transformers leaves out of the config",
            hint=_HINT,
        )
    return ""


def _tokenizer(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The files of the tokenizer that transformers makes of the file's vocabulary, or a note that it makes none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with scratch_folder() as scratch:
            folder = Path(scratch, "tokenizer")
            tokenizer.save_pretrained(folder)
            made = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    except Exception as error:  # a strange vocabulary makes transformers raise nearly anything
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return {}, [f"transformers makes no tokenizer of this file ({detail}): put one into the checkpoint's hf/"]
    return made, []
