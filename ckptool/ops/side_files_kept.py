"""Is what a checkpoint keeps beside its tensors, config and tokenizer in `hf/`, still what was written?"""

from __future__ import annotations

from collections.abc import Collection

from ckptool.errors import DamagedError
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests
from ckptool.storage.files import Place, os_errors, safe_join

_HF_FOLDER = "hf/"


def check_hf_files(path: Place, digests: Digests | None, way_out: str) -> None:
    """Hold the files in `hf/` to the checkpoint's digests: without them an export would lack its tokenizer, and with
    others it would be another model's, and nobody would notice. `way_out` is the hint where a change is meant.

    Raises DamagedError for one that is missing or was changed.
    """
    listed = digests.files if digests else {}
    check_none_missing(path, [name for name in listed if name.startswith(_HF_FOLDER)])
    for name, recorded in listed.items():
        if name.startswith(_HF_FOLDER) and digest_file(safe_join(path, name)) != recorded.blake3:
            raise DamagedError(f"{path / name} is not what {DIGESTS_FILE} lists: it changed", hint=way_out)


def check_none_missing(path: Place, names: Collection[str]) -> None:
    """Raises DamagedError for the first of these files that is not there."""
    with os_errors(path):
        missing = [name for name in sorted(names) if not safe_join(path, name).is_file()]
    if missing:
        others = f", and {len(missing) - 1} more that it lists" if len(missing) > 1 else ""
        raise DamagedError(
            f"{path / missing[0]} is missing, and {DIGESTS_FILE} lists it{others}",
            hint=f"fetch {path} again from where it is whole, or put the file back",
            kind="missing",
        )
