"""One rank's failure ends the run on all ranks, soon, and every rank says where it began. Field report 24."""

import json
import math
import re

import pytest

from ckptool import CkptoolError, StorageError, UsageError
from tests.spawn import run_ranks
from tests.trainer.processes import start_ranks
from tests.trainer.test_exactly_once import write_config
from tests.trainer.tiny import DEVICE, read_lines, run, surviving_samples
from trainer import train
from trainer.parallel import joined_ranks


def run_two_ranks(root, how: str, rank: int, step: int, *options: str) -> tuple[list[int], list[str]]:
    """The exit codes and what the ranks said, of two ranks of which one fails after `step`."""
    ranks = start_ranks(2, root, ["--config", str(write_config(root, steps=50)), *options], (how, rank, step))
    try:
        return [one.wait() for one in ranks], [one.said for one in ranks]
    finally:
        for one in ranks:
            one.kill()


def stacks(root) -> dict[int, str]:
    return {int(path.stem.removeprefix("rank-")): path.read_text() for path in (root / "failures").glob("rank-*.txt")}


def test_a_rank_that_raises_is_named_by_every_rank(root):
    codes, said = run_two_ranks(root, "raises", 1, 2)
    assert codes == [1, 1]
    assert "failed in step 3 (forward and backward): ValueError: this rank has had enough" in said[0]
    assert "ValueError: this rank has had enough" in said[1]
    assert sorted(stacks(root)) == [0, 1]
    assert "this rank has had enough" in stacks(root)[1]
    assert "train.py" in stacks(root)[0]


def test_a_rank_that_dies_is_named_by_those_that_are_left(root):
    codes, said = run_two_ranks(root, "dies", 1, 2)
    assert codes == [1, -9]
    assert "rank 1 on" in said[0]
    if DEVICE == "cpu":
        assert "failed in step 3 (forward and backward): it died" in said[0]
    else:  # NCCL doesn't notice, so its silence is heard, and where it was at its last beat
        assert re.search(r"failed in step [123] \(.*\): (it died|nothing was heard of it for 60 s)", said[0])
    assert "train.py" in stacks(root)[0]


def test_a_rank_that_hangs_is_found_by_its_stack(root):
    codes, said = run_two_ranks(root, "hangs", 1, 3, "--hang-minutes", "0.1")
    assert codes == [1, 1]
    for lines in said:
        assert "rank 1 on" in lines
        assert "failed in step 4 (forward and backward): no progress for" in lines
        assert "mortal.py" in lines
    assert sorted(stacks(root)) == [0, 1]
    assert "in fail" in stacks(root)[1]


def told_by_rank0(rank, error):
    """What a rank learns of an error that rank 0 alone meets."""

    def find():
        raise error

    with joined_ranks(DEVICE) as ranks:
        try:
            return ranks.from_rank0(find)
        except CkptoolError as told:
            return type(told), str(told)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UsageError("so not", hint="but so"), (UsageError, "so not")),
        (OSError(28, "No space left on device", "a.txt"), (StorageError, "a.txt: No space left on device")),
        (OSError("the cable"), (StorageError, "input or output: the cable")),
        (ValueError("a bug"), (CkptoolError, "rank 0 failed: ValueError: a bug")),
    ],
)
def test_an_error_of_rank_0_is_the_same_on_every_rank(error, told):
    assert run_ranks(2, told_by_rank0, error) == [told, told]


def poison(monkeypatch, steps):
    """Make the gradients of the steps NaN."""
    forward_backward = train.forward_backward

    def poisoned(ranks, state, *rest):
        result = forward_backward(ranks, state, *rest)
        if state.step + 1 in steps:
            next(iter(state.parameters().values())).grad.fill_(math.nan)
        return result

    monkeypatch.setattr(train, "forward_backward", poisoned)


def test_a_gradient_that_is_no_number_stops_the_run(root, monkeypatch):
    poison(monkeypatch, {3})
    with pytest.raises(CkptoolError, match="step 3: the gradient norm is nan; the step was not applied"):
        run(root, steps=4)
    assert len(read_lines(root / "metrics.jsonl")) == 2


def test_or_is_skipped_with_a_record_and_the_weights_stay_whole(root, monkeypatch):
    poison(monkeypatch, {2})
    lines = run(root, steps=4, on_nonfinite="skip")
    assert [line["skipped"] for line in lines] == [False, True, False, False]
    assert lines[1]["grad_norm"] is None
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert surviving_samples(root) == list(range(24))
    json.loads((root / "metrics.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)


def test_many_skipped_steps_in_a_row_are_a_broken_run(root, monkeypatch):
    poison(monkeypatch, range(2, 100))
    with pytest.raises(CkptoolError, match=r"step 12: .* nor were the 10 before it"):
        run(root, steps=20, on_nonfinite="skip")
