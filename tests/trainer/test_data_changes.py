"""Data that changed under a run is refused with what changed, or accepted with a reason; several sources are mixed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptool import DamagedError, DataPosition, MismatchError, UnsupportedError
from ckptool.cli.main import run as run_command
from ckptool.core.history import UNKNOWN, history_of
from ckptool.core.order_v1 import unit_index
from ckptool.ops.data_edit import write_position
from ckptool.ops.data_show import show_position
from ckptool.ops.data_verify import verify_position
from tests.trainer.tiny import SEQ_LEN, make_tokenizer, read_lines, run
from trainer.data import UNITS, prepare


@pytest.fixture(scope="module")
def trained(pristine, tmp_path_factory) -> Path:
    """Three steps of six units."""
    root = tmp_path_factory.mktemp("trained") / "root"
    shutil.copytree(pristine, root)
    run(root, steps=3)
    return root


@pytest.fixture
def root(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "root"))


def position_of(checkpoint: Path) -> DataPosition:
    return DataPosition.from_json((checkpoint / "data_position.json").read_text(), str(checkpoint))


def append_a_file(text: Path) -> None:
    (text / "zz.txt").write_text("a document more, and long enough for some windows of tokens")


def swap_two_files(text: Path) -> None:
    first, last = (text / "00.txt").read_text(), (text / "29.txt").read_text()
    (text / "00.txt").write_text(last)
    (text / "29.txt").write_text(first)


def edit_one_byte(text: Path) -> None:
    (text / "07.txt").write_text((text / "07.txt").read_text().replace("x", "w", 1))


CHANGES = {append_a_file: "files.num_files 30 -> 31", swap_two_files: "files.files", edit_one_byte: "files.tokens"}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_with_the_difference(root, change):
    change(root / "text")
    with pytest.raises(MismatchError, match=CHANGES[change]) as raised:
        run(root, steps=4)
    assert "--accept-data-change REASON" in raised.value.hint


def test_changed_data_is_accepted_with_a_reason_that_later_checkpoints_keep(root):
    before = position_of(root / "step-3")
    append_a_file(root / "text")
    run(root, steps=4, accept_data_change="more was written")
    run(root, steps=5)
    after = position_of(root / "step-5")
    (edit,) = after.edits
    assert (edit.action, edit.reason, edit.unit, edit.step) == ("accept-data-change", "more was written", 18, 3)
    assert "files.num_files 30 -> 31" in edit.changes
    assert after.units(range(18)) == before.units(range(18))
    assert {unit.epoch for unit in after.units(range(18, 30))} == {1}
    assert after.history == history_of(enumerate(after.units(range(30))))


def test_a_checkpoint_proves_its_history_over_a_changed_batch_size(root):
    run(root, steps=5, global_batch_size=4)
    position = position_of(root / "step-5")
    assert (position.consumed, position.num_steps) == (26, 5)
    assert position.history == history_of(enumerate(position.units(range(26))))


class Version1(DataPosition):
    """A position that is written as older versions did."""

    def to_json(self) -> str:
        segment = self.segment
        record = {"consumed": self.consumed, "global_batch_size": self.global_batch_size, "order_version": 1}
        record |= {"num_units": segment.sources[0].num_units, "fingerprint": dict(segment.sources[0].fingerprint)}
        return json.dumps(record | {"seq_len": segment.seq_len, "seed": segment.seed})


def test_a_checkpoint_with_a_record_of_version_1_goes_on_in_its_own_order(root):
    now = position_of(root / "step-3")
    old = replace(now.segment, order_version=1)
    write_position(root / "step-3", Version1((old,), now.stretches, UNKNOWN))
    run(root, steps=4)
    after = position_of(root / "step-4")
    num_units = old.sources[0].num_units
    assert (after.consumed, after.num_steps, after.cursor()[:2]) == (24, 4, [24, 1])
    assert [unit.index for unit in after.units(range(24))] == [unit_index(0, 0, num_units, i) for i in range(24)]
    assert verify_position("step-4", root=root, replay=True).notes


def test_the_text_of_the_next_units_is_that_of_the_files(root, capsys):
    facts = show_position("step-3", root=root, num_next=5, text=True).details
    everything = "".join(f.read_text() + "<eos>" for f in sorted((root / "text").iterdir()))
    assert [unit["text"] for unit in facts["next_units"]] == [
        window(everything, unit["index"]) for unit in facts["next_units"]
    ]
    assert run_command(["data", "show", "step-3", "--root", str(root), "--text", "--next", "1"]) == 0
    assert " ".join(facts["next_units"][0]["text"].split()) in capsys.readouterr().out
    shutil.rmtree(root / ".data-cache")
    with pytest.raises(UnsupportedError, match="are not in"):
        show_position("step-3", root=root, text=True)


@pytest.mark.parametrize("unit", ["pack", "document"])
def test_the_text_of_packed_rows_and_of_documents_is_what_the_trainer_reads(pristine, tmp_path, unit):
    """Inputs and the last label of each document; the trainer's own rows are the other half of the comparison."""
    root = Path(shutil.copytree(pristine, tmp_path / "root"))
    run(root, steps=1, unit=unit, seq_len=200)
    facts = show_position("step-1", root=root, num_next=6, text=True).details
    prepared = prepare((str(root / "text"),), unit, 200, root / "step-1" / "hf", root, print)
    units = UNITS[unit](prepared[0].corpus, 200)
    for shown in facts["next_units"]:
        row = units.row(shown["index"])
        ends = np.flatnonzero(row.labels == 256)
        documents = np.split(row.inputs, ends + 1)
        expected = "".join(make_tokenizer().decode(part.tolist()) + "<eos>" * (len(part) > 0) for part in documents)
        assert shown["text"] == expected
        assert shown["text"].count("says") == len(ends) == (1 if unit == "document" else shown["text"].count("<eos>"))
    assert unit == "document" or max(shown["text"].count("<eos>") for shown in facts["next_units"]) > 1


def test_the_text_of_token_files_is_read_where_they_lie(pristine, tmp_path):
    root = Path(shutil.copytree(pristine, tmp_path / "root"))
    tokens = [256 if n % 40 == 39 else n * 7 % 250 for n in range(2000)]
    np.array(tokens, np.uint16).tofile(root / "tokens.bin")
    run(root, steps=1, data=(f"tokens:{root / 'tokens.bin'}",))
    facts = show_position("step-1", root=root, num_next=3, text=True).details
    for shown in facts["next_units"]:
        start = shown["index"] * SEQ_LEN
        assert shown["text"] == make_tokenizer().decode(tokens[start : start + SEQ_LEN])
    (root / "tokens.bin").rename(root / "moved.bin")
    with pytest.raises(DamagedError, match=r"tokens.bin should hold 2000 tokens"):
        show_position("step-1", root=root, text=True)


def window(everything: str, index: int) -> str:
    """A token is a byte, but for the end of a text."""
    tokens = re.findall(r"<eos>|.", everything, re.DOTALL)
    return "".join(tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN])


def mixture(root: Path, **weights: float) -> tuple[str, ...]:
    """Two sources, `text` and `other`, in a TOML file."""
    (root / "other.txt").write_text("quite another text, " * 20)
    text = ""
    for name, path in [("text", root / "text"), ("other", root / "other.txt")]:
        text += f'[[source]]\nname = "{name}"\npath = "{path}"\n'
        text += f"weight = {weights[name]}\n"
    (root / "mix.toml").write_text(text)
    return (str(root / "mix.toml"),)


def test_sources_are_mixed_by_their_weights_and_resume_in_their_places(pristine, tmp_path):
    root = Path(shutil.copytree(pristine, tmp_path / "root"))
    data = mixture(root, text=3, other=1)
    run(root, steps=2, data=data)
    run(root, steps=4, data=data, global_batch_size=5)
    position = position_of(root / "step-4")
    assert position.consumed == 22
    assert position.segment.slots == (256, 768)
    assert {unit.source for unit in position.units(range(22))} == {"text", "other"}
    assert position.history == history_of(enumerate(position.units(range(22))))
    assert [line["units"] for line in read_lines(root / "samples.jsonl")][2:] == [
        list(range(12, 17)),
        list(range(17, 22)),
    ]
    with pytest.raises(MismatchError, match="slots of other 256 -> 512; slots of text 768 -> 512"):
        run(root, steps=5, data=mixture(root, text=1, other=1))
    run(root, steps=5, data=mixture(root, text=1, other=1), accept_data_change="more of the other")
    assert [segment.slots for segment in position_of(root / "step-5").segments] == [(256, 768), (512, 512)]
