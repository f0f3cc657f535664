"""Loads to where a run trains (on GPUs with TEST_DEVICE=cuda): every bit arrives, in pieces, cast or in columns."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool.formats import host_memory, tensor_reads
from tests.trainer.tiny import DEVICE

PROVENANCE = ckptool.Provenance("0")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 4096)


def made(num_rows=300):
    generator = torch.Generator().manual_seed(0)
    whole = {f"{dtype}": torch.rand(num_rows, 40, generator=generator).mul(7).to(dtype) for dtype in DTYPES}
    odd = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 5), "vector": torch.arange(5000.0)}
    many = {f"small.{i}": torch.full((3,), float(i)) for i in range(50)}
    wide = {"wide": torch.rand(3, 5000, generator=generator), "deep": torch.rand(2, 50, 60, generator=generator)}
    return whole | odd | many | wide


@pytest.fixture
def stored(tmp_path):
    dcp.save(made(), checkpoint_id=tmp_path / "stock")
    ckptool.save({"model": made()}, tmp_path / "ours", provenance=PROVENANCE)
    return tmp_path


def template(device=DEVICE):
    return {name: torch.full_like(tensor, 1, device=device) for name, tensor in made().items()}


def assert_loaded(state):
    for name, tensor in made().items():
        assert torch.equal(raw(state[name]), raw(tensor)), name


def raw(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8)


def test_every_bit_arrives(stored, small_pieces):
    state = template()
    dcp.load(state, storage_reader=ckptool.StorageReader(stored / "stock"))
    assert_loaded(state)
    state = {"model": template()}
    ckptool.load(state, stored / "ours")
    assert_loaded(state["model"])


def test_targets_that_are_columns_or_on_another_device_are_filled_too(stored, small_pieces):
    state, on_cpu = template(), template("cpu")
    for name in ("torch.float32", "wide"):
        rows, columns = made()[name].shape
        state[name] = torch.zeros(columns, rows, device=DEVICE).T
    state["torch.bfloat16"], state["vector"] = on_cpu["torch.bfloat16"], on_cpu["vector"]
    ckptool.load({"model": state}, stored / "ours")
    assert_loaded(state)


def test_a_cast_rounds_as_torch_does_and_refuses_what_becomes_infinite(stored, small_pieces):
    state = template()
    state["wide"] = torch.zeros(3, 5000, dtype=torch.bfloat16, device=DEVICE)
    ckptool.load({"model": state}, stored / "ours", allow_cast=True)
    assert torch.equal(state["wide"].cpu(), made()["wide"].bfloat16())
    large = {"w": torch.full((5000,), 1e6)}
    ckptool.save(large, stored / "large", provenance=PROVENANCE)
    half = {"w": torch.zeros(5000, dtype=torch.float16, device=DEVICE)}
    with pytest.raises(ckptool.CkptoolError, match="too large for float16"):
        ckptool.load(half, stored / "large", allow_cast=True)


def test_a_changed_bit_in_any_piece_is_found(stored, small_pieces):
    (file,) = (stored / "ours").glob("*.distcp")
    content = bytearray(file.read_bytes())
    values = made()["wide"].numpy().tobytes()
    content[content.index(values) + len(values) - 3] ^= 16
    file.write_bytes(content)
    with pytest.raises(ckptool.DamagedError, match="wide"):
        ckptool.load({"model": template()}, stored / "ours")


def test_a_file_cut_short_is_one_error_and_the_threads_end(stored, small_pieces):
    (file,) = (stored / "ours").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:30_000])
    with pytest.raises(ckptool.CkptoolError):
        ckptool.load({"model": template()}, stored / "ours")
    assert not [thread for thread in tensor_reads.threading.enumerate() if thread.name.startswith("tensors")]


def test_what_runs_on_the_gpu_before_a_load_is_over_before_it(stored):
    """The load's own streams wait for what was queued on the tensors."""
    state = template()
    busy = torch.rand(2000, 2000, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy
        busy /= busy.norm()
    state["vector"].copy_(busy.reshape(-1)[:5000])
    dcp.load(state, storage_reader=ckptool.StorageReader(stored / "stock"))
    assert_loaded(state)


def test_a_saver_that_was_dropped_leaves_no_pinned_memory_in_the_way(tmp_path):
    for number in range(4):
        state = {"model": template()}
        ckptool.AsyncSaver().save(state, tmp_path / f"{number}").result()
        ckptool.load(state, tmp_path / f"{number}")
        assert all(bool((tensor == 1).all()) for tensor in state["model"].values())


@pytest.mark.skipif(DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_a_state_on_several_gpus_is_filled(stored, small_pieces):
    state = template()
    for number, (name, tensor) in enumerate(template("cpu").items()):
        state[name] = tensor.to(("cuda:0", "cuda:1", "cpu")[number % 3])
    ckptool.load({"model": state}, stored / "ours")
    assert_loaded(state)


@pytest.mark.skipif(DEVICE != "cuda", reason="takes a GPU")
def test_memory_that_cuda_cannot_pin_is_used_all_the_same(stored, small_pieces, monkeypatch):
    monkeypatch.setattr(host_memory.HostMemory, "_register", lambda self: 1)
    state = {"model": template()}
    ckptool.load(state, stored / "ours")
    assert_loaded(state["model"])
    with pytest.raises(ckptool.CkptoolError, match="can't pin"):
        host_memory.HostMemory(4096, pin=True)
