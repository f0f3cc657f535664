"""`data import`: other systems' counts brought over, where their ranks agree on one; who differs is said otherwise."""

import argparse
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptool import GlobalBatchSampler
from ckptool.cli.main import run
from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.errors import DamagedError, MismatchError, NotFoundError, UnsafeError, UnsupportedError, UsageError
from ckptool.ops.data_edit import edit, seek
from ckptool.ops.data_import import import_position
from ckptool.ops.data_read import read_position
from ckptool.ops.data_verify import verify_position
from tests.ops.test_data import begin, save, shard_bytes, train

A = DataSource("a", 100, {"tokens": "x"})
STREAM = {"sources": [A], "seq_len": 16, "global_batch_size": 8}


def foreign(path: Path, **state) -> Path:
    dcp.save({"model": {"w": torch.zeros(3)}, **state}, checkpoint_id=path, no_dist=True)
    return path


class Texts(IterableDataset):
    """Documents of a rank cut into sequences of four tokens, with the state that torchtitan's text data set has."""

    def __init__(self, rank, length):
        self.rank, self.length, self.sample_idx, self.inputs_buffer = rank, length, 0, []

    def __iter__(self):
        while True:
            self.inputs_buffer += [self.rank] * self.length
            self.sample_idx += 1
            while len(self.inputs_buffer) >= 4:
                sequence, self.inputs_buffer = self.inputs_buffer[:4], self.inputs_buffer[4:]
                yield torch.tensor(sequence)

    def state_dict(self):
        return {"sample_idx": self.sample_idx, "inputs_buffer": list(self.inputs_buffer), "epoch": 0}

    def load_state_dict(self, state):
        self.sample_idx, self.inputs_buffer = state["sample_idx"], state["inputs_buffer"]


def titan_loader(rank, world_size, length, num_workers):
    """torchtitan's loader, where it is installed; elsewhere one that has its state."""
    try:
        from torchtitan.components.dataloader import ParallelAwareDataloader

        return ParallelAwareDataloader(Texts(rank, length), rank, world_size, batch_size=2, num_workers=num_workers)
    except ImportError:
        inner = StatefulDataLoader(Texts(rank, length), batch_size=2, num_workers=num_workers)
        inner_state = inner.state_dict
        inner.state_dict = lambda: {f"dp_rank_{rank}": pickle.dumps(inner_state()), "world_size": world_size}
        return inner


def titan(path, batches=(12, 12, 12), step=6, num_workers=0, world_size=None):
    state = {}
    for rank, count in enumerate(batches):
        loader = titan_loader(rank, world_size or len(batches), 5 + rank, num_workers)
        items = iter(loader)
        for _ in range(count):
            next(items)
        state |= loader.state_dict()
    return foreign(path, dataloader=state, train_state={"step": step})


@pytest.mark.parametrize(("num_workers", "step"), [(0, 6), (1, torch.tensor(6, dtype=torch.int32))])
def test_torchtitans_ranks_add_up_to_one_count(tmp_path, num_workers, step):
    path = titan(tmp_path / "step-6", step=step, num_workers=num_workers)
    shards = shard_bytes(path)
    result = import_position(str(path), "torchtitan", **STREAM, batch_size=2)
    assert result.executed
    position = read_position(path).position
    assert (position.consumed, position.num_steps) == (72, 6)
    assert position.next_units() == range(72, 80)
    assert position.edits[0].action == "import from torchtitan"
    assert any("about 20 of the 28 that come now were among them" in change for change in result.details["changes"])
    assert any("tokens that it had read and not trained yet" in change for change in result.details["changes"])
    assert shard_bytes(path) == shards
    assert verify_position(str(path)).exit_code == 0


def test_the_batch_of_torchtitan_follows_from_its_step_and_a_global_batch_that_fits(tmp_path):
    path = titan(tmp_path / "step-6")
    import_position(str(path), "torchtitan", **STREAM | {"global_batch_size": 12})
    assert read_position(path).position.consumed == 72
    with pytest.raises(UsageError, match="how many samples a batch"):
        import_position(str(titan(tmp_path / "b", step=5)), "torchtitan", **STREAM)


def test_ranks_that_stand_at_other_places_are_listed_and_nothing_is_written(tmp_path, capsys):
    path = titan(tmp_path / "step-6", batches=(12, 13, 12))
    before = {file: file.read_bytes() for file in path.iterdir()}
    (tmp_path / "a.json").write_text(json.dumps({"name": "a", "num_units": 100, "fingerprint": {}}))
    command = ["data", "import", str(path), "--from", "torchtitan", "--batch-size", "2", "--seq-len", "16"]
    command += ["--source", str(tmp_path / "a.json"), "--global-batch-size", "8"]
    assert run(command) == 3
    said = capsys.readouterr().out
    assert "no one count: batches: 12 on rank 0, 2; 13 on rank 1" in said
    assert "is not changed" in said
    assert run([*command, "--json"]) == 3
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["facts"]["batches"] for rank in ranks] == [12, 13, 12]
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def test_a_rank_without_state_is_named(tmp_path):
    path = titan(tmp_path / "step-6", world_size=4)
    result = import_position(str(path), "torchtitan", **STREAM, batch_size=2)
    assert (result.executed, result.details["disagreements"]) == (False, ["of 4 ranks, 3 have no state"])


class Numbers(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index


def torchdata_states(folder, counts, **options):
    folder.mkdir()
    for rank, count in enumerate(counts):
        loader = StatefulDataLoader(Numbers(), batch_size=3, **options)
        items = iter(loader)
        for _ in range(count):
            next(items)
        torch.save({"loader": loader.state_dict()}, folder / f"rank{rank}.pt")
    return [str(folder)]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 2}], ids=["plain", "shuffled", "workers"])
def test_torchdatas_samples_are_those_of_all_ranks_in_the_epoch(tmp_path, options):
    path = foreign(tmp_path / "step-5")
    states = torchdata_states(tmp_path / "loaders", (5, 5), **options)
    import_position(str(path), "torchdata", states=states, world_size=2, epoch=1, **STREAM)
    position = read_position(path).position
    assert (position.consumed, position.unit(position.consumed).epoch) == (130, 1)


def test_torchdatas_states_say_nothing_of_other_ranks(tmp_path):
    path = foreign(tmp_path / "step-5")
    states = torchdata_states(tmp_path / "loaders", (5,))
    with pytest.raises(UsageError, match="1 states were found; how many ranks"):
        import_position(str(path), "torchdata", states=states, **STREAM)
    result = import_position(str(path), "torchdata", states=states, world_size=2, **STREAM)
    assert result.details["disagreements"] == ["of 2 ranks, 1 have no state"]


def test_batches_since_a_loaders_snapshot_are_counted_but_not_known_to_its_sampler(tmp_path):
    path = foreign(tmp_path / "step-5")
    late = torchdata_states(tmp_path / "late", (3,), num_workers=1, snapshot_every_n_steps=2)
    import_position(str(path), "torchdata", states=late, world_size=1, batch_size=3, **STREAM)
    assert read_position(path).position.consumed == 9
    sampler = GlobalBatchSampler(A, global_batch_size=8, rank=1, world_size=2, seq_len=16)
    loader = StatefulDataLoader(range(100), batch_sampler=sampler, num_workers=1, snapshot_every_n_steps=2)
    next(iter(loader))
    path = foreign(tmp_path / "ours", loader=loader.state_dict())
    with pytest.raises(UnsupportedError, match="the sampler's place is that of 1 batches before"):
        import_position(str(path), "torchdata")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_around_our_sampler_gives_its_very_place(tmp_path, num_workers):
    sampler = GlobalBatchSampler(A, global_batch_size=8, rank=1, world_size=2, seed=5, seq_len=16)
    loader = StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers)
    items = iter(loader)
    for _ in range(3):
        sampler.step()
        try:
            next(items)
        except (IndexError, StopIteration):
            break
    path = foreign(tmp_path / "step-3", loader=loader.state_dict())
    result = import_position(str(path), "torchdata")
    assert result.details["exact"]
    assert read_position(path).position.consumed == 24
    save(tmp_path / "step-1", DataPosition.begin([A], seq_len=16, seed=5, global_batch_size=8))
    import_position(str(tmp_path / "step-1"), "torchdata", states=[str(path)])
    moved, expected = (read_position(p).position for p in (tmp_path / "step-1", path))
    assert moved.units(range(9)) == expected.units(range(24, 33))
    save(tmp_path / "step-0", begin(A))
    with pytest.raises(MismatchError, match="of another stream: seed 5 -> 0"):
        import_position(str(tmp_path / "step-0"), "torchdata", states=[str(path)])


class Backend:
    """Stands for what is pickled in Megatron's arguments: classes of its own, dtypes, functions."""


def megatron(folder, consumed=80, name="iter_0000010/common.pt"):
    arguments = argparse.Namespace(
        consumed_train_samples=consumed,
        seq_length=16,
        global_batch_size=8,
        params_dtype=torch.bfloat16,
        attention_backend=Backend(),
        activation=torch.nn.functional.gelu,
        blend=(["a"], None),
    )
    content = {"args": arguments, "iteration": 10, "checkpoint_version": 3.0, "rng_state": torch.zeros(9)}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / name)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


def test_megatrons_consumed_samples_are_read_without_its_classes(tmp_path):
    megatron(tmp_path / "run")
    path = foreign(tmp_path / "step-10")
    import_position(str(path), "megatron", states=[str(tmp_path / "run")], **STREAM)
    position = read_position(path).position
    assert (position.consumed, position.num_steps, position.global_batch_size) == (80, 10, 8)
    other = STREAM | {"seq_len": 32}
    with pytest.raises(MismatchError, match="have 16 tokens, the units of this stream 32"):
        import_position(str(foreign(tmp_path / "b")), "megatron", states=[str(tmp_path / "run")], **other)


def test_megatrons_older_files_must_agree(tmp_path):
    path = foreign(tmp_path / "step-10")
    for rank, consumed in (("00", 80), ("01", 72)):
        megatron(tmp_path / "run", consumed, f"iter_0000010/mp_rank_{rank}/model_optim_rng.pt")
    result = import_position(str(path), "megatron", states=[str(tmp_path / "run")], **STREAM)
    assert result.details["disagreements"] == ["consumed train samples: 80 on rank mp_rank_00; 72 on rank mp_rank_01"]


def olmo(folder, batches=(4, 4)):
    """The trainer state that OLMo-core writes, its loader's part from the library itself where it is installed."""
    (folder / "train").mkdir(parents=True)
    for rank, count in enumerate(batches):
        loader = {"dataset_type": "fsl", "batches_processed": count, "tokens_processed": count * 128, "epoch": 2}
        loader |= {"seed": 3, "sequence_length": 16, "max_target_sequence_length": None, "dataset_fingerprint": "ab"}
        state = {"data_loader": loader, "epoch": 2, "global_step": 16, "world_size": 2, "rng": Backend()}
        torch.save(state, folder / "train" / f"rank{rank}.pt")
    return folder


def test_olmos_epochs_and_sequences(tmp_path):
    path = foreign(tmp_path / "step-16")
    import_position(str(path), "olmo", states=[str(olmo(tmp_path / "olmo"))], **STREAM)
    position = read_position(path).position
    assert (position.consumed, position.unit(132).epoch, position.num_steps) == (132, 1, 16)
    result = import_position(str(path), "olmo", states=[str(olmo(tmp_path / "uneven", (4, 5)))], dry_run=True)
    assert result.details["disagreements"][0] == "batches processed: 4 on rank 0; 5 on rank 1"


def test_olmos_own_loader(tmp_path):
    data = pytest.importorskip("olmo_core.data")
    np.arange(100 * 16, dtype=np.uint16).tofile(tmp_path / "t.npy")
    tokenizer = data.TokenizerConfig(vocab_size=2000, eos_token_id=0, pad_token_id=1)
    common = {"work_dir": str(tmp_path)}
    files = data.NumpyFSLDatasetConfig(
        paths=[str(tmp_path / "t.npy")], sequence_length=16, tokenizer=tokenizer, **common
    )
    loader = data.NumpyDataLoaderConfig(global_batch_size=128, seed=3, num_workers=0, **common).build(files.build())
    loader.reshuffle(epoch=1)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    (tmp_path / "olmo" / "train").mkdir(parents=True)
    torch.save({"data_loader": state, "epoch": 1, "world_size": 1}, tmp_path / "olmo" / "train" / "rank0.pt")
    path = foreign(tmp_path / "step-3")
    import_position(str(path), "olmo", states=[str(tmp_path / "olmo")], **STREAM)
    assert read_position(path).position.consumed == 8 * state["batches_processed"]


STREAMING = {"epoch": 1, "sample_in_epoch": 24, "num_canonical_nodes": 1, "shuffle_seed": 9176}


@pytest.mark.parametrize("form", ["json", "pt", "dcp"])
def test_the_state_of_streaming_in_a_file_or_a_composer_checkpoint(tmp_path, form):
    whole = {"state": {"dataset_state": {"train": STREAMING, "eval": {"e": {**STREAMING, "sample_in_epoch": 7}}}}}
    path = foreign(tmp_path / "ep1", **(whole if form == "dcp" else {}))
    states = []
    if form == "json":
        (tmp_path / "state.json").write_text(json.dumps(STREAMING))
        states = [str(tmp_path / "state.json")]
    elif form == "pt":
        torch.save(whole, tmp_path / "ep1-rank0.pt")
        states = [str(tmp_path / "ep1-rank0.pt")]
    import_position(str(path), "streaming", states=states, **STREAM)
    assert read_position(path).position.consumed == 124


def test_a_checkpoint_of_ours_keeps_its_stream_and_moves_in_it(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({**STREAMING, "epoch": 0}))
    stream = begin(A)
    save(tmp_path / "step-1", train(stream, 1))
    result = import_position(
        "step-1", "streaming", states=[str(tmp_path / "state.json")], root=tmp_path, reason="from streaming"
    )
    moved = read_position("step-1", tmp_path).position
    assert (moved.consumed, moved.num_steps) == (6, 1)
    assert moved.units(range(6, 30)) == stream.units(range(24, 48))
    assert "--to epoch:1 trains nothing again and leaves 76 units out" in result.notes[1]
    assert verify_position("step-1", root=tmp_path, replay=True).exit_code == 0
    seek("step-1", "epoch:1", root=tmp_path)
    assert read_position("step-1", tmp_path).position.unit(6).epoch == 1
    with pytest.raises(UsageError, match="whose stream it keeps"):
        import_position("step-1", "streaming", root=tmp_path, **STREAM)
    edit("step-1", weights={"a": 1, "b": 1}, add_sources=(DataSource("b", 9),), root=tmp_path)
    with pytest.raises(UsageError, match="was changed before, so a count from the beginning means nothing"):
        import_position("step-1", "streaming", states=[str(tmp_path / "state.json")], root=tmp_path)


def test_counts_of_other_things_are_refused(tmp_path):
    path = foreign(tmp_path / "step-1")
    (tmp_path / "state.json").write_text(json.dumps({**STREAMING, "sample_in_epoch": 101}))
    with pytest.raises(MismatchError, match="has 101 samples and more, a has 100 units"):
        import_position(str(path), "streaming", states=[str(tmp_path / "state.json")], **STREAM)
    mixture = STREAM | {"sources": [A, DataSource("b", 9)], "weights": {"a": 1, "b": 1}}
    with pytest.raises(UsageError, match="it stands in epoch 1, and a mixture's sources have epochs of their own"):
        (tmp_path / "state.json").write_text(json.dumps(STREAMING))
        import_position(str(path), "streaming", states=[str(tmp_path / "state.json")], **mixture)


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_state_that_wants_to_run_code_runs_nothing(tmp_path):
    path = foreign(
        tmp_path / "step-1", dataloader={"dp_rank_0": pickle.dumps({"_num_yielded": RunsCode(tmp_path / "x")})}
    )
    with pytest.raises(DamagedError, match="no number of batches"):
        import_position(str(path), "torchtitan", **STREAM)
    torch.save({"args": RunsCode(tmp_path / "x")}, tmp_path / "common.pt")
    with pytest.raises(NotFoundError, match=r"no args\.consumed_train_samples"):
        import_position(str(path), "megatron", states=[str(tmp_path / "common.pt")], **STREAM)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "cut short"), (b"PK\x03\x04 half", "cut short"), (b"nonsense", "has no place"), (b"\x80\x02}.", "no state")],
)
def test_files_that_are_no_state_are_named(tmp_path, content, message):
    path = foreign(tmp_path / "step-1")
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises((DamagedError, NotFoundError, UnsafeError), match=message):
        import_position(str(path), "streaming", states=[str(tmp_path / "state.pt")], **STREAM)


@pytest.mark.parametrize("system", ["torchtitan", "torchdata", "megatron", "olmo", "streaming"])
def test_a_checkpoint_without_such_a_state_is_named(tmp_path, system):
    path = foreign(tmp_path / "step-1")
    with pytest.raises(NotFoundError, match=str(path)):
        import_position(str(path), system, **STREAM)
    with pytest.raises(UsageError, match="its stream has to be defined"):
        megatron(tmp_path / "run")
        import_position(str(path), "megatron", states=[str(tmp_path / "run")])
