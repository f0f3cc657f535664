"""What a run writes about itself stays readable, whatever became of the run before."""

import pytest

from ckptool import StorageError
from tests.trainer.tiny import read_lines
from trainer.metrics import Log
from trainer.shared_root import _leave_probe


@pytest.mark.parametrize("before", ["", '{"attempt": "a", "step": 1, "units": [0]}\n', '{"attempt": "a", "st'])
def test_a_line_that_was_cut_off_swallows_no_other(tmp_path, before):
    (tmp_path / "samples.jsonl").write_text(before)
    for step in (2, 3):
        Log(tmp_path, rank=0).samples("b", step, [step])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 2 + bool(before) and lines[0].startswith(before[:-1])
    (tmp_path / "samples.jsonl").write_text("\n".join(lines[-2:]))
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [2, 3]


def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"samples\.jsonl: No space left on device"):
        Log(tmp_path, rank=0).samples("a", 1, [0])


def test_a_root_that_can_not_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/root: Not a directory"):
        _leave_probe(tmp_path / "file" / "root")
