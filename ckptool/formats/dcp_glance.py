"""Is a checkpoint of ours still as it was written, told without unpickling its `.metadata`: for listings of many.

The seal says that `.metadata` is unchanged, the `save_id` in it that `digests.json` is, and that file how long all
others are. Whatever is in doubt is left to `read_manifest`, which says what is wrong.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_metadata import METADATA_FILE
from ckptool.storage.digests_file import DIGESTS_FILE, read_digests, save_id_for
from ckptool.storage.files import MAX_JSON_BYTES, read_bytes, safe_join
from ckptool.storage.pickle_scan import MAX_PICKLE_BYTES
from ckptool.storage.seal import unseal


def glance(folder: Path) -> int | None:
    """Bytes of the tensors of a checkpoint that is unchanged by seal and sizes; None when a closer look is needed."""
    with contextlib.suppress(CkptoolError, OSError, KeyError):
        metadata, sealed = unseal(read_bytes(folder / METADATA_FILE, MAX_PICKLE_BYTES), str(folder))
        save_id = save_id_for(read_bytes(folder / DIGESTS_FILE, MAX_JSON_BYTES))
        if not sealed or save_id.encode() not in metadata:
            return None
        digests = read_digests(folder, save_id)
        if digests is None or not _all_there(folder, {name: file.num_bytes for name, file in digests.files.items()}):
            return None
        return sum(math.prod(record.shape) * ITEMSIZE_BYTES[record.dtype] for record in digests.tensors.values())
    return None


def _all_there(folder: Path, sizes: dict[str, int]) -> bool:
    return all(os.stat(safe_join(folder, name)).st_size == num_bytes for name, num_bytes in sizes.items())
