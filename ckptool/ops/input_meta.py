"""A Llama in Meta's form (params.json, consolidated.*.pth) as a model to import."""

from __future__ import annotations

import contextlib
from typing import Any

from ckptool.formats.hf_config import CONFIG_NAME, main_dtype
from ckptool.formats.hf_folder import model_folder
from ckptool.formats.meta_folder import ORIGINAL, MetaSource
from ckptool.ops.inputs import CopiedFiles, MadeFiles, ModelInput, SideFiles, same_bytes
from ckptool.storage.files import Place


def open_meta(folder: Place, inside: str, cast: str | None) -> ModelInput:
    """Open the model in Meta's form in a folder, or in its folder `inside`. The config is that of its Hub form
    where one lies beside it or, for a folder named `original`, above it; else params.json gives it.

    The caller closes `source`. Raises a CkptoolError when the model is damaged or not understood.
    """
    from ckptool.naming.meta_llama import COMPUTED, plan_meta_import

    with contextlib.ExitStack() as stack:
        source = MetaSource(folder, inside)
        stack.callback(source.close)
        dtype = main_dtype(source.manifest.tensors.values())
        model, side, notes = _model(source, dtype, cast)
        names = plan_meta_import(model, source.pieces, cast, lambda a, b: same_bytes(source, a, b))
        stack.pop_all()
    if COMPUTED in source.pieces:
        notes.append(f"left out, the model computes it: {COMPUTED}")
    return ModelInput(source, names, dtype, side, notes=tuple(notes))


def _model(source: MetaSource, dtype: str | None, cast: str | None) -> tuple[Any, SideFiles, list[str]]:
    from ckptool.naming.meta_llama import meta_config
    from ckptool.naming.meta_model import build_from_config, build_meta_model, read_config

    folder = source.folder
    homes = [folder, folder.parent] if folder.name == ORIGINAL else [folder]
    home = next((place for place in homes if (place / CONFIG_NAME).exists()), None)
    if home is not None:
        home = model_folder(home)
        read_config(home, len(source.pieces), source.manifest.num_bytes)
        return build_meta_model(home, cast), CopiedFiles(home), []
    config = meta_config(source.params, source.pieces)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    made = config.to_json_string().encode()
    note = f"config.json is made of params.json; check its max_position_embeddings ({config.max_position_embeddings})"
    files = MadeFiles({CONFIG_NAME: made}, CopiedFiles(model_folder(folder)))
    return build_from_config(config, str(folder), cast), files, [note]
