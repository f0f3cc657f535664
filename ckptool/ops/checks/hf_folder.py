"""The structure of a Hugging Face folder: index, headers, sizes, and a config that agrees with the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.core.findings import Finding
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError
from ckptool.formats.hf_config import main_dtype
from ckptool.formats.hf_folder import INDEX_NAME, SINGLE_NAME, read_index
from ckptool.formats.safetensors_file import read_header
from ckptool.formats.sharded_safetensors import ShardedSafetensors, is_sharded_folder
from ckptool.ops.checks import next_steps
from ckptool.storage.files import Place, read_json, safe_join
from ckptool.storage.place import range_reader


def check_hf_folder(path: Place) -> tuple[Mapping[str, TensorEntry], list[Finding]]:
    """The tensors of a folder's safetensors files (or of the one file `path`), and what is wrong with them."""
    if path.is_dir() and is_sharded_folder(path):
        return _check_sharded(path)
    findings: list[Finding] = []
    index: dict[str, str] = {}
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (folder / INDEX_NAME).exists():
        try:
            index = read_index(folder / INDEX_NAME)
        except DamagedError as error:
            findings.append(_finding(folder, "corrupt", str(error), file=INDEX_NAME))
    files, misplaced = _files(folder, index) if path.is_dir() else ([path.name], [])
    findings += misplaced
    tensors: dict[str, TensorEntry] = {}
    reader = range_reader(folder)
    unreadable: set[str] = set()
    for file in files:
        try:
            entries, _ = read_header(reader, file)
        except DamagedError as error:
            unreadable.add(file)
            findings.append(_finding(folder, error.kind, str(error), file=file))
            continue
        for name in sorted(set(entries) & set(tensors)):
            findings.append(_finding(folder, "overlapping", f"{name} is in more than one file", name, file))
        tensors.update(entries)
        for name in sorted(set(entries) - {n for n, listed in index.items() if listed == file}) if index else []:
            message = f"{name} is in {file}, and the index does not say so: nothing will load it from there"
            findings.append(_finding(folder, "unexpected", message, name, file))
    reader.close()
    findings += _absent(folder, index, tensors, unreadable | {finding.file for finding in misplaced})
    findings += _config_dtype(folder, tensors)
    return tensors, findings


def _check_sharded(path: Place) -> tuple[Mapping[str, TensorEntry], list[Finding]]:
    """The ranks' parts of tensors, which must make whole ones."""
    try:
        source = ShardedSafetensors(path)
    except DamagedError as error:
        return {}, [_finding(path, error.kind, str(error))]
    source.close()
    return source.manifest.tensors, list(_config_dtype(source.folder, source.manifest.tensors))


def _files(folder: Place, index: dict[str, str]) -> tuple[list[str], list[Finding]]:
    """The files that a loader would read, and findings for those that are not there or that it would not read."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    unindexed = [SINGLE_NAME] if SINGLE_NAME in present else present
    expected = sorted(set(index.values())) if index else unindexed
    missing = [file for file in expected if not safe_join(folder, file).is_file()]
    findings = [
        _finding(folder, "missing", f"the index names {file}, which is not there", "", file) for file in missing
    ]
    for file in sorted(set(present) - set(expected)):
        message = f"{file} is not in the index: nothing will load it" if index else f"{file} lies beside {SINGLE_NAME}"
        step = next_steps.look_at_file(folder / file)
        findings.append(Finding("unexpected", message, file=file, next_step=step))
    return [file for file in expected if file not in missing], findings


def _absent(
    folder: Place, index: dict[str, str], tensors: dict[str, TensorEntry], unread: set[str]
) -> Iterator[Finding]:
    """Names that the index promises and their files, which could be read, lack: loaders would start them random."""
    for name, file in sorted(index.items()):
        if name not in tensors and file not in unread:
            yield _finding(folder, "missing", f"the index names {name}, and {file} lacks it", name, file)


def _config_dtype(folder: Place, tensors: Mapping[str, TensorEntry]) -> Iterator[Finding]:
    said, held = config_dtype(folder / "config.json"), main_dtype(tensors.values())
    if said and held and said != held:
        message, step = f"config.json says {said}, and the tensors are {held}", next_steps.look_at_file(folder)
        yield Finding("mismatched", message, file="config.json", next_step=step)


def config_dtype(path: Place) -> str:
    """The dtype that a config.json names; "" when it names none or can't be read."""
    try:
        config: Any = read_json(path, max_bytes=16 << 20) if path.exists() else {}
    except DamagedError:
        return ""
    named = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return named.removeprefix("torch.") if isinstance(named, str) else ""


def _finding(folder: Place, kind: Any, message: str, tensor: str = "", file: str = "") -> Finding:
    return Finding(kind, message, tensor, file, next_step=next_steps.another_copy(folder, None))
