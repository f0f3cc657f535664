"""A run root with an import of a tiny model, and a foreign checkpoint that torch alone wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool.cli.main import run
from tests.tiny_models import llama, save_folder


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(llama(), tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture(scope="session")
def root(hub_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `tiny` (imported), `step-5` (complete, foreign) and `step-7` (never finished)."""
    root = tmp_path_factory.mktemp("root")
    assert run(["import-hf", str(hub_folder), "--root", str(root), "--quiet"]) == 0
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(3)}, "step": 5}
    dcp.save(state, checkpoint_id=root / "step-5", no_dist=True)
    (root / "step-7").mkdir()
    (root / "step-7" / "__0_0.distcp").write_bytes(b"half")
    return root
