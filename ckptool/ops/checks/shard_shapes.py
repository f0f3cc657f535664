"""Does DCP in safetensors hold all that the config beside it wants? Its own headers don't say how large tensors are."""

from __future__ import annotations

from ckptool.errors import MismatchError, UnsupportedError
from ckptool.formats.hf_folder import model_folder
from ckptool.formats.sharded_safetensors import ShardedSafetensors
from ckptool.naming.sections import read_sections


def check_shard_shapes(source: ShardedSafetensors) -> list[str]:
    """Hold the tensors against the folder's config.json; a note where none that transformers knows says their shapes.

    Without the last rank's file tensors would only seem smaller. Tensors that the model lacks are let pass. Raises
    MismatchError for a shape that isn't the config's and for tensors of the model that are absent; DamagedError for a
    config that can't be read.
    """
    if not (source.folder / "config.json").is_file():
        return [source.count_note]
    try:
        _plan_by_config(source)
    except UnsupportedError:
        return [source.count_note]
    except MismatchError as error:
        raise MismatchError(
            f"{source.manifest.location}: {error}",
            hint=f"is a shard file missing? {len(source.manifest.files)} were found",
        ) from error
    return []


def _plan_by_config(source: ShardedSafetensors) -> None:
    from ckptool.naming.meta_model import build_meta_model, is_custom_code, read_config
    from ckptool.naming.transformers_names import plan_import

    manifest, folder = source.manifest, model_folder(source.folder)
    config = read_config(folder, len(manifest.tensors), manifest.num_bytes)
    if config is None or is_custom_code(config):
        raise UnsupportedError(f"{folder}: no config of a model that transformers knows")
    model = build_meta_model(folder)
    tensors = {name: manifest.tensors[fqn] for name, fqn in read_sections(manifest).model.items()}
    if tensors.keys().isdisjoint(model.state_dict()):
        raise UnsupportedError(f"{folder}: the tensors have other names than the config's model")
    plan_import(model, tensors, None, lambda a, b: True, may_be_padded=True, may_have_more=True)
