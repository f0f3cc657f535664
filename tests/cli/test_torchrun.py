from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptool


def test_torchrun_shares_a_command_out_and_rank_0_speaks(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({f"w{i}": torch.randn(70, 30) for i in range(6)}, tmp_path / "source" / "model.safetensors")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ckptool"]
    done = subprocess.run(
        [*command, "import-hf", "source", "m", "--root", "."],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("imported to") == 1
    assert ckptool.diff("m", str(tmp_path / "source"), root=tmp_path).equal


def test_a_command_that_a_training_rank_starts_is_on_its_own(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.randn(7, 3)}, tmp_path / "source" / "model.safetensors")
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", "import-hf", "source", "m", "--root", "."],
        cwd=tmp_path,
        env={**os.environ, **rank, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "imported to" in done.stdout
