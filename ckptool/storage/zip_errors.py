"""What Python's zipfile raises for archives that are damaged, or made to break it."""

from __future__ import annotations

import struct
import zipfile
import zlib

#: NotImplementedError, for what it doesn't know, is a RuntimeError; OverflowError is of offsets beyond 2**63.
ZIP_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    zlib.error,
    ValueError,
    EOFError,
    RuntimeError,
    OverflowError,
    LookupError,
)
