"""Every kind of source becomes the tokens that it holds, and says clearly when it can't."""

import struct

import datasets
import numpy as np
import pytest

from ckptool import DamagedError, NotFoundError, UnsupportedError, UsageError
from ckptool.storage import data_files
from tests.trainer.tiny import make_tokenizer
from trainer.corpus import open_corpus
from trainer.sources.lanes import open_stream
from trainer.sources.spec import SourceSpec, parse_sources

EOS = 256


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def open_source(hf_folder, tmp_path):
    """Open one `--data` option as a corpus, cached below tmp_path."""

    def opened(text, **changes):
        [spec] = parse_sources([str(text)])
        return open_corpus(SourceSpec(**{**vars(spec), **changes}), hf_folder, tmp_path / "root", print)

    return opened


def ids(corpus):
    return corpus.tokens().read(0, corpus.num_tokens).tolist()


TOKENS = [5, 6, EOS, 7, 8, 9, EOS, 1]


@pytest.mark.parametrize("layout", ["raw uint16", "raw uint32", "npy", "npy int64", "llm.c"])
def test_token_files_of_other_tools_are_read_as_they_are(tmp_path, open_source, layout):
    path, dtype = tmp_path / "train.bin", ""
    match layout:
        case "raw uint16":
            np.array(TOKENS, np.uint16).tofile(path)
        case "raw uint32":
            np.array(TOKENS, np.uint32).tofile(path)
            dtype = "uint32"
        case "llm.c":
            header = np.zeros(256, np.int32)
            header[:3] = 20240520, 1, len(TOKENS)
            path.write_bytes(header.tobytes() + np.array(TOKENS, np.uint16).tobytes())
        case _:
            path = tmp_path / "train.npy"
            np.save(path, np.array(TOKENS, np.int64 if "int64" in layout else np.uint16))
    corpus = open_source(f"tokens:{path}", dtype=dtype)
    assert ids(corpus) == TOKENS
    assert corpus.document_lengths().tolist() == [3, 4, 1]
    assert corpus.masks == ()


def test_shards_in_a_folder_are_one_stream_in_name_order(tmp_path, open_source):
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, tokens in (("b.bin", [3, 4, EOS]), ("a.npy", [1, 2])):
        np.array(tokens, np.uint16).tofile(folder / name)
    corpus = open_source(f"tokens:{folder}")
    assert ids(corpus) == [1, 2, 3, 4, EOS]
    assert corpus.tokens().read(1, 4).tolist() == [2, 3, 4]
    assert corpus.document_lengths().tolist() == [5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([1, 70000, 2], np.uint32).tobytes(), r"token \d is \d+, but the tokenizer has 257"),
        (b"\x01\x00\x02", "3 bytes are no whole number of uint16 tokens"),
        (b"", "0 bytes are no whole number"),
        (np.array([20240520, 1, 9], np.int32).tobytes() + bytes(1012 + 4), "its header says 9 tokens"),
        (b"\x93NUMPY\x01\x00", "train.bin"),
    ],
)
def test_token_files_that_can_not_be_are_refused(tmp_path, open_source, content, message):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(DamagedError, match=message):
        open_source(f"tokens:{tmp_path / 'train.bin'}")


def test_a_changed_byte_is_another_source_also_where_only_samples_are_read(tmp_path, open_source, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_FULL_DIGEST_BYTES", 1000)
    monkeypatch.setattr(data_files, "_SAMPLE_BYTES", 8)
    path = tmp_path / "train.bin"
    tokens = np.arange(4000, dtype=np.uint16) % 250
    tokens.tofile(path)
    whole = open_source(f"tokens:{path}").fingerprint
    assert whole["content"] == "sampled"
    tokens[-1] = 0
    tokens.tofile(path)
    edited = open_source(f"tokens:{path}").fingerprint
    assert {key for key in whole if whole[key] != edited[key]} == {"files", "tokens"}


def write_megatron(prefix, sequences, documents, dtype=np.uint16, code=8):
    """As Megatron's IndexedDatasetBuilder does; `documents` are their first sequences, then the number of sequences."""
    data = [np.array(sequence, dtype) for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in data))
    lengths = [len(each) for each in data]
    offsets = [sum(lengths[:n]) * np.dtype(dtype).itemsize for n in range(len(data))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(data), len(documents))
    index += struct.pack(f"<{len(data)}i", *lengths) + struct.pack(f"<{len(data)}q", *offsets)
    prefix.with_suffix(".idx").write_bytes(index + struct.pack(f"<{len(documents)}q", *documents))


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx"])
def test_a_megatron_data_set_keeps_its_documents(tmp_path, open_source, name):
    write_megatron(tmp_path / "corpus", [[1, 2], [3, EOS], [4, 5, EOS]], documents=[0, 2, 3])
    corpus = open_source(f"megatron:{tmp_path / name}")
    assert ids(corpus) == [1, 2, 3, EOS, 4, 5, EOS]
    assert corpus.document_lengths().tolist() == [4, 3]


def test_a_megatron_data_set_of_32_bits(tmp_path, open_source):
    write_megatron(tmp_path / "corpus", [[1, 2], [3]], documents=[0, 1, 2], dtype=np.int32, code=4)
    assert ids(open_source(f"megatron:{tmp_path / 'corpus'}")) == [1, 2, 3]


def damage(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("suffix", "change", "error", "message"),
    [
        (".idx", lambda c: c.__setitem__(0, 0), DamagedError, "not a Megatron index"),
        (".idx", lambda c: c.__setitem__(9, 2), UnsupportedError, "version 2"),
        (".idx", lambda c: c.__setitem__(17, 6), UnsupportedError, "dtype code 6"),
        (".idx", lambda c: c.__delitem__(slice(-8, None)), DamagedError, "shorter"),
        (".idx", lambda c: c.__setitem__(18, 200), DamagedError, "shorter"),
        (".idx", lambda c: c.__setitem__(34, 3), UnsupportedError, "don't follow each other"),
        (".idx", lambda c: c.__setitem__(-8, 1), DamagedError, "don't cover"),
        (".bin", lambda c: c.append(0), DamagedError, "should hold 4 uint16 tokens"),
    ],
)
def test_a_megatron_index_that_does_not_fit_is_refused(tmp_path, open_source, suffix, change, error, message):
    write_megatron(tmp_path / "corpus", [[1, 2], [3, EOS]], documents=[0, 1, 2])
    damage(tmp_path / f"corpus{suffix}", change)
    with pytest.raises(error, match=message):
        open_source(f"megatron:{tmp_path / 'corpus'}")


def test_half_a_megatron_data_set_is_not_found(tmp_path, open_source):
    (tmp_path / "corpus.bin").write_bytes(b"\x00\x00")
    with pytest.raises(NotFoundError, match=r"corpus\.idx"):
        open_source(f"megatron:{tmp_path / 'corpus'}")


def test_data_sets_of_save_to_disk_and_their_splits(tmp_path, open_source):
    rows = datasets.Dataset.from_dict({"body": ["one", "two"]})
    rows.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    flat = open_source(f"hf:{tmp_path / 'flat'}", field="body")
    assert make_tokenizer().decode(ids(flat)) == "one<eos>two<eos>"
    assert flat.document_lengths().tolist() == [4, 4]
    assert flat.fingerprint["num_rows"] == 2
    test = open_source(f"hf:{tmp_path / 'splits'}", field="body", split="test")
    assert ids(test) == ids(flat)[4:]
    with pytest.raises(NotFoundError, match="no split 'dev', only train, test"):
        open_source(f"hf:{tmp_path / 'splits'}", split="dev")
    with pytest.raises(DamagedError, match="no field 'text', only body"):
        open_source(f"hf:{tmp_path / 'flat'}")


def test_the_same_rows_saved_anew_are_the_same_data(tmp_path, open_source):
    rows = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    rows.save_to_disk(tmp_path / "once")
    rows.save_to_disk(tmp_path / "twice", num_shards=2)
    assert open_source(f"hf:{tmp_path / 'once'}").fingerprint == open_source(f"hf:{tmp_path / 'twice'}").fingerprint


def test_a_data_set_that_is_nowhere_is_not_found(tmp_path, open_source, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="no data set"):
        open_source(f"hf:{tmp_path / 'absent'}")


def test_files_of_a_forced_kind_have_any_suffix(tmp_path, open_source):
    (tmp_path / "data.json").write_text('{"content": "a"}\n{"content": "b"}\n')
    assert ids(open_source(f"jsonl:{tmp_path / 'data.json'}", field="content"))[1::2] == [EOS, EOS]
    (tmp_path / "page.html").write_text("<p>")
    assert len(ids(open_source(f"text:{tmp_path / 'page.html'}"))) == 4


def test_options_become_sources():
    plain = SourceSpec("files", ("a", "b.txt"), "files")
    assert parse_sources(["a", "b.txt"]) == (plain,)
    assert parse_sources(["a", "tokens:x/c.bin", "b.txt"]) == (plain, SourceSpec("tokens", ("x/c.bin",), "c.bin"))
    with pytest.raises(UsageError, match="no kind of source is called 'token'"):
        parse_sources(["token:a.bin"])
    with pytest.raises(UsageError, match=r"two sources are called 'a\.bin'"):
        parse_sources(["tokens:x/a.bin", "tokens:y/a.bin"])


def test_a_table_names_weighted_sources(tmp_path):
    table = tmp_path / "mix.toml"
    table.write_text(
        '[[source]]\npath = "web"\nweight = 0.7\n[[source]]\nkind = "hf"\npath = "org/books"\nname = "books"\n'
        'weight = 0.3\nsplit = "validation"\nfield = "body"\n'
    )
    assert parse_sources([str(table)]) == (
        SourceSpec("files", (str(tmp_path / "web"),), "web", 0.7),
        SourceSpec("hf", ("org/books",), "books", 0.3, field="body", split="validation"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "should hold"),
        ("seed = 1\n[[source]]\npath = 'a'", "should hold"),
        ("[[source]]\nkind = 'text'", "path must be there"),
        ("[[source]]\npath = 'a'\nkind = 'zip'", "no kind of source is called 'zip'"),
        ("[[source]]\npath = 'a'\nwieght = 1", "unknown key wieght"),
        ("[[source]]\npath = 'a'\nweight = 0", "not a positive number"),
        ("[[source]]\npath = 'a'\nweight = nan", "not a positive number"),
        ("[[source", "mix.toml"),
    ],
)
def test_a_table_that_says_nothing_clear_is_refused(tmp_path, text, message):
    (tmp_path / "mix.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        parse_sources([str(tmp_path / "mix.toml")])


def test_a_missing_table_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="no such file"):
        parse_sources([f"{tmp_path}/mix.toml"])


@pytest.mark.parametrize("name", ["a[1].txt", "a*.txt", "a?.txt", "d[1]/a.txt", ".hidden/a.txt", "b (1), {2}.txt"])
def test_a_file_whose_name_would_be_a_pattern_is_read_and_no_other(tmp_path, monkeypatch, open_source, name):
    monkeypatch.chdir(tmp_path)
    for other in ("a1.txt", "ab.txt", "d1/a.txt", name):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text(other)
    corpus = open_source(name)
    assert make_tokenizer().decode(ids(corpus)[:-1]) == name
    spec = SourceSpec("stream", (name,), "stream", lanes=1)
    assert next(iter(open_stream(spec)))["text"] == name


def test_a_folder_with_the_name_of_a_reader_is_that_folder(tmp_path, monkeypatch, open_source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere.txt").write_text("not asked for")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("asked for")
    assert make_tokenizer().decode(ids(open_source("hf:text"))[:-1]) == "asked for"
    assert [row["text"] for row in open_stream(SourceSpec("stream", ("text",), "text"))] == ["asked for"]
    for opened in (lambda: open_source("hf:json"), lambda: open_stream(SourceSpec("stream", ("json",), "json"))):
        with pytest.raises(NotFoundError, match="no data set json: there is no such folder"):
            opened()
    (tmp_path / "d[1]").mkdir()
    with pytest.raises(UnsupportedError, match="are patterns to it"):
        open_source("hf:d[1]")
