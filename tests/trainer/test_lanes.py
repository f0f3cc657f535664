"""Streams: each lane is read in one order by whoever reads it, and goes on where it stood, again and again."""

import functools
import json
from dataclasses import replace

import datasets
import numpy as np
import pytest

import ckptool
from ckptool import DamagedError, MismatchError, NotFoundError, StorageError, UnsupportedError, UsageError
from tests.trainer.tiny import make_tokenizer, run
from trainer.sources.lanes import LaneReader, Lanes, open_stream, split_into_lanes, stream_fingerprint
from trainer.sources.resumable import check_resumable
from trainer.sources.spec import SourceSpec, parse_sources

NUM_ROWS = 60
SEQ_LEN = 11

#: The places of the first ten rows of lane 0 in a block of ten: a change here changes what runs were trained on.
GOLDEN_BLOCK = [6, 8, 7, 5, 4, 0, 3, 1, 2, 9]


def rows(num_rows=NUM_ROWS, num_shards=4):
    texts = [f"row {n} " * (1 + n % 3) for n in range(num_rows)]
    return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=num_shards)


def lanes_of(data_set, num_lanes=4, shuffle=0):
    spec = SourceSpec("stream", ("made",), "made", lanes=num_lanes, shuffle=shuffle)
    return split_into_lanes(data_set, spec, make_tokenizer(), SEQ_LEN)


@pytest.mark.parametrize("shuffle", [0, 7])
@pytest.mark.parametrize("num_lanes", [1, 3, 4])
def test_the_lanes_hold_every_row_once(num_lanes, shuffle):
    """Three lanes of four shards take every third row; one and four lanes take whole shards."""
    texts = []
    for lane in lanes_of(rows(), num_lanes, shuffle):
        reader, tokens = LaneReader(lane), []
        while reader.epoch == 0:
            tokens += reader.next_window()[:-1].tolist()
        texts += make_tokenizer().decode(tokens).split("<eos>")
    expected = [row["text"] for row in rows()]
    assert set(expected) <= set(texts)
    assert len(expected) <= len(texts) <= len(expected) + 2 * num_lanes  # the last window runs on into the next epoch


@pytest.mark.parametrize("num_lanes", [3, 4])
def test_lanes_read_in_turns_are_the_lanes_read_alone(num_lanes):
    alone = [[LaneReader(lane).next_window().tolist()] for lane in lanes_of(rows(), num_lanes)]
    readers = [LaneReader(lane) for lane in lanes_of(rows(), num_lanes)]
    for number, reader in enumerate(readers):
        assert [reader.next_window().tolist()] == alone[number]
    again = [LaneReader(lane) for lane in lanes_of(rows(), num_lanes)]
    turns = [[reader.next_window().tolist() for reader in readers] for _ in range(9)]
    for reader in again:
        reader.next_window()
    assert [[reader.next_window().tolist() for _ in range(9)] for reader in again] == [
        list(windows) for windows in zip(*turns, strict=True)
    ]


@pytest.mark.parametrize("shuffle", [0, 1, 4, 9, 50])
def test_every_state_of_a_lane_goes_on_as_if_it_had_not_stopped(shuffle):
    """Also over the lane's end, from a state that was loaded and not yet read from, and from one loaded before it."""
    [lane] = lanes_of(rows(9, num_shards=1), 1, shuffle)
    smooth = LaneReader(lane)
    expected = [smooth.next_window().tolist() for _ in range(40)]
    assert smooth.epoch > 1
    reader = LaneReader(lane)
    for window in expected:
        assert reader.next_window().tolist() == window
        reader = LaneReader(lane, LaneReader(lane, reader.state()).state())


def test_lanes_move_between_ranks():
    """Rounds on two ranks, then on three: each lane goes on, whoever had it."""
    lanes = lanes_of(rows())
    expected = [
        [window[:-1].tolist() for window in windows] for windows in zip(*(read(lane, 8) for lane in lanes), strict=True)
    ]
    states = [""] * 4
    for first, last, world_size in ((0, 3, 2), (3, 5, 3), (5, 8, 1)):
        ranks = [Lanes(lanes) for _ in range(world_size)]
        for rank in ranks:
            rank.restore(states)
        for number in range(first, last):
            got = [ranks[lane % world_size].row(lane, number).inputs.tolist() for lane in range(4)]
            assert got == expected[number]
        for rank in ranks:
            for lane, state in rank.states().items():
                states[lane] = state


def read(lane, count):
    reader = LaneReader(lane)
    return [reader.next_window() for _ in range(count)]


def test_a_position_that_was_moved_is_refused():
    lanes = Lanes(lanes_of(rows()))
    lanes.row(2, 0)
    with pytest.raises(MismatchError, match="lane 2 stands at window 1, the data position at 7"):
        lanes.row(2, 7)
    with pytest.raises(MismatchError, match="3 lanes were saved, the source has 4"):
        lanes.restore([""] * 3)


def test_a_lane_without_documents_is_refused():
    with pytest.raises(UsageError, match="lane 2 of 3 has no documents"):
        LaneReader(lanes_of(rows(2, num_shards=1), 3)[2]).next_window()


@pytest.mark.parametrize("state", ["{", "[]", '{"rest": 3}'])
def test_a_state_that_is_none_is_damaged(state):
    with pytest.raises(DamagedError, match="the state of lane 0"):
        LaneReader(lanes_of(rows())[0], state)


def test_sound_data_sets_pass_the_double_resume():
    digests = {check_resumable(functools.partial(rows, NUM_ROWS, num_shards), "made") for num_shards in (1, 4)}
    assert len(digests) == 1
    assert check_resumable(lambda: rows(3, num_shards=1), "short") not in digests


def documents_of(lane, num_windows):
    tokens = [token for window in read(lane, num_windows) for token in window[:-1].tolist()]
    return make_tokenizer().decode(tokens).split("<eos>")


def test_blocks_of_a_lane_are_shuffled_each_epoch_and_lane_in_another_way():
    plain, shuffled = (documents_of(lanes_of(rows(20, 1), 1, shuffle)[0], 60) for shuffle in (0, 10))
    blocks = [shuffled[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(block) for block in blocks] == [sorted(plain[start : start + 10]) for start in range(0, 40, 10)]
    assert blocks[0] != plain[:10]
    assert blocks[0] != blocks[2]
    places = [[int(text.split()[1]) // 10 for text in block] for block in blocks]
    assert places == [[0] * 10, [1] * 10] * 2
    golden = [int(text.split()[1]) for text in blocks[0]]
    assert golden == GOLDEN_BLOCK


class Frozen:
    """datasets#8308: the state doesn't advance once one was loaded."""

    def __init__(self):
        self._next, self._frozen = 0, None

    def __iter__(self):
        while self._next < NUM_ROWS:
            self._next += 1
            yield {"text": str(self._next)}

    def state_dict(self):
        return {"next": self._next if self._frozen is None else self._frozen}

    def load_state_dict(self, state):
        self._next = state["next"]
        self._frozen = 0


class Ahead(Frozen):
    """datasets#8145: the state is that of the batch that was read, not of the row that was given."""

    def state_dict(self):
        return {"next": -(-self._next // 10) * 10}


@pytest.mark.parametrize(
    ("opened", "row"),
    [(Frozen, 12), (Ahead, 5)],
    ids=["frozen", "ahead"],
)
def test_data_sets_whose_state_is_wrong_are_refused(opened, row):
    with pytest.raises(UnsupportedError, match=f"made: this data set can't be resumed: with two resumes row {row} "):
        check_resumable(opened, "made")


@pytest.mark.parametrize("size", [2, 10, 1000])
@pytest.mark.parametrize("wrapped", [False, True])
def test_shuffle_buffers_are_refused_whatever_their_size(size, wrapped):
    """A large one gives its first half as if nothing were wrong, longer than any test of rows would read."""

    def opened():
        shuffled = rows(5000).shuffle(seed=1, buffer_size=size)
        return datasets.interleave_datasets([shuffled.filter(bool), rows()]) if wrapped else shuffled

    with pytest.raises(
        UnsupportedError, match=f"made: .* shuffled by a buffer of {size} rows, which is lost on resume"
    ):
        check_resumable(opened, "made")


def test_blocks_are_asked_for_in_a_toml_file_and_are_in_the_fingerprint(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "hf")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(30)))
    table = '[[source]]\nkind = "stream"\npath = "lines.jsonl"\nlanes = 1\nshuffle = '
    (tmp_path / "data.toml").write_text(table + "8")
    [spec] = parse_sources([str(tmp_path / "data.toml")])
    assert spec.shuffle == 8
    assert stream_fingerprint(spec, tmp_path / "hf")["shuffle"] == 8
    assert "shuffle" not in stream_fingerprint(replace(spec, shuffle=0), tmp_path / "hf")
    for wrong, message in (("-1", "shuffle is -1"), ("true", "shuffle is True")):
        (tmp_path / "data.toml").write_text(table + wrong)
        with pytest.raises(UsageError, match=message):
            parse_sources([str(tmp_path / "data.toml")])
    (tmp_path / "data.toml").write_text((table + "8").replace("stream", "jsonl"))
    with pytest.raises(UsageError, match="shuffle is for streams"):
        parse_sources([str(tmp_path / "data.toml")])


def test_what_can_be_streamed(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in "abc"))
    for name in ("saved", "lines.jsonl"):
        stream = open_stream(SourceSpec("stream", (str(tmp_path / name),), "s", lanes=2))
        assert [row["text"] for row in stream] == ["a", "b", "c"]


def test_streams_that_are_not_there_or_hold_no_text_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="no data set"):
        open_stream(SourceSpec("stream", (str(tmp_path / "absent"),), "s"))
    wrong = datasets.Dataset.from_dict({"body": ["a"]}).to_iterable_dataset()
    with pytest.raises(DamagedError, match="no field 'text', only body"):
        LaneReader(lanes_of(wrong, 1)[0]).next_window()
    numbers = datasets.Dataset.from_dict({"text": [1]}).to_iterable_dataset()
    with pytest.raises(DamagedError, match="no string but int"):
        LaneReader(lanes_of(numbers, 1)[0]).next_window()


def test_a_stream_that_is_damaged_from_the_beginning_is_no_traceback(root, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(DamagedError, match=r"a\.jsonl can't be read: ArrowInvalid: JSON parse error"):
        run(root, data=(f"stream:{tmp_path / 'a.jsonl'}",))


def broken_rows(error):
    yield {"text": "a row that is whole " * 3}
    raise error


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("row 1"), DamagedError), (TimeoutError("row 1"), StorageError)]
)
def test_a_stream_that_breaks_off_while_it_is_read_is_no_traceback(error, kind):
    broken = datasets.IterableDataset.from_generator(broken_rows, gen_kwargs={"error": error})
    with pytest.raises(kind, match=f"lane 0 of the stream can't be read: {type(error).__name__}: row 1"):
        read(lanes_of(broken, num_lanes=1)[0], 20)


def test_windows_share_their_border_token():
    first, second = read(lanes_of(rows(), 1)[0], 2)
    assert first.dtype == np.int64
    assert first.shape == (SEQ_LEN + 1,)
    assert first[-1] == second[0]


def test_a_run_over_a_stream_resumes_where_it_stood(root, tmp_path):
    datasets.Dataset.from_dict({"text": [f"row {n} " * 3 for n in range(80)]}).save_to_disk(root / "rows")
    data = (f"stream:{root / 'rows'}",)
    smooth = run(root, data=data, steps=4, schedule="constant")
    for name in ("step-4", "metrics.jsonl"):
        (root / name).rename(tmp_path / name)
    run(root, data=data, steps=1, schedule="constant")
    run(root, data=data, steps=3, schedule="constant")
    rough = run(root, data=data, steps=4, schedule="constant")
    assert [line["loss"] for line in rough] == [line["loss"] for line in smooth]
    manifest = ckptool.open_checkpoint(root / "step-4")
    assert {name for name in manifest.objects if "lane" in name} == {f"data.lane.rows.{n:05}" for n in range(8)}
