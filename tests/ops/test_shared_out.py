"""Conversions shared out over the ranks of a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.formats import dcp_sink
from ckptool.ops.reshard import reshard
from ckptool.ranks import Ranks
from tests.spawn import run_ranks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    save_file({f"w{i}": torch.randn(700, 30) for i in range(6)}, tmp_path / "source" / "model.safetensors")
    return tmp_path


def convert_in_turn(rank: int, root: Path) -> list[list[str]]:
    dcp_sink._MIN_FILE_BYTES = 1  # type: ignore[misc]
    ranks = Ranks()
    results = (
        ckptool.import_hf(str(root / "source"), "m", root=root, ranks=ranks),
        ckptool.export("m", root=root, out=root / "back", max_shard_bytes=200_000, ranks=ranks),
        reshard("m", "cut", root=root, mesh=Mesh.of({"dp": 3}), rewrite=True, ranks=ranks),
    )
    return [[part.files[0] for part in result.plan.parts] for result in results if result.plan]


def test_import_export_and_reshard_give_what_one_process_gives(root: Path) -> None:
    one, other = run_ranks(2, convert_in_turn, root)
    assert one == other
    assert {file.partition("_")[0] + file[2:3] for file in one[0]} == {"0", "1"}
    for name in ("m", "cut"):
        assert ckptool.diff(name, str(root / "source"), root=root).equal
        assert ckptool.verify(name, level="content", root=root).findings == ()
    assert len(list((root / "back").glob("*.safetensors"))) == 3
    assert ckptool.diff(str(root / "back"), str(root / "source"), root=root).equal


def fail_on_one(rank: int, root: Path) -> str:
    dcp_sink._MIN_FILE_BYTES = 1  # type: ignore[misc]
    if rank == 1:

        def refuse(self: object) -> None:
            raise OSError(28, "No space left on device")

        dcp_sink.DcpFile.close = refuse  # type: ignore[assignment, method-assign]
    try:
        ckptool.import_hf(str(root / "source"), "m", root=root, ranks=Ranks())
    except ckptool.CkptoolError as error:
        return f"{error} ({error.hint})"
    return "done"


def test_one_ranks_error_is_everybodys_and_what_was_done_is_kept(root: Path) -> None:
    messages = run_ranks(2, fail_on_one, root)
    assert all("rank 1: no space left" in message for message in messages), messages
    assert not (root / "m").exists()
    result = run_ranks(2, convert_in_turn, root)
    assert result[0] == result[1]
    assert ckptool.diff("m", str(root / "source"), root=root).equal
