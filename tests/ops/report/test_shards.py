from __future__ import annotations

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.ops.report.shards import MAX_FILES, MAX_LAYERS, MAX_PARTS, map_shards, rank_of
from ckptool.ops.report.sizes import module_sizes
from tests.ops.report.big import big_manifest


def small_manifest() -> Manifest:
    def part(rank: int, start: int, rows: int, offset: int) -> Chunk:
        return Chunk(Box((start, 0), (rows, 4)), Locator(f"__{rank}_0.distcp", offset, 999))

    tensors = {
        "model.layers.0.up": TensorEntry("model.layers.0.up", "float32", (4, 4), (part(0, 0, 3, 0), part(1, 3, 1, 0))),
        "model.layers.1.up": TensorEntry("model.layers.1.up", "bfloat16", (2, 4), (part(1, 0, 2, 5000),)),
        "model.head": TensorEntry("model.head", "float32", (4, 4), (part(0, 0, 3, 0), part(1, 3, 1, 0))),
    }
    files = {"__0_0.distcp": 9000, "__1_0.distcp": 9000}
    return Manifest("x", tensors, ties={"model.head": "model.layers.0.up"}, files=files)


def test_each_part_is_listed_with_its_rank_and_place() -> None:
    parts = map_shards(small_manifest()).parts
    assert [(part.fqn, part.rows, part.rank, part.offset_bytes, part.num_bytes) for part in parts] == [
        ("model.layers.0.up", "[0:3, 0:4]", 0, 0, 48),
        ("model.layers.0.up", "[3:4, 0:4]", 1, 0, 16),
        ("model.layers.1.up", "[0:2, 0:4]", 1, 5000, 16),
    ]


def test_bytes_are_counted_by_file_and_layer_and_a_tie_once() -> None:
    shards = map_shards(small_manifest())
    assert {(cell.layers, cell.files): cell.num_bytes for cell in shards.cells} == {
        ("model.layers.0", "__0_0.distcp"): 48,
        ("model.layers.0", "__1_0.distcp"): 16,
        ("model.layers.1", "__1_0.distcp"): 16,
    }
    assert [(share.rank, share.num_bytes, share.num_tensors) for share in shards.files] == [(0, 48, 1), (1, 32, 2)]
    assert shards.imbalance == 48 / 40


def test_keys_choose_which_parts_are_listed() -> None:
    shards = map_shards(small_manifest(), "*.1.*")
    assert [part.fqn for part in shards.parts] == ["model.layers.1.up"]
    assert shards.num_parts == 1 and len(shards.files) == 2


def test_a_large_map_shares_rows_and_columns_and_loses_no_byte() -> None:
    manifest = big_manifest(num_layers=200, num_ranks=100)
    shards = map_shards(manifest)
    assert manifest.num_chunks == shards.num_parts == 100_000
    assert len(shards.row_names) <= MAX_LAYERS and len(shards.column_names) <= MAX_FILES
    assert sum(cell.num_bytes for cell in shards.cells) == manifest.num_bytes
    assert sum(cell.num_chunks for cell in shards.cells) == 100_000
    assert len(shards.parts) == MAX_PARTS


def test_ranks_are_read_from_the_names_that_dcp_gives() -> None:
    assert rank_of("__12_3.distcp") == rank_of("epoch/__12_3.distcp") == 12
    assert rank_of("model-00001-of-00002.safetensors") is rank_of(f"__{'9' * 5000}_0.distcp") is None


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    shards = map_shards(big_manifest(num_layers=1, num_ranks=12))
    assert [share.rank for share in shards.files] == list(range(12))


def test_modules_share_out_all_bytes() -> None:
    manifest = big_manifest(num_layers=100, num_ranks=2)
    for limit in (1, 7, 100, 10_000):
        modules = module_sizes(manifest, limit)
        assert sum(module.num_bytes for module in modules) == manifest.num_bytes
        assert sum(module.num_tensors for module in modules) == 500
        assert len(modules) <= max(1, limit)
    assert module_sizes(manifest, 1)[0].name == "model.layers"


def test_a_tensor_named_like_a_module_is_counted_beside_it() -> None:
    def entry(fqn: str, rows: int) -> TensorEntry:
        return TensorEntry(fqn, "float32", (rows,), (Chunk(Box((0,), (rows,))),))

    manifest = Manifest("x", {name: entry(name, rows) for name, rows in (("a", 3), ("a.b", 5))})
    assert sum(module.num_bytes for module in module_sizes(manifest)) == manifest.num_bytes
