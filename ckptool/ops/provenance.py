"""Making and writing `ckptool.json`."""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path
from typing import Any

import ckptool
from ckptool.core.provenance import Provenance
from ckptool.formats.dcp_metadata import PROVENANCE_FILE
from ckptool.storage.files import write_json

_LIBRARIES = ("torch", "transformers", "safetensors")


def new_provenance(**fields: Any) -> Provenance:
    """A record with the tool's and the libraries' versions and the time filled in."""
    return Provenance(
        tool_version=ckptool.__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries={name: importlib.metadata.version(name) for name in _LIBRARIES},
        **fields,
    )


def write_provenance(folder: Path, provenance: Provenance) -> None:
    write_json(folder / PROVENANCE_FILE, provenance.to_json())
