"""From what the user typed to where it is: a path as it is, a Hub repository read there or from the Hub's cache."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckptool.errors import NotFoundError, StorageError, UsageError, name_some
from ckptool.formats.gguf_file import find_gguf
from ckptool.formats.hf_folder import WeightKind, is_weight_file, read_index, weight_kind
from ckptool.formats.meta_folder import find_meta, is_meta_file
from ckptool.storage.files import Place
from ckptool.storage.hub_calls import asked, is_offline
from ckptool.storage.hub_store import HubStore, parse_hub_url
from ckptool.storage.place import place
from ckptool.storage.store import is_url
from ckptool.storage.store_path import StorePath

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Located:
    """A model folder or weight file, the name it suggests for a checkpoint, and where it came from."""

    path: Place
    default_name: str
    origin: dict[str, Any] = field(default_factory=dict)


def locate(
    src: str, revision: str | None, *, weights: bool = True, local_cache: bool = False, show_progress: bool = False
) -> Located:
    """Find `src`: a path, a URL, or a repository id of the Hub.

    A repository's revision is settled to a commit here. Its weights are read from the Hub while they are needed, unless
    they are in the Hub's cache on this machine, or are to go there first (`local_cache`); without `weights` only the
    other files are wanted, and they go through the cache. Then, and when offline, the path is the folder in the cache.
    Only what an import reads is downloaded: the weights of one kind, those of the index where there is one, and the
    files that hold no weights. `show_progress` lets a download of weights draw its bars on a terminal. Raises
    NotFoundError, AccessError or StorageError, one line each.
    """
    repository = _repository(src, revision)
    if repository is None:
        path = place(src)
        if not path.exists():
            raise NotFoundError(f"no such file or folder: {path}")
        if revision:
            raise UsageError(f"--revision is for Hub repositories, and {path} is none")
        resolved = path.resolve()
        return Located(resolved, resolved.name if resolved.is_dir() else resolved.stem, _origin(resolved))
    repo, revision = repository
    if is_offline():
        # One file is asked for, because the cache need not hold all of the repository: only what an import reads.
        return _in_cache(repo, _snapshot(repo, revision, "config.json"))
    with _named_as_no_path(src):
        return _from_hub(repo, revision, weights, local_cache, show_progress)


def locate_config(src: str, revision: str | None) -> Place:
    """The folder of a model's config.json: `src` itself, or of a checkpoint its `hf/`.

    Of a Hub repository that one file is downloaded. Raises as `locate` does, and NotFoundError without a config.json.
    """
    repository = _repository(src, revision)
    if repository is None:
        path = locate(src, revision).path
        folder = path.parent if path.name == "config.json" else path
    else:
        with _named_as_no_path(src):
            folder = _snapshot(*repository, "config.json")
    for candidate in (folder, folder / "hf"):
        if (candidate / "config.json").is_file():
            return candidate
    raise NotFoundError(f"{src} holds no config.json")


def _repository(src: str, revision: str | None) -> tuple[str, str | None] | None:
    """The id and the revision, if any was named, of the model's repository that `src` is; None when it is none."""
    url = parse_hub_url(src)
    if url is not None and url.kind == "model" and not url.inside:
        if revision and url.revision:
            raise UsageError(f"{src} names a revision, and so does --revision")
        return url.repo, url.revision or revision
    if url is not None or is_url(src) or place(src).exists() or not _REPO_ID.fullmatch(src):
        return None
    return src, revision


@contextmanager
def _named_as_no_path(src: str) -> Iterator[None]:
    """A Hub that can't be asked doesn't know either whether `src` is a mistyped path: the hint says so."""
    try:
        yield
    except StorageError as error:
        if not is_url(src):
            error.hint = f"there is no file or folder {src} here, so it was taken for a Hub id; " + error.hint
        raise


def _origin(path: Place) -> dict[str, Any]:
    if isinstance(path, Path):
        return {"path": path.name}
    if isinstance(path.store, HubStore):
        inside = "/".join(part for part in (path.store.hub.inside, path.key) if part)
        return {"repo": path.store.hub.repo, "commit": path.store.commit, "path": inside}
    return {"url": str(path)}


def _from_hub(repo: str, revision: str | None, weights: bool, local_cache: bool, show_progress: bool) -> Located:
    from huggingface_hub import HfApi

    info = asked(repo, revision, lambda: HfApi().model_info(repo, revision=revision))
    commit, present = str(info.sha), [sibling.rfilename for sibling in info.siblings or []]
    wanted = [name for name in present if not is_weight_file(name) and not name.startswith(".")]
    top = [name for name in present if "/" not in name]
    kind = weight_kind(top) if weights else None
    if weights and not local_cache and not (kind and _are_cached(repo, commit, kind, top)):
        url = f"hf://{info.id}" + (f"@{quote(revision, safe='')}" if revision else "")
        origin = {"repo": info.id, "commit": commit}
        return Located(StorePath(HubStore(url, commit)), info.id.rpartition("/")[2], origin)
    if kind is not None:
        wanted += _weight_files(repo, commit, kind, top)
    elif weights:
        wanted += _other_weights(repo, present)
    # By the name of the revision, not by its commit: so the cache learns the name, and has it when offline.
    folder = _snapshot(repo, revision, wanted, show_progress)
    # When it can't reach the Hub half-way, huggingface_hub is content with a folder that an earlier call has begun.
    if absent := [name for name in wanted if not (folder / name).is_file()]:
        raise StorageError(f"only a part of {repo} could be downloaded: {name_some(absent)} lack", hint="try again")
    return _in_cache(repo, folder)


def _in_cache(repo: str, folder: Path) -> Located:
    return Located(folder, repo.rpartition("/")[2], {"repo": repo, "commit": folder.name})


def _snapshot(repo: str, revision: str | None, wanted: str | Sequence[str], show_progress: bool = False) -> Path:
    """The folder in the Hub's cache, with these files of the repository in it."""
    from huggingface_hub import snapshot_download

    patterns = wanted if isinstance(wanted, str) else list(wanted)

    def download() -> str:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=is_offline())

    return Path(asked(repo, revision, download, show_progress))


def _are_cached(repo: str, commit: str, kind: WeightKind, top: Sequence[str]) -> bool:
    """True when the cache has all weights of this very commit."""
    from huggingface_hub import try_to_load_from_cache

    def has(file: str) -> bool:
        return isinstance(try_to_load_from_cache(repo, file, revision=commit), str)

    if kind.index in top and not has(kind.index):
        return False
    return all(has(file) for file in _weight_files(repo, commit, kind, top))


def _weight_files(repo: str, commit: str, kind: WeightKind, top: Sequence[str]) -> list[str]:
    """The files of weights to read, and their index, which goes through the cache."""
    if kind.index in top:
        from huggingface_hub import hf_hub_download

        index = asked(repo, commit, lambda: hf_hub_download(repo, kind.index, revision=commit))
        return [kind.index, *sorted(set(read_index(Path(index)).values()))]
    return [kind.single] if kind.single in top else fnmatch.filter(top, kind.pattern)


def _other_weights(repo: str, present: Sequence[str]) -> list[str]:
    """The files of weights of a repository that has none of the Hub's kinds: those in Meta's form, or a GGUF file.

    Raises UsageError for several GGUF files.
    """
    meta = find_meta(present)
    if meta is not None:
        return [name for name in present if is_meta_file(name) and os.path.dirname(name) == meta]
    gguf = find_gguf([name for name in present if "/" not in name], f"hf://{repo}")
    return [gguf] if gguf else []
