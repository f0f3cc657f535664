"""Is what a checkpoint keeps beside its tensors, config and tokenizer in `hf/`, still what was written?"""

from __future__ import annotations

from collections.abc import Collection

from ckptool.errors import DamagedError
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests
from ckptool.storage.files import Place, os_errors, safe_join

_HF_FOLDER = "hf/"


def check_hf_files(path: Place, digests: Digests | None) -> None:
    """Hold the files in `hf/` to the checkpoint's digests: without them an export would lack its tokenizer, and with
    others it would be another model's, and nobody would notice.

    Raises DamagedError for one that is missing or was changed.
    """
    listed = digests.files if digests else {}
    check_none_missing(path, [name for name in listed if name.startswith(_HF_FOLDER)], "--config HF_FOLDER_OR_ID")
    for name, recorded in listed.items():
        if name.startswith(_HF_FOLDER) and digest_file(safe_join(path, name)) != recorded.blake3:
            raise DamagedError(
                f"{path / name} is not what {DIGESTS_FILE} lists: it changed",
                hint=f"if that is meant: --config {path / 'hf'}",
            )


def check_none_missing(path: Place, names: Collection[str], way_out: str = "put the file back") -> None:
    """Raises DamagedError for the first of these files that is not there; `way_out` is part of its hint."""
    with os_errors(path):
        missing = [name for name in sorted(names) if not safe_join(path, name).is_file()]
    if missing:
        others = f", and {len(missing) - 1} more that it lists" if len(missing) > 1 else ""
        raise DamagedError(
            f"{path / missing[0]} is missing, and {DIGESTS_FILE} lists it{others}",
            hint=f"fetch {path} again from where it is whole, or {way_out}",
            kind="missing",
        )
