"""Every parser of untrusted files, on broken real files: a result that keeps its promises, or an error of ours."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.core.provenance import Naming, Provenance
from ckptool.core.tensors import Locator
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_entry import read_entry
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.formats.dcp_source import load_blob
from ckptool.formats.dcp_stubs import METADATA_GLOBALS
from ckptool.formats.hf_folder import read_index
from ckptool.formats.safetensors_file import build_header, read_header
from ckptool.runs import list_checkpoints
from ckptool.storage import safe_pickle
from ckptool.storage.digest import TensorDigest
from ckptool.storage.digests_file import Digests, FileDigest, TensorRecord, read_digests, save_id_for
from ckptool.storage.files import RangeReader, read_json
from ckptool.storage.metrics_file import read_metric
from ckptool.storage.pins import read_pins
from ckptool.storage.seal import seal, unseal
from tests.fuzz.mutate import broken

SHORT, LONG = 400, 10_000
Check = Callable[[Path, bytes], None]


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def checkpoint(folder: Path) -> Path:
    """A small real checkpoint: two tensors, one of them strided, an object, a tie."""
    state = {"model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, 2).t()}, "data": {"record": "{}"}}
    ckptool.save(state, folder, provenance=ckptool.Provenance("0", ties={"c": "a"}), ties={"model.c": "model.a"})
    return folder


@pytest.fixture(scope="session")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    checkpoint(folder / "step-1")
    (folder / ".pins").mkdir()
    return folder


def original_metadata() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        raw, _ = unseal((checkpoint(Path(name) / "c") / ".metadata").read_bytes(), "")
    return [raw, pickle.dumps({"a": [1, (2, 3)], "b": {"c": b"d"}}), pickle.dumps([torch.Size([2]), 1.5, "x"], 0)]


def check_pickle(folder: Path, raw: bytes) -> None:
    value = safe_pickle.load_flat(raw, METADATA_GLOBALS, "x")
    assert value is None or type(value).__module__ in ("builtins", "ckptool.formats.dcp_stubs", safe_pickle.__name__)


def check_plain_pickle(folder: Path, raw: bytes) -> None:
    value = safe_pickle.load(raw, {}, "x")
    assert value is None or type(value).__module__ in ("builtins", safe_pickle.__name__)


def check_metadata(folder: Path, raw: bytes) -> None:
    (folder / "step-1" / ".metadata").write_bytes(seal(raw))  # as an attacker would
    list_checkpoints(folder)
    manifest = read_manifest(folder / "step-1")
    for entry in manifest.tensors.values():
        assert exact_cover_fault([chunk.box for chunk in entry.chunks], entry.shape) == ""
        for chunk in entry.chunks:
            assert chunk.locator is None or chunk.locator.offset + chunk.locator.length <= 1 << 20
    assert manifest.num_bytes <= sum(manifest.files.values())


def check_entry(folder: Path, raw: bytes) -> None:
    (folder / "entry").write_bytes(b"before" + raw + b"after")
    with closing(RangeReader(folder)) as reader:
        stored = read_entry(reader, Locator("entry", 6, len(raw)))
    assert 6 <= stored.payload_offset <= stored.payload_offset + stored.payload_bytes <= 6 + len(raw)
    assert math.prod(stored.shape) <= max(1, stored.payload_bytes) or 0 in stored.stride
    assert stored.is_contiguous in (True, False)


def check_blob(folder: Path, raw: bytes) -> None:
    load_blob(raw, "x")


def check_header(folder: Path, raw: bytes) -> None:
    (folder / "x.safetensors").write_bytes(raw)
    with closing(RangeReader(folder)) as reader:
        entries, _ = read_header(reader, "x.safetensors")
    assert sum(entry.num_bytes for entry in entries.values()) <= len(raw)
    build_header(list(entries.values()))


def check_index(folder: Path, raw: bytes) -> None:
    (folder / "index.json").write_bytes(raw)
    assert all(isinstance(file, str) for file in read_index(folder / "index.json").values())


def check_provenance(folder: Path, raw: bytes) -> None:
    (folder / "p.json").write_bytes(raw)
    provenance = Provenance.from_json(read_json(folder / "p.json"), "p")
    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json())), "p") == provenance


def check_digests(folder: Path, raw: bytes) -> None:
    (folder / "digests.json").write_bytes(raw)
    digests = read_digests(folder, save_id_for(raw))
    assert digests is not None and isinstance(digests.to_bytes(), bytes)


def check_position(folder: Path, raw: bytes) -> None:
    position = DataPosition.from_json(raw.decode("utf-8", "replace"), "x")
    assert position.consumed >= 0
    position.unit(position.consumed)
    assert DataPosition.from_json(position.to_json(), "x") == position


def check_metrics(folder: Path, raw: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(raw)
    assert all(math.isfinite(value) for value in read_metric(folder / "metrics.jsonl", "loss").values())


def check_pins(folder: Path, raw: bytes) -> None:
    (folder / ".pins" / "step-1.json").write_bytes(raw)
    assert isinstance(read_pins(folder)["step-1"], str)


def check_data_position_file(folder: Path, raw: bytes) -> None:
    (folder / "step-1" / "data_position.json").write_bytes(raw)
    list_checkpoints(folder)


NAMING = Naming("t", "L", ("x",), "5")
CREATED = "2026-01-01T00:00:00+00:00"
PROVENANCE = Provenance("0.1", CREATED, 5, 2, {"dp": 2}, {"repo": "a/b"}, NAMING, {"a": "b"}, ("a",))
DIGESTS = Digests({"a": FileDigest(5, "00" * 32)}, {"w": TensorRecord("float32", (2, 3), TensorDigest((1, 2)))})
MIXTURE = [DataSource("a", 5, {"a": "b", "n": 3}), DataSource("b", 70, unit_kind="document")]
POSITION = DataPosition.begin(MIXTURE, seq_len=4, seed=7, global_batch_size=2).advance(5).with_batch_size(3)
POSITION_1 = (
    b'{"consumed":9,"fingerprint":{"a":"b","n":3},"global_batch_size":2,"num_units":5,"order_version":1,"seed":7,'
    b'"seq_len":4}'
)
HEADER = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":' + (
    b'{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
)
METRICS = b'{"step": 1, "loss": 2.5, "lr": 1e-3}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 2}\n{"st'
INDEX = b'{"metadata": {"total_size": 9}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}'
CHUNKS = [
    saved(torch.arange(6, dtype=torch.int16).reshape(2, 3)),
    saved(torch.ones(4, 2).t()),
    saved(torch.zeros(())),
    saved(torch.zeros(2, 0)),
]
OBJECTS = [saved({"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"]}), saved("text"), saved(torch.ones(3))]

PARSERS: dict[str, tuple[Check, list[bytes]]] = {
    "pickle": (check_pickle, original_metadata()),
    "plain pickle": (
        check_plain_pickle,
        [pickle.dumps({"a": [1, (2, 3)], "b": {"c": b"d"}}, 4), pickle.dumps([{1: 2}, 1.5, "x"], 0)],
    ),
    "metadata": (check_metadata, original_metadata()[:1]),
    "entry": (check_entry, CHUNKS),
    "object": (check_blob, OBJECTS),
    "safetensors": (check_header, [len(HEADER).to_bytes(8, "little") + HEADER + bytes(9)]),
    "index": (check_index, [INDEX]),
    "provenance": (check_provenance, [json.dumps(PROVENANCE.to_json()).encode()]),
    "digests": (check_digests, [DIGESTS.to_bytes()]),
    "position": (check_position, [POSITION.to_json().encode(), POSITION_1]),
    "position file": (check_data_position_file, [POSITION.to_json().encode()]),
    "metrics": (check_metrics, [METRICS]),
    "pins": (check_pins, [b'{"reason": "because", "created": "2026-01-01T00:00:00+00:00"}']),
}
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def fuzz(name: str, workbench: Path, num_examples: int) -> None:
    check, originals = PARSERS[name]
    for original in originals:
        check(workbench, original)  # unbroken, it is read

    @given(broken(*originals))
    @settings(max_examples=num_examples, deadline=timedelta(seconds=10), suppress_health_check=QUIET, database=None)
    def attempt(raw: bytes) -> None:
        try:
            check(workbench, raw)
        except CkptoolError as error:
            assert str(error) and len(str(error)) < 5000

    attempt()


@pytest.mark.parametrize("name", PARSERS)
def test_broken_files_give_our_own_errors(name: str, workbench: Path) -> None:
    fuzz(name, workbench, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_broken_files_give_our_own_errors_at_length(name: str, workbench: Path) -> None:
    fuzz(name, workbench, LONG)


NUMBERS = st.lists(st.integers(0, 4), max_size=3)
BOXES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6)


@given(BOXES, NUMBERS)
def test_any_boxes_are_a_cover_or_a_fault(boxes: list[tuple[list[int], list[int]]], shape: list[int]) -> None:
    """Against counting every element by hand."""
    cover = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if len(offsets) == len(sizes)]
    counts: dict[tuple[int, ...], int] = {}
    for box in cover:
        ranges = [range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
        for index in _product(ranges):
            counts[index] = counts.get(index, 0) + 1
    whole = set(_product([range(size) for size in shape]))
    fits = all(box.fits(shape) for box in cover)
    exact = fits and set(counts) == whole and all(count == 1 for count in counts.values())
    assert (exact_cover_fault(cover, shape) == "") is exact


def _product(ranges: list[range]) -> list[tuple[int, ...]]:
    return list(itertools.product(*ranges))
