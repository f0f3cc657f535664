"""An archive whose directory lies beyond all bytes is damaged, not a crash."""

from __future__ import annotations

import io

import pytest
import torch

from ckptool.errors import DamagedError
from ckptool.formats.dcp_source import load_blob

#: Of the "zip64 end of central directory record" (APPNOTE.TXT of PKWARE, 4.3.14), where the directory begins.
_RECORD, _OFFSET_OF_DIRECTORY = b"PK\x06\x06", 48


def test_a_directory_beyond_2_to_the_63_is_damage() -> None:
    file = io.BytesIO()
    torch.save({"a": 1}, file)
    blob = bytearray(file.getvalue())
    blob[blob.rindex(_RECORD) + _OFFSET_OF_DIRECTORY + 7] = 0x81
    with pytest.raises(DamagedError):
        load_blob(bytes(blob), "x")
