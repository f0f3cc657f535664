"""Text to tokens: every document once, cached, and damaged or empty inputs named."""

import errno
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckptool import DamagedError, NotFoundError, StorageError, UnsupportedError, find_source_files
from tests.trainer.tiny import make_tokenizer
from trainer.corpus import open_corpus
from trainer.sources.spec import SourceSpec


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def said():
    return []


@pytest.fixture
def corpus_of(hf_folder, tmp_path, said):
    """Open paths as a corpus, cached below tmp_path."""
    return lambda *paths: open_corpus(files(*paths), hf_folder, tmp_path, said.append)


def files(*paths):
    return SourceSpec("files", tuple(map(str, paths)), "files")


def text_of(corpus):
    return make_tokenizer().decode(corpus.tokens().read(0, corpus.num_tokens).tolist())


def test_every_kind_of_file_in_a_folder_is_read_in_name_order(tmp_path, corpus_of):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.py").write_text("x = 1\ny = 2\n")
    (folder / "sub" / "a.txt").write_text("one")
    (folder / "a.jsonl").write_text('{"text": "two", "id": 1}\n{"text": "three", "id": 2}\n')
    pq.write_table(pa.table({"text": ["four", None, "", "five"]}), folder / "c.parquet")
    (folder / "ignored.bin").write_bytes(b"\x00")
    (folder / ".hidden.txt").write_text("secret")
    (folder / "d.txt").write_text("")
    assert text_of(corpus_of(folder)) == "two<eos>three<eos>x = 1\ny = 2\n<eos>four<eos>five<eos>one<eos>"


def test_paths_may_be_files_globs_and_folders_in_the_order_given(tmp_path):
    for name in ("a.txt", "b.txt", "notes.rst"):
        (tmp_path / name).write_text(name)
    found = find_source_files("files", (str(tmp_path / "notes.rst"), str(tmp_path / "*.txt")))
    assert [(file.name, file.builder) for file in found] == [
        ("notes.rst", "text"),
        ("a.txt", "text"),
        ("b.txt", "text"),
    ]


def test_tokens_are_made_once_and_found_again_wherever_the_folder_lies(tmp_path, corpus_of, said):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("hello")
    first = corpus_of(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    again = corpus_of(tmp_path / "moved")
    assert again == first
    assert len([line for line in said if line.startswith("tokenizing")]) == 1
    (tmp_path / "moved" / "a.txt").write_text("hallo")
    assert corpus_of(tmp_path / "moved").fingerprint["files"] != first.fingerprint["files"]
    assert list((tmp_path / ".data-cache").glob(".*.partial")) == []


def test_small_vocabularies_take_two_bytes_a_token(tmp_path, corpus_of):
    (tmp_path / "a.txt").write_text("hello")
    corpus = corpus_of(tmp_path / "a.txt")
    [part] = corpus.parts
    assert (part.dtype, corpus.num_tokens, part.path.stat().st_size) == ("uint16", 6, 12)


def test_a_cache_of_another_size_is_damaged(tmp_path, corpus_of):
    (tmp_path / "a.txt").write_text("hello")
    corpus = corpus_of(tmp_path / "a.txt")
    path = corpus.parts[0].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=path.name):
        corpus_of(tmp_path / "a.txt")


def test_bytes_that_are_not_utf8_are_said(tmp_path, corpus_of, said):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert text_of(corpus_of(tmp_path / "a.txt")) == "caf\ufffd<eos>"
    assert any("1 documents hold U+FFFD" in line for line in said)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"body": "x"}\n', "has no field 'text', only body"),
        ("a.jsonl", '{"text": 3}\n', "no string but int"),
        ("a.jsonl", '{"text": \n', "can't read"),
        ("a.parquet", "not parquet", "can't read"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path, corpus_of, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DamagedError, match=message) as caught:
        corpus_of(tmp_path / name)
    assert name in str(caught.value)
    assert not list((tmp_path / ".data-cache").glob("[!.]*"))


def test_a_path_without_text_is_an_error(tmp_path, corpus_of):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NotFoundError, match="no training text"):
            corpus_of(path)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for folder in ("empty", "absent"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UnsupportedError, match=f"{folder} holds no tokenizer"):
            open_corpus(files(tmp_path / "a.txt"), tmp_path / folder, tmp_path / "root", print)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "hf")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UnsupportedError, match="end-of-text"):
        open_corpus(files(tmp_path / "a.txt"), tmp_path / "hf", tmp_path, print)


def test_the_fingerprint_is_plain_json(tmp_path, corpus_of):
    (tmp_path / "a.txt").write_text("hello")
    fingerprint = corpus_of(tmp_path / "a.txt").fingerprint
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert set(fingerprint) == {
        *("kind", "field", "files", "num_files", "num_bytes", "tokenizer"),
        *("num_tokens", "num_documents", "document_lengths", "tokens"),
    }


def test_rows_without_text_and_files_named_twice_are_said(tmp_path, corpus_of, said):
    rows = ['{"text": "one"}', '{"content": "two"}', '{"text": null}', '{"text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert corpus_of(tmp_path / "a.jsonl").num_documents == 1
    assert "note: 3 of 4 rows hold no text and are left out" in said
    said.clear()
    (tmp_path / "b.txt").write_text("three")
    assert corpus_of(tmp_path, tmp_path / "b.txt").num_documents == 3
    assert "note: 1 files are named more than once, and are read each time" in said


def test_files_that_do_not_fit_together_are_refused_with_the_reason(tmp_path, corpus_of):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "two"}\n')
    with pytest.raises(DamagedError, match=r"Couldn't cast content: string .*column names don't match"):
        corpus_of(tmp_path)


@pytest.mark.parametrize("num_bytes", [30, 3_000_000])
def test_a_cache_that_gives_back_zeros_is_damaged(tmp_path, corpus_of, num_bytes):
    (tmp_path / "a.txt").write_text("x" * num_bytes)
    corpus = corpus_of(tmp_path / "a.txt")
    [part] = corpus.parts
    corpus_of(tmp_path / "a.txt")
    with part.path.open("r+b") as file:
        file.seek(num_bytes)  # half of it: a token takes two bytes
        file.write(bytes(num_bytes))
    with pytest.raises(DamagedError, match="holds other tokens than were written there"):
        corpus_of(tmp_path / "a.txt")


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_full_disk_is_not_blamed_on_the_data(tmp_path, corpus_of, monkeypatch, is_wrapped):
    def full(*arguments, **options):
        error = OSError(errno.ENOSPC, "No space left on device")
        if not is_wrapped:
            raise error
        raise datasets.exceptions.DatasetGenerationError("An error occurred") from error

    monkeypatch.setattr(datasets, "load_dataset", full)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(StorageError, match="no space left on the disk of the token cache"):
        corpus_of(tmp_path / "a.txt")
