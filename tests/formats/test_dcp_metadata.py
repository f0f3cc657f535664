"""`.metadata` of stock checkpoints, read without torch."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptool
from ckptool.core.box import Box
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import Chunk, Locator, ObjectEntry, TensorEntry
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError
from ckptool.formats.dcp_metadata import read_manifest, read_provenance
from ckptool.storage.files import write_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# What torch 2.13 wrote for {"a": torch.arange(4, dtype=torch.bfloat16), "n": 1}; only its path and id are replaced.
GOLDEN = base64.b64decode(
    "gASVYwMAAAAAAACMJXRvcmNoLmRpc3RyaWJ1dGVkLmNoZWNrcG9pbnQubWV0YWRhdGGUjAhNZXRhZGF0YZSTlCmBlH2UKIwTc3RhdGVfZGlj"
    "dF9tZXRhZGF0YZR9lCiMAWGUaACMFVRlbnNvclN0b3JhZ2VNZXRhZGF0YZSTlCmBlH2UKIwKcHJvcGVydGllc5RoAIwQVGVuc29yUHJvcGVy"
    "dGllc5STlCmBlCiMBXRvcmNolIwIYmZsb2F0MTaUk5SME3RvcmNoLnNlcmlhbGl6YXRpb26UjAtfZ2V0X2xheW91dJSTlIwNdG9yY2guc3Ry"
    "aWRlZJSFlFKUiWgAjBRfTUVNX0ZPUk1BVF9FTkNPRElOR5STlEsAhZRSlIl0lGKMBHNpemWUjAV0b3JjaJSMBFNpemWUk5RLBIWUhZRSlIwG"
    "Y2h1bmtzlF2UaACMFENodW5rU3RvcmFnZU1ldGFkYXRhlJOUKYGUfZQojAdvZmZzZXRzlGghSwCFlIWUUpSMBXNpemVzlGghSwSFlIWUUpR1"
    "YmF1YowBbpRoAIwUQnl0ZXNTdG9yYWdlTWV0YWRhdGGUk5QpgZR1jAxwbGFubmVyX2RhdGGUfZQoaAdoB4WUaDNoM4WUdYwMc3RvcmFnZV9k"
    "YXRhlH2UKGgAjA1NZXRhZGF0YUluZGV4lJOUKYGUfZQojANmcW6UaDOMBWluZGV4lE51YowndG9yY2guZGlzdHJpYnV0ZWQuY2hlY2twb2lu"
    "dC5maWxlc3lzdGVtlIwMX1N0b3JhZ2VJbmZvlJOUKYGUfZQojA1yZWxhdGl2ZV9wYXRolIwMX18wXzAuZGlzdGNwlIwGb2Zmc2V0lEsAjAZs"
    "ZW5ndGiUTe0EdWJoPimBlH2UKGhBaAdoQksAaEpoIUsAhZSFlFKUdWJoRSmBlH2UKGhIaEloSk3tBGhLTSkGdWJ1jAxzdG9yYWdlX21ldGGU"
    "aACMC1N0b3JhZ2VNZXRhlJOUKYGUfZQojA1jaGVja3BvaW50X2lklIwHcGF0aGxpYpSMCVBvc2l4UGF0aJSTlIwBL5SMBHJ1bnOUjAZzdGVw"
    "LTGUh5RSlIwHc2F2ZV9pZJSMAmlklIwHbG9hZF9pZJROjAdtb2R1bGVzlF2UdWKMB3ZlcnNpb26UjAUxLjAuMJR1Yi4="
)


def stock_save(folder: Path, **state: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_stock_checkpoint(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 2, dtype=torch.bfloat16), "s": torch.tensor(1)}, "step": 3}
    manifest = read_manifest(stock_save(tmp_path / "c", **state))
    assert (manifest.tensors["model.w"].dtype, manifest.tensors["model.w"].shape) == ("bfloat16", (4, 2))
    assert manifest.tensors["model.w"].chunks[0].box == Box((0, 0), (4, 2))
    assert manifest.tensors["model.s"].shape == ()
    assert set(manifest.objects) == {"step"}
    assert manifest.paths["model.w"] == ("model", "w")
    assert manifest.files == {"__0_0.distcp": (tmp_path / "c" / "__0_0.distcp").stat().st_size}
    assert (manifest.provenance, manifest.ties) == (None, {})


def test_golden_bytes(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(GOLDEN)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1261 + 1577))
    manifest = read_manifest(tmp_path)
    assert manifest.tensors == {
        "a": TensorEntry("a", "bfloat16", (4,), (Chunk(Box((0,), (4,)), Locator("__0_0.distcp", 1261, 1577)),))
    }
    assert manifest.objects == {"n": ObjectEntry("n", Locator("__0_0.distcp", 0, 1261))}
    assert manifest.paths == {"a": ("a",), "n": ("n",)}


def test_torch_is_not_imported(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(2))
    code = (
        "import sys; from ckptool.formats.dcp_metadata import read_manifest; "
        f"print(len(read_manifest({str(folder)!r}).tensors), 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1 False\n"
    )


@pytest.mark.parametrize("module", ["torch.distributed._shard.sharded_tensor.metadata"])
def test_the_names_of_older_torch_releases(tmp_path: Path, module: str) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(2))
    raw = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), 2)
    new = b"ctorch.distributed.checkpoint.metadata\n"
    for name in (b"TensorProperties", b"_MEM_FORMAT_ENCODING"):
        assert new + name in raw
        raw = raw.replace(new + name, b"c" + module.encode() + b"\n" + name.removeprefix(b"_"))
    (folder / ".metadata").write_bytes(raw)
    assert read_manifest(folder).tensors["a"].dtype == "float32"


def test_provenance_decides_which_name_of_a_tie_is_the_alias(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", **{"model": {"a": torch.ones(2), "z": torch.ones(2)}})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[places["model.z"]] = metadata.storage_data[places["model.a"]]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_manifest(folder).ties == {"model.z": "model.a"}
    assert read_manifest(folder).num_bytes == 8
    write_json(folder / "ckptool.json", Provenance("0", ties={"a": "z"}).to_json())
    assert read_manifest(folder).ties == {"model.a": "model.z"}


def test_equal_values_stored_twice_are_no_tie(tmp_path: Path) -> None:
    assert read_manifest(stock_save(tmp_path / "c", a=torch.ones(2), b=torch.ones(2))).ties == {}


def test_provenance_is_read_and_checked(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(2))
    assert read_provenance(folder) is None
    write_json(folder / "ckptool.json", Provenance("0.1", step=7).to_json())
    provenance = read_manifest(folder).provenance
    assert provenance is not None and provenance.step == 7
    (folder / "ckptool.json").write_text(json.dumps({"format_version": 1, "step": "seven"}))
    with pytest.raises(DamagedError, match=r"ckptool\.json"):
        read_manifest(folder)


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    stock_save(tmp_path / "run" / "model", a=torch.ones(2))
    stock_save(tmp_path / "run" / "old" / "step-10", a=torch.ones(2))
    with pytest.raises(NotFoundError, match=r"has no \.metadata") as caught:
        read_manifest(tmp_path / "run")
    assert str(tmp_path / "run" / "model") in caught.value.hint
    assert str(tmp_path / "run" / "old" / "step-10") in caught.value.hint
    with pytest.raises(NotFoundError, match="no such checkpoint"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="is a file"):
        read_manifest(tmp_path / "run" / "model" / ".metadata")
    (tmp_path / "run" / "model" / ".metadata").unlink()
    with pytest.raises(DamagedError, match=r"incomplete.*no \.metadata"):
        read_manifest(tmp_path / "run" / "model")


def test_a_truncated_data_file_is_damaged(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(1000))
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(DamagedError, match=r"a lies at .* of __0_0\.distcp, which ends at 2000"):
        read_manifest(folder)


def test_empty_chunks_may_share_their_offsets(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(2, 3))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["a"].chunks
    for offset in (0, 2, 2):
        chunks.insert(0, ChunkStorageMetadata(torch.Size([offset, 0]), torch.Size([0, 3])))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    stored = [chunk for chunk in read_manifest(folder).tensors["a"].chunks if chunk.locator]
    assert [chunk.box for chunk in stored] == [Box((0, 0), (2, 3))]
    template = {"a": torch.zeros(2, 3)}
    ckptool.load(template, folder)
    assert torch.equal(template["a"], torch.ones(2, 3))


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = stock_save(tmp_path / "c", a=torch.ones(2))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["a"].properties.dtype = torch.qint8
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match="a has the unknown dtype qint8"):
        read_manifest(folder)


def test_many_chunks_take_seconds_not_minutes(tmp_path: Path) -> None:
    num_tensors, num_ranks = 200, 200
    entries: dict[str, Any] = {}
    places = {}
    for t in range(num_tensors):
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 4])) for r in range(num_ranks)]
        entries[f"t{t}"] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([8 * num_ranks, 4]), chunks
        )
        for r, chunk in enumerate(chunks):
            places[MetadataIndex(f"t{t}", chunk.offsets, r)] = _StorageInfo(f"__{r}_0.distcp", t * 1000, 1000)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {}, places, StorageMeta())))
    for r in range(num_ranks):
        with (tmp_path / f"__{r}_0.distcp").open("wb") as file:
            file.truncate(1000 * num_tensors)
    start = time.process_time()
    assert read_manifest(tmp_path).num_chunks == num_tensors * num_ranks
    assert time.process_time() - start < 5
