"""What a run tells of itself: the held-out loss, slow ranks, a profile."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from ckptool import UsageError
from tests.trainer.processes import start_ranks
from tests.trainer.test_exactly_once import write_config
from tests.trainer.tiny import DEVICE, at_most, make_data, run, tiny_config
from trainer.config import parse_profile
from trainer.profiling import covered, kind_of, table
from trainer.stopwatch import PHASES, Stopwatch
from trainer.stragglers import RankTimes, find_stragglers, probe_seconds


def test_the_held_out_loss_falls_and_changes_no_training(root):
    held_out = make_data(root / "held-out")
    lines = run(root, steps=4, eval_data=(str(held_out),), eval_every=2, eval_units=20)
    assert [line["eval_loss"] is None for line in lines] == [True, False, True, False]
    assert lines[3]["eval_loss"] < lines[1]["eval_loss"]

    shutil.rmtree(root / "step-4")
    (root / "metrics.jsonl").unlink()
    assert [line["loss"] for line in run(root, steps=4)] == [line["loss"] for line in lines]


def test_held_out_data_that_is_too_short_is_named(root):
    (root / "short.txt").write_text("a word")
    with pytest.raises(UsageError, match="--eval-data: files: 7 tokens; one window needs 17"):
        run(root, steps=1, eval_data=(str(root / "short.txt"),))


def times(rank, host="a", **seconds):
    return RankTimes(rank, host, 1.0, {**dict.fromkeys(PHASES, 0.1), "probe": 0.01} | seconds, 0)


def test_a_rank_that_is_slow_alone_is_named_with_its_host():
    ranks = [times(0), times(1), times(2, "b", data=0.4), times(3, "c", probe=0.02)]
    assert find_stragglers(ranks, 1.5) == [
        "slow: rank 2 on b: data took 0.4000 s, the median is 0.1000 s",
        "slow: rank 3 on c: probe took 0.0200 s, the median is 0.0100 s",
    ]
    assert find_stragglers(ranks, 5.0) == []


def test_a_rank_that_sleeps_is_named_while_training(root):
    config = write_config(root, steps=3)
    last = max(2, at_most(3)) - 1
    ranks = start_ranks(last + 1, root, ["--config", str(config), "--log-every", "1"], ("sleeps", last, 0))
    assert not any(rank.wait() for rank in ranks)
    slow = [line for line in ranks[0].said.splitlines() if "data took" in line]
    assert len(slow) == 3
    assert all(line.startswith(f"slow: rank {last} on ") for line in slow)


def test_small_differences_are_no_news():
    assert find_stragglers([times(0, data=0.001), times(1, data=0.04)], 1.5) == []
    assert find_stragglers([times(0)], 1.5) == []


def test_a_rank_measures_itself():
    watch = Stopwatch()
    watch.begin(0)
    with watch.phase_of("data"):
        pass
    measured = RankTimes.measure(3, torch.device("cpu"), 1.0, watch)
    assert (measured.rank, set(measured.seconds)) == (3, {*PHASES, "probe"})
    assert 0 < probe_seconds(torch.device("cpu")) < 10


def test_a_profile_is_a_trace_and_a_table(root, capsys):
    run(root, steps=3, profile="2:1")
    trace = json.loads((root / "profile" / "steps-2-2-rank-0.json").read_text())
    assert any("aten::mm" in event.get("name", "") for event in trace["traceEvents"])
    said = capsys.readouterr().err
    assert "profile: matrix products" in said
    if DEVICE == "cpu":  # a GPU alone has nothing to send
        assert "profile: communication" in said


def test_profile_wants_two_numbers(tmp_path):
    assert parse_profile("10:3") == (10, 3)
    assert parse_profile("") == (0, 0)
    for text in ("10", "0:1", "a:b", "3:0"):
        with pytest.raises(UsageError, match="STEP:N"):
            parse_profile(text)


def test_kinds_and_unions():
    assert [
        kind_of(name) for name in ("ncclDevKernel_AllGather", "flash_fwd_kernel", "sm90_xmma_gemm", "elementwise")
    ] == [
        "communication",
        "attention",
        "matrix products",
        "other",
    ]
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert covered([]) == 0


def test_the_table_of_a_gpu_says_what_communication_hides_and_what_is_idle():
    def kernel(name, start, end):
        span = SimpleNamespace(start=start * 1e6, end=end * 1e6)
        return SimpleNamespace(name=name, device_type=DeviceType.CUDA, is_user_annotation=False, time_range=span)

    events = [kernel("ncclDevKernel_AllGather", 0, 4), kernel("sm90_gemm", 1, 4), kernel("flash_fwd", 8, 10)]
    said = [" ".join(line.split()) for line in table(events, "cuda")]
    assert said == [
        "profile: communication 4.000 s 40%",
        "profile: matrix products 3.000 s 30%",
        "profile: attention 2.000 s 20%",
        "profile: idle 4.000 s 40%",
        "75% of the communication runs beside other kernels",
    ]


def test_the_held_out_loss_is_due_at_the_end_too(tmp_path):
    config = tiny_config(tmp_path, steps=5, eval_data=("x",), eval_every=2)
    assert [step for step in range(1, 6) if config.evaluates_after(step)] == [2, 4, 5]
    assert not tiny_config(tmp_path, steps=5).evaluates_after(5)
