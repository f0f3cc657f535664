"""An interrupted attempt is gone on from: the same result, nothing done twice, nothing believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import StorageError
from ckptool.formats import dcp_sink
from ckptool.storage.digest import digest_file
from ckptool.storage.direct_file import DirectFile

NUM_TENSORS = 10


@pytest.fixture(autouse=True)
def one_file_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_sink, "_MIN_FILE_BYTES", 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_source(tmp_path / "source", 0.0)
    return tmp_path / "source"


def write_source(folder: Path, value: float) -> None:
    save_file({f"w{i}": torch.full((7, 3), value + i) for i in range(NUM_TENSORS)}, folder / "model.safetensors")


class Disk:
    """Counts the files that are written, and refuses after `limit` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit = 1000
        self.num_files = 0
        close = DirectFile.close

        def counted_close(file: DirectFile) -> None:
            if self.num_files >= self.limit:
                raise OSError(28, "No space left on device")
            self.num_files += 1
            close(file)

        monkeypatch.setattr(DirectFile, "close", counted_close)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def interrupt(source: Path, disk: Disk, after: int = 4) -> None:
    disk.limit = disk.num_files + after
    with pytest.raises(StorageError, match="no space left") as caught:
        ckptool.import_hf(str(source), "m", root=source.parent, num_workers=1)
    assert "goes on from where this one stopped" in caught.value.hint
    assert not (source.parent / "m").exists()
    disk.limit, disk.num_files = 1000, 0


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in folder.rglob("*.distcp") if path.stat().st_size}


def staged(root: Path) -> Path:
    (content,) = root.glob(".m.staging/content-*/m")
    return content


def test_what_was_done_is_not_done_again(source: Path, disk: Disk) -> None:
    ckptool.import_hf(str(source), "whole", root=source.parent)
    interrupt(source, disk)
    done = files_of(staged(source.parent))
    result = ckptool.import_hf(str(source), "m", root=source.parent)
    assert disk.num_files == NUM_TENSORS - 4
    assert "went on from an interrupted attempt: 4 of 10 parts were done" in result.notes
    assert files_of(source.parent / "m").items() >= done.items()
    assert ckptool.diff("m", "whole", root=source.parent).equal
    assert ckptool.verify("m", level="content", root=source.parent).findings == ()
    assert [path.name for path in source.parent.iterdir() if path.name.startswith(".")] == []


def test_a_second_interruption_keeps_what_both_have_done(source: Path, disk: Disk) -> None:
    interrupt(source, disk, after=3)
    interrupt(source, disk, after=2)
    ckptool.import_hf(str(source), "m", root=source.parent)
    assert disk.num_files == NUM_TENSORS - 5


def test_it_starts_over_when_asked_to(source: Path, disk: Disk) -> None:
    interrupt(source, disk)
    ckptool.import_hf(str(source), "m", root=source.parent, resume=False)
    assert disk.num_files == NUM_TENSORS


def test_another_source_or_option_starts_over_and_says_so(source: Path, disk: Disk) -> None:
    for change in ("source", "option"):
        interrupt(source, disk)
        if change == "source":
            write_source(source, 100.0)
        dtype = "bf16" if change == "option" else "keep"
        result = ckptool.import_hf(str(source), "m", root=source.parent, dtype=dtype, overwrite=True)
        assert disk.num_files == NUM_TENSORS
        assert any(note.startswith("started over") for note in result.notes)
        os.rename(source.parent / "m", source.parent / f"another-{change}")
    assert ckptool.diff("another-source", str(source), root=source.parent).equal


@pytest.mark.parametrize("damage", ["bit", "end", "gone"])
def test_a_part_that_has_changed_since_is_done_again(source: Path, disk: Disk, damage: str) -> None:
    interrupt(source, disk)
    file = sorted(staged(source.parent).glob("*.distcp"))[1]
    raw = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        raw[100] ^= 1
        file.write_bytes(raw if damage == "bit" else raw[:-1])
    ckptool.import_hf(str(source), "m", root=source.parent)
    assert disk.num_files == NUM_TENSORS - 3
    assert ckptool.verify("m", level="content", root=source.parent).findings == ()


def test_a_journal_of_nonsense_is_not_believed(source: Path, disk: Disk) -> None:
    interrupt(source, disk)
    (journal,) = source.parent.glob(".m.staging/content-*/journal-0.jsonl")
    first, *rest = journal.read_text().splitlines()
    journal.write_text("\n".join([first, "[]", '{"file": "../../x"}', *rest[:1], "{", *rest[1:]]) + "\n")
    ckptool.import_hf(str(source), "m", root=source.parent)
    assert disk.num_files == NUM_TENSORS - 1
    assert ckptool.verify("m", level="content", root=source.parent).findings == ()


def test_damage_in_the_source_keeps_nothing(source: Path) -> None:
    ckptool.import_hf(str(source), "base", root=source.parent)
    file = sorted((source.parent / "base").glob("*.distcp"))[-1]
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"data/0") + 128] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ckptool.DamagedError):
        ckptool.export("base", root=source.parent, max_shard_bytes=1)
    assert [path.name for path in source.parent.iterdir() if path.name.startswith(".")] == []
