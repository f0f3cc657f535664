"""From what the user typed to a local folder: a path as it is, a Hub id through huggingface_hub's cache."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptool.errors import AccessError, NotFoundError, StorageError, UsageError
from ckptool.formats.hf_folder import is_weight_file, read_index, weight_kind
from ckptool.storage.files import Place
from ckptool.storage.place import place

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Located:
    """A model folder or weight file, the name it suggests for a checkpoint, and where it came from."""

    path: Place
    default_name: str
    origin: dict[str, Any] = field(default_factory=dict)


def locate(src: str, revision: str | None, *, weights: bool = True) -> Located:
    """Find `src` on this machine, downloading it into the Hub cache when it is a repository id.

    Only what an import reads is downloaded: the weights of one kind, those of the index where there is one (none unless
    `weights`), and the files that hold no weights. Raises NotFoundError, AccessError or StorageError, one line each.
    """
    path = place(src)
    if path.exists():
        if revision:
            raise UsageError(f"--revision is for Hub repositories, and {path} is none")
        resolved = path.resolve()
        return Located(resolved, resolved.name if resolved.is_dir() else resolved.stem, _origin(resolved))
    if not _REPO_ID.fullmatch(src):
        raise NotFoundError(f"no such file or folder: {path}")
    return _download(src, revision, weights)


def locate_config(src: str, revision: str | None) -> Place:
    """The folder of a model's config.json: `src` itself, or of a checkpoint its `hf/`.

    Of a Hub repository that one file is downloaded. Raises as `locate` does, and NotFoundError without a config.json.
    """
    if place(src).exists() or not _REPO_ID.fullmatch(src):
        path = locate(src, revision).path
        folder = path.parent if path.name == "config.json" else path
    else:
        import huggingface_hub

        with _hub_errors(src, revision):
            folder = Path(huggingface_hub.snapshot_download(src, revision=revision, allow_patterns="config.json"))
    for candidate in (folder, folder / "hf"):
        if (candidate / "config.json").is_file():
            return candidate
    raise NotFoundError(f"{src} holds no config.json")


def _origin(path: Place) -> dict[str, Any]:
    return {"path": path.name} if isinstance(path, Path) else {"url": str(path)}


def _download(repo: str, revision: str | None, weights: bool) -> Located:
    import huggingface_hub
    from huggingface_hub import constants

    with _hub_errors(repo, revision):
        if constants.HF_HUB_OFFLINE:
            # One file is asked for, because the cache need not hold all of the repository: only what an import reads.
            kept = huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns="config.json", local_files_only=True
            )
            folder = Path(kept)
            return Located(folder, repo.rpartition("/")[2], {"repo": repo, "commit": folder.name})
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
        present = [sibling.rfilename for sibling in info.siblings or []]
        wanted = [name for name in present if not is_weight_file(name) and not name.startswith(".")]
        top = [name for name in present if "/" not in name]
        kind = weight_kind(top) if weights else None
        if kind is not None and kind.index in top:
            index = Path(huggingface_hub.hf_hub_download(repo, kind.index, revision=info.sha))
            wanted += [kind.index, *sorted(set(read_index(index).values()))]
        elif kind is not None:
            files = fnmatch.filter(top, kind.pattern)
            wanted += [kind.single] if kind.single in files else files
        # By the name of the revision, not by its commit: so the cache learns the name, and has it when offline.
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    return Located(folder, repo.rpartition("/")[2], {"repo": repo, "commit": folder.name})


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """huggingface_hub's many errors as ours. The library's messages carry URLs and request ids; these don't."""
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise AccessError(
            f"{repo} is gated: its owner grants access on request",
            hint=f"ask for access at https://huggingface.co/{repo}, then `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotFoundError(f"{repo} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise NotFoundError(
            f"{repo} is neither a local path nor a Hub repository that you can see",
            hint="check the spelling; for a private repository `hf auth login` first",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise NotFoundError(
            f"{repo}{at} is not in the local Hub cache, and the Hub can't be reached",
            hint="go online once (unset HF_HUB_OFFLINE), or give a local folder",
        ) from error
    except errors.HFValidationError as error:
        raise NotFoundError(f"{repo} is neither a local path nor a valid Hub repository id") from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise StorageError(f"the Hub answered {status or 'with an error'} for {repo}{at}", hint="try again") from error
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(repo) from error
    except Exception as error:
        # The HTTP library under huggingface_hub differs between versions; its connection errors share these names.
        if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "ProxyError"):
            raise _unreachable(repo) from error
        raise


def _unreachable(repo: str) -> StorageError:
    return StorageError(f"can't reach the Hub to fetch {repo}", hint="check the network, or give a local folder")
