"""Whatever is done to a checkpoint is found, and named by kind, tensor, file and offset."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.findings import Finding
from ckptool.core.tensors import Locator
from ckptool.errors import NotFoundError, UnsafeError, UsageError
from ckptool.formats.dcp_entry import read_entry
from ckptool.formats.dcp_torch import write_metadata
from ckptool.storage.files import RangeReader
from tests.ops.conftest import Copy, trained_tensors
from tests.tiny_models import llama, save_folder

EVERY_KIND = ["tiny", "moe", "sharded", "foreign"]


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def payload(folder: Path, fqn: str, chunk: int = 0) -> tuple[str, int, int]:
    """File, offset and length of a chunk's payload."""
    locator = ckptool.open_checkpoint(folder).tensors[fqn].chunks[chunk].locator
    assert isinstance(locator, Locator)
    reader = RangeReader(folder)
    stored = read_entry(reader, locator)
    reader.close()
    return locator.file, stored.payload_offset, stored.payload_bytes


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    write_metadata(folder, metadata)


def only(findings: tuple[Finding, ...]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("level", ["structure", "bytes", "content"])
@pytest.mark.parametrize("name", [*EVERY_KIND, "tiny-hf", "moe-hf"])
def test_what_nobody_touched_is_good(kinds: Path, name: str, level: str) -> None:
    result = ckptool.verify(name, root=kinds, level=level, finite=True)
    assert (result.findings, result.exit_code) == ((), 0)
    assert result.to_json()["good"] is True
    assert result.details["num_tensors"] > 0


def test_every_byte_of_a_checkpoint_of_ours_is_read(kinds: Path) -> None:
    result = ckptool.verify("sharded", root=kinds)
    sizes = [p.stat().st_size for p in (kinds / "sharded").rglob("*") if p.is_file()]
    unlisted = sum((kinds / "sharded" / name).stat().st_size for name in (".metadata", "digests.json"))
    assert result.details["num_bytes"] == sum(sizes) - unlisted


@pytest.mark.parametrize(
    ("name", "fqn", "chunk"),
    [
        ("tiny", "model.model.layers.1.mlp.up_proj.weight", 1),
        ("sharded", "model.columns", 1),
        ("sharded", "optim.state.embed.exp_avg", 0),
        ("foreign", "model.layers.0.up", 0),
    ],
)
def test_a_flipped_bit_is_found_in_its_chunk(copy_of: Copy, name: str, fqn: str, chunk: int) -> None:
    folder = copy_of(name)
    file, offset, num_bytes = payload(folder, fqn, chunk)
    flip(folder / file, offset + num_bytes - 1, 0x80)
    result = ckptool.verify(str(folder))
    found = only(result.findings)
    assert (found.kind, found.tensor, found.file, found.offset_bytes) == ("corrupt", fqn, file, offset)
    assert found.next_step.startswith("ckptool ")
    assert result.exit_code == 4
    assert ckptool.verify(str(folder), level="structure").findings == ()


@pytest.mark.parametrize("name", ["tiny", "sharded"])
def test_no_byte_of_a_checkpoint_of_ours_can_change_unseen(copy_of: Copy, name: str) -> None:
    folder = copy_of(name)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".metadata"):
        size = path.stat().st_size
        for offset in {0, size // 3, size // 2, size - 1}:
            flip(path, offset)
            result = ckptool.verify(str(folder))
            assert result.exit_code == 4, (path, offset)
            assert {finding.file for finding in result.findings} == {path.relative_to(folder).as_posix()}
            flip(path, offset)
    assert ckptool.verify(str(folder)).findings == ()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_truncated_file_is_found_without_reading_it(copy_of: Copy, name: str) -> None:
    folder = copy_of(name)
    path = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    end = path.stat().st_size - 5
    with path.open("r+b") as file:
        file.truncate(end)
    for level in ("structure", "bytes", "content"):
        result = ckptool.verify(str(folder), level=level)
        found = only(result.findings)
        assert (found.kind, found.file, result.exit_code) == ("truncated", path.name, 4)
        assert found.tensor != ""
        assert str(end) in found.message
        assert not found.next_step.startswith("ckptool verify")  # which would say the same once more


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_deleted_data_file_is_missing(copy_of: Copy, name: str) -> None:
    folder = copy_of(name)
    path = min(folder.glob("*.distcp"))
    path.unlink()
    result = ckptool.verify(str(folder))
    assert (only(result.findings).kind, only(result.findings).file, result.exit_code) == ("missing", path.name, 4)


def test_deleted_side_files_are_missing(copy_of: Copy) -> None:
    folder = copy_of("tiny")
    for name in ("ckptool.json", "hf/config.json"):
        (folder / name).unlink()
    found = {(finding.kind, finding.file) for finding in ckptool.verify(str(folder), level="structure").findings}
    assert found == {("missing", "ckptool.json"), ("missing", "hf/config.json")}


def test_swapped_files_are_told(copy_of: Copy) -> None:
    folder = copy_of("sharded")
    one, other = sorted(folder.glob("*.distcp"))
    hidden = folder.parent / "aside"
    one.rename(hidden)
    other.rename(one)
    hidden.rename(other)
    result = ckptool.verify(str(folder))
    assert result.exit_code == 4
    assert {finding.file for finding in result.findings} == {one.name, other.name}


def test_the_file_of_another_save_is_found_by_its_digest(copy_of: Copy, tmp_path: Path) -> None:
    """Its chunks are whole in themselves: only a digest can tell."""
    folder = copy_of("tiny")
    other = llama()
    with torch.no_grad():
        other.model.norm.weight += 1
    ckptool.import_hf(str(save_folder(other, tmp_path / "o-hf")), "other", root=tmp_path, chunk_bytes=4096)
    (tmp_path / "other" / "__0_0.distcp").rename(folder / "__0_0.distcp")
    found = only(ckptool.verify(str(folder)).findings)
    assert (found.kind, found.file) == ("corrupt", "__0_0.distcp")
    assert "each chunk in it is whole" in found.message


def test_unexpected_files_are_named(copy_of: Copy) -> None:
    folder = copy_of("sharded")
    (folder / "__9_0.distcp").write_bytes(b"left by someone")
    (folder / "hf" / "more.json").write_text("{}")
    result = ckptool.verify(str(folder), level="structure")
    assert {(f.kind, f.file) for f in result.findings} == {
        ("unexpected", "__9_0.distcp"),
        ("unexpected", "hf/more.json"),
    }
    foreign = copy_of("foreign")
    (foreign / "notes.txt").write_text("people keep things beside foreign checkpoints")
    assert ckptool.verify(str(foreign)).findings == ()


def test_changed_digests_are_found_by_the_commit_marker(copy_of: Copy) -> None:
    folder = copy_of("tiny")
    path = folder / "digests.json"
    path.write_text(path.read_text().replace('"dtype": "bfloat16"', '"dtype": "float16"', 1))
    found = only(ckptool.verify(str(folder), level="structure").findings)
    assert (found.kind, found.file) == ("corrupt", "digests.json")
    path.unlink()
    assert only(ckptool.verify(str(folder)).findings).kind == "missing"


def swap_places(metadata: Any) -> None:
    """Let two chunks of one shape point to each other's bytes."""
    places = metadata.storage_data
    one, other = (key for key in places if key.fqn in ("model.layers.0.up", "model.layers.1.up") and key.offset[0] == 0)
    places[one], places[other] = places[other], places[one]


def shrink(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.columns"]
    entry.chunks.pop()
    index = next(key for key in metadata.storage_data if key.fqn == "model.columns" and key.offset[1] > 0)
    del metadata.storage_data[index]


def double(metadata: Any) -> None:
    """Two chunks of one tensor over the same elements."""
    entry = metadata.state_dict_metadata["model.columns"]
    moved = next(key for key in metadata.storage_data if key.fqn == "model.columns" and key.offset[1] > 0)
    info = metadata.storage_data.pop(moved)
    entry.chunks[1].offsets = torch.Size([0, 1])
    metadata.storage_data[type(moved)("model.columns", torch.Size([0, 1]), 1)] = info


def share(metadata: Any) -> None:
    """Two tensors' byte ranges that reach into each other."""
    places = metadata.storage_data
    one, other = (key for key in places if key.fqn in ("model.layers.0.up", "model.layers.1.up") and key.offset[0] == 0)
    places[other].relative_path = places[one].relative_path
    places[other].offset = places[one].offset + 8


@pytest.mark.parametrize(
    ("change", "level", "kind", "says"),
    [
        (swap_places, "content", "corrupt", "layers.0.up"),
        (shrink, "structure", "missing", "model.columns"),
        (double, "structure", "overlapping", "model.columns"),
        (share, "structure", "overlapping", "model.layers"),
        (lambda m: setattr(m.storage_meta, "save_id", "else"), "structure", "corrupt", "digests.json"),
        (lambda m: m.state_dict_metadata.pop("step"), "structure", "corrupt", "step"),
    ],
)
def test_edited_metadata_is_found(
    copy_of: Copy, change: Callable[[Any], None], level: str, kind: str, says: str
) -> None:
    folder = copy_of("sharded")
    edit_metadata(folder, change)
    result = ckptool.verify(str(folder), level=level)
    assert result.exit_code == 4
    assert kind in {finding.kind for finding in result.findings}
    assert any(says in finding.message for finding in result.findings)


def test_metadata_that_cannot_be_read_is_a_finding(copy_of: Copy) -> None:
    folder = copy_of("foreign")
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw[: len(raw) // 2])
    found = only(ckptool.verify(str(folder)).findings)
    assert (found.kind, found.file) == ("corrupt", ".metadata")
    (folder / ".metadata").unlink()
    assert only(ckptool.verify(str(folder)).findings).kind == "missing"


def test_unsafe_content_is_not_a_finding_but_refused(copy_of: Copy) -> None:
    folder = copy_of("foreign")

    def leave(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../outside"

    edit_metadata(folder, leave)
    with pytest.raises(UnsafeError):
        ckptool.verify(str(folder))


def test_parts_make_a_whole(copy_of: Copy) -> None:
    folder = copy_of("sharded")
    file, offset, _ = payload(folder, "model.layers.1.up", 0)
    flip(folder / file, offset)
    flip(folder / "hf" / "config.json", 3)
    results = [ckptool.verify(str(folder), subset=f"{k}/3") for k in (1, 2, 3)]
    found = [finding for result in results for finding in result.findings]
    assert sorted(finding.file for finding in found) == sorted([file, "hf/config.json"])
    again = ckptool.verify(str(folder), subset="2/3")
    assert again.findings == results[1].findings
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(UsageError):
            ckptool.verify(str(folder), subset=wrong)
    with pytest.raises(UsageError):
        ckptool.verify(str(folder), subset="1/2", level="content")


def test_not_finite_numbers_are_counted(tmp_path: Path) -> None:
    bad = torch.ones(4, 3, dtype=torch.bfloat16)
    bad[1, 1], bad[2, 2], bad[3, 0] = float("nan"), float("inf"), -float("inf")
    state = {"model": {"bad": bad, "good": torch.ones(5), "count": torch.arange(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    result = ckptool.verify(str(tmp_path / "x"), finite=True)
    found = only(result.findings)
    assert (found.kind, found.tensor, result.exit_code) == ("not-finite", "model.bad", 3)
    assert "1 NaN and 2 infinite" in found.message


@pytest.mark.parametrize("pair", [("moe", "moe-hf"), ("moe-hf", "moe"), ("tiny", "tiny-hf"), ("tiny", "tiny")])
def test_a_checkpoint_equals_its_source_in_any_format(kinds: Path, pair: tuple[str, str]) -> None:
    result = ckptool.verify(pair[0], against=pair[1], root=kinds)
    assert (result.findings, result.exit_code) == ((), 0)
    assert any("bit for bit" in note for note in result.notes)


def test_sharding_does_not_matter_and_other_names_are_told(kinds: Path) -> None:
    result = ckptool.verify("sharded", against="foreign", root=kinds, level="structure")
    assert result.exit_code == 3
    assert {finding.tensor.split(".")[0] for finding in result.findings} == {"optim", "data", "note"}
    assert "5 tensors are bit for bit" in result.notes[-1]


def test_the_first_element_that_differs_is_named(tmp_path: Path, kinds: Path) -> None:
    tensors = trained_tensors()
    tensors["columns"][4, 3] += 1
    tensors["scale"] = tensors["scale"].double()
    dcp.save({"model": tensors, "step": 7, "note": {"lr": [0.1]}}, checkpoint_id=tmp_path / "x", no_dist=True)
    result = ckptool.verify(str(tmp_path / "x"), against=str(kinds / "foreign"))
    messages = {finding.tensor: finding.message for finding in result.findings}
    assert "first at [4, 3]" in messages["model.columns"]
    assert "float64 []" in messages["model.scale"]
    assert messages["note.lr"].startswith("object")
    assert len(messages) == 3
    assert {finding.kind for finding in result.findings} == {"mismatched"}


def test_index_headers_and_files_of_a_hugging_face_folder_agree(copy_of: Copy) -> None:
    folder = copy_of("moe-hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    one, other, third = sorted(set(index["weight_map"].values()))[:3]
    dropped = load_file(folder / one)
    name = sorted(dropped)[0]
    del dropped[name]
    save_file(dropped, folder / one, {"format": "pt"})
    (folder / other).unlink()
    with (folder / third).open("r+b") as file:
        file.truncate(300)
    save_file({"extra": torch.ones(2)}, folder / "stray.safetensors")
    result = ckptool.verify(str(folder))
    found = {(finding.kind, finding.file, finding.tensor) for finding in result.findings}
    assert found == {
        ("missing", one, name),
        ("missing", other, ""),
        ("truncated", third, ""),
        ("unexpected", "stray.safetensors", ""),
    }
    assert result.exit_code == 4


def test_a_config_that_names_another_dtype_is_a_mismatch(copy_of: Copy) -> None:
    folder = copy_of("moe-hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    result = ckptool.verify(str(folder))
    assert (only(result.findings).kind, only(result.findings).file) == ("mismatched", "config.json")
    assert result.exit_code == 3


def test_a_trained_checkpoint_beside_a_narrower_config_is_a_note(tmp_path: Path, kinds: Path) -> None:
    ckptool.import_hf(str(kinds / "tiny-hf"), "wide", root=tmp_path, dtype="fp32")
    result = ckptool.verify("wide", root=tmp_path)
    assert result.findings == ()
    assert any("bfloat16" in note and "float32" in note for note in result.notes)


def test_chunks_without_checksums_are_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.arange(30.0)}, checkpoint_id=tmp_path / "x", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert any("without a checksum" in note for note in ckptool.verify(str(tmp_path / "x")).notes)


def test_unknown_names_and_levels_are_refused(kinds: Path) -> None:
    with pytest.raises(NotFoundError):
        ckptool.verify("nothing", root=kinds)
    with pytest.raises(NotFoundError):
        ckptool.verify("tiny", against="nothing", root=kinds)
    with pytest.raises(UsageError):
        ckptool.verify("tiny", root=kinds, level="deep")


def test_progress_counts_what_is_read(kinds: Path) -> None:
    seen: list[int] = []
    result = ckptool.verify("foreign", root=kinds, progress=lambda total: seen.append)
    assert sum(seen) == result.details["num_bytes"] > 0


def test_another_dtype_is_said_once(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.ones(3) for i in range(9)}
    dcp.save({"model": {**tensors, "ids": torch.arange(3)}}, checkpoint_id=tmp_path / "one", no_dist=True)
    cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    dcp.save({"model": {**cast, "ids": torch.arange(1, 4)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    result = ckptool.verify(str(tmp_path / "one"), against=str(tmp_path / "other"))
    dtypes, values = result.findings
    assert "9 tensors are float32, and bfloat16 in" in dtypes.message and "and 4 more" in dtypes.message
    assert values.tensor == "model.ids"
