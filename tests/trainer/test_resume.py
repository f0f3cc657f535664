"""A resumed run is the run that was never interrupted, and what can't be resumed is refused with its reason.

Field reports 20 (losses and rates bit-equal), 21 (the groups' fields come back), 25 and 26 (no wrong place to begin).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool import DamagedError, MismatchError, NotFoundError, TargetExistsError, UsageError
from tests.trainer.processes import kill_after_step, start_ranks
from tests.trainer.test_exactly_once import run_on, write_config
from tests.trainer.tiny import make_base, read_lines, run, surviving_samples, tiny_config
from trainer import checkpoint, parallel
from trainer.build import build_state
from trainer.metrics import Log
from trainer.origin import find_origin
from trainer.tiers import Uploads

MEASURED = ("tokens_per_second", "step_seconds", "max_memory_bytes", "checkpoint_seconds", "checkpoint_stall_seconds")
MEASURED += ("data_seconds", "forward_backward_seconds", "optimizer_seconds", "mfu")


def trained(lines):
    """What the steps computed, without what was measured around them."""
    return [{k: v for k, v in line.items() if k not in (*MEASURED, "attempt")} for line in lines]


@pytest.fixture(scope="module")
def finished(pristine, tmp_path_factory):
    """A root with a run of 10 steps, saved at 5 and 10."""
    root = tmp_path_factory.mktemp("finished") / "root"
    shutil.copytree(pristine, root)
    run(root, steps=10, save_every=5)
    return root


@pytest.fixture
def halfway(finished, tmp_path):
    """The same run as it was after 5 steps."""
    root = shutil.copytree(finished, tmp_path / "halfway")
    shutil.rmtree(root / "step-10")
    (root / "metrics.jsonl").unlink()
    return root


def test_a_resumed_run_is_bit_equal_in_loss_rate_and_norm(finished, halfway):
    whole = read_lines(finished / "metrics.jsonl")
    assert [line["step"] for line in whole] == list(range(1, 11))
    assert trained(run(halfway, steps=10, save_every=5)) == trained(whole[5:])


def test_dropout_after_a_resume_is_that_of_the_run_that_was_never_interrupted(finished, root, tmp_path):
    make_base(root / "dropping", attention_dropout=0.3)
    whole = Path(shutil.copytree(root, tmp_path / "whole"))
    settings = {"init_from": "dropping", "schedule": "constant"}
    expected = run(whole, steps=4, **settings)
    run(root, steps=2, **settings)
    assert trained(run(root, steps=4, **settings)) == trained(expected)
    assert read_lines(finished / "metrics.jsonl")[0]["loss"] != expected[0]["loss"]  # the same weights without


@pytest.mark.slow  # the one on two ranks, with a kill, is in every run
def test_three_resumes_are_the_run_that_was_never_interrupted(finished, root):
    for steps in (2, 5, 9, 10):
        lines = run(root, steps=steps, schedule="constant")
    whole = root.with_name("whole")
    shutil.copytree(finished, whole, ignore=shutil.ignore_patterns("step-*", "*.jsonl"))
    assert trained(lines) == trained(run(whole, steps=10, schedule="constant"))
    assert surviving_samples(root) == surviving_samples(whole) == list(range(60))


def test_on_two_ranks_a_kill_and_three_resumes_are_the_run_that_was_never_interrupted(root):
    """Losses, norms, rates and samples, bit for bit. The kill comes between two saves, so steps are trained again."""
    whole = Path(shutil.copytree(root, root.with_name("whole")))
    expected = run_on(2, whole, steps=14, schedule="constant")
    config = write_config(root, steps=14, save_every=7, schedule="constant")
    kill_after_step(start_ranks(2, root, ["--config", str(config)]), root / "metrics.jsonl", step=8)
    for steps in (9, 11, 14):
        lines = run_on(2, root, steps=steps, schedule="constant")
    last = {line["step"]: line for line in lines}
    assert trained([last[step] for step in range(1, 15)]) == trained(expected)
    assert len({line["attempt"] for line in lines}) == 4
    assert surviving_samples(root) == surviving_samples(whole) == list(range(84))


def test_saving_never_changes_training(finished, root):
    assert trained(run(root, steps=10, save_every=3)) == trained(read_lines(finished / "metrics.jsonl"))


def test_a_save_before_the_first_step_leaves_the_optimizer_untouched(root):
    config = tiny_config(root)
    origin = find_origin(config)
    source = ckptool.DataSource("files", 10)
    position = ckptool.DataPosition.begin([source], seq_len=16, seed=0, global_batch_size=6)
    log = Log(root, rank=0)
    with parallel.joined_ranks("cpu") as ranks:
        state = build_state(config, ranks, origin, position)
        checkpoint.load_weights(state, origin, log)
        before = {name: p.full_tensor().clone() for name, p in state.parameters().items()}
        checkpoint.save(state, origin, config, ranks, log, Uploads(config, log, ()))
        for name, parameter in state.parameters().items():
            assert torch.equal(parameter.full_tensor(), before[name])
            assert state.optimizer.state[parameter]["step"] == 0
            assert not state.optimizer.state[parameter]["exp_avg"].full_tensor().any()
    assert ckptool.find_latest(root).path.name == "step-0"


def test_the_learning_rates_in_the_optimizer_come_back(finished):
    config = tiny_config(finished, steps=20, resume="step-10")
    with parallel.joined_ranks("cpu") as ranks:
        origin = find_origin(config)
        position = ckptool.DataPosition.from_json((finished / "step-10" / "data_position.json").read_text(), "step-10")
        state = build_state(config, ranks, origin, position)
        checkpoint.resume(state, origin, Log(finished, rank=0))
    last = read_lines(finished / "metrics.jsonl")[9]
    assert [group["lr"] for group in state.optimizer.param_groups] == [last["lr"], last["lr"]]
    assert (state.step, state.position.consumed) == (10, 60)


def test_stock_dcp_load_reads_a_training_checkpoint(finished):
    manifest = ckptool.open_checkpoint(finished / "step-10")
    embedding = manifest.tensors["model.model.embed_tokens.weight"]
    name = "model.embed_tokens.weight"
    template = {
        "model": {name: torch.zeros(embedding.shape), "lm_head.weight": torch.ones(embedding.shape)},
        "optim": {"state": {name: {"exp_avg": torch.zeros(embedding.shape), "step": torch.zeros(())}}},
        "step": torch.zeros((), dtype=torch.int64),
        "data": {"cursor": torch.zeros(8, dtype=torch.int64), "record": ""},
    }
    dcp.load(template, checkpoint_id=finished / "step-10", no_dist=True)
    assert torch.equal(template["model"][name], template["model"]["lm_head.weight"])
    assert template["optim"]["state"][name]["exp_avg"].any()
    assert template["optim"]["state"][name]["step"] == 10
    assert template["step"] == 10
    assert template["data"]["cursor"].tolist() == [60, 2, 0, 0, 0, 0, 0, 0]
    record = json.loads((finished / "step-10" / "data_position.json").read_text())
    assert json.loads(template["data"]["record"]) == record


def test_a_checkpoint_carries_provenance_and_side_files(finished):
    saved = ckptool.open_checkpoint(finished / "step-5")
    base = ckptool.open_checkpoint(finished / "base")
    assert saved.provenance.source == base.provenance.source == {"id": "tiny"}
    assert (saved.provenance.step, saved.provenance.world_size, saved.provenance.mesh) == (5, 1, {"dp": 1})
    assert saved.provenance.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    files = sorted(path.name for path in (finished / "base" / "hf").iterdir())
    assert sorted(path.name for path in (finished / "step-5" / "hf").iterdir()) == files
    assert "tokenizer.json" in files
    assert all(
        (finished / "step-5" / "hf" / name).read_bytes() == (finished / "base" / "hf" / name).read_bytes()
        for name in files
    )


def test_a_half_written_newest_is_passed_over_with_its_reason_and_moved_aside(halfway, capsys):
    shutil.copytree(halfway / "step-5", halfway / "step-10")
    (halfway / "step-10" / ".metadata").unlink()
    run(halfway, steps=10, save_every=5)
    said = capsys.readouterr().err
    assert "passed over step-10: " in said
    assert f"resuming from {halfway / 'step-5'}" in said
    assert (halfway / "step-10.damaged").is_dir()
    assert ckptool.find_latest(halfway).path.name == "step-10"


def test_a_root_of_damaged_checkpoints_is_no_reason_to_begin_anew(halfway):
    (halfway / "step-5" / ".metadata").unlink()
    with pytest.raises(DamagedError, match="step-5"):
        run(halfway, steps=10)


def test_an_explicit_checkpoint_that_is_not_there_is_an_error(halfway):
    with pytest.raises(NotFoundError, match="step-7"):
        run(halfway, resume="step-7")


def test_weights_without_a_training_state_are_no_run_to_resume(root):
    with pytest.raises(UsageError, match="no training checkpoint"):
        run(root, resume="base")


def test_nothing_to_resume_and_nothing_to_begin_from_is_an_error(root):
    with pytest.raises(NotFoundError, match="nothing to resume"):
        run(root, init_from=None)


@pytest.mark.parametrize("resume", ["never", "step-5"])
def test_a_run_that_would_meet_its_own_old_checkpoints_is_refused_at_once(finished, resume):
    with pytest.raises(TargetExistsError, match="exists, and this run begins at step"):
        run(finished, resume=resume, steps=10, save_every=5)


def test_a_finished_run_has_nothing_to_do_and_says_so(finished, capsys):
    lines = read_lines(finished / "metrics.jsonl")
    assert run(finished, steps=10) == lines
    assert "nothing is left to train" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "difference"), [({"seed": 1}, "seed 0 -> 1"), ({"seq_len": 8}, "seq_len 16 -> 8")])
def test_another_order_or_window_is_refused(halfway, change, difference):
    with pytest.raises(MismatchError, match=difference):
        run(halfway, steps=10, **change)


def test_changed_data_is_refused(halfway):
    (halfway / "text" / "07.txt").write_text("something else entirely")
    with pytest.raises(MismatchError, match=r"files\.files \w+ -> \w+; files\.num_bytes \d+ -> \d+"):
        run(halfway, steps=10)


def test_a_resume_in_another_dtype_is_refused(halfway):
    with pytest.raises(MismatchError, match="was trained as float32, and --param-dtype is bf16"):
        run(halfway, steps=10, param_dtype="bf16")


def test_a_changed_batch_size_goes_on_without_a_gap(halfway):
    lines = run(halfway, steps=7, global_batch_size=4)
    assert [line["consumed"] for line in lines] == [34, 38]
    assert [line["units"] for line in read_lines(halfway / "samples.jsonl")][-2:] == [
        list(range(30, 34)),
        list(range(34, 38)),
    ]


def test_metrics_have_exactly_the_documented_fields(finished):
    assert list(read_lines(finished / "metrics.jsonl")[0]) == [
        *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "consumed"),
        *("max_memory_bytes", "checkpoint_seconds", "checkpoint_stall_seconds", "world_size", "attempt"),
        *("skipped", "eval_loss", "data_seconds", "forward_backward_seconds", "optimizer_seconds", "mfu"),
        *("rank_data_seconds", "rank_probe_seconds"),
    ]


def test_a_second_damaged_checkpoint_of_one_name_is_moved_aside_too(halfway):
    run(halfway, steps=6, save_every=6)
    for aside in ("step-6.damaged", "step-6.damaged-2"):
        (halfway / "step-6" / ".metadata").unlink()
        run(halfway, steps=6, save_every=6)
        assert (halfway / aside).is_dir()


@pytest.mark.parametrize("way", ["renamed", "ckptool.json gone"])
def test_a_checkpoint_whose_name_is_not_its_step_is_refused(halfway, way):
    newest = halfway / "step-5"
    if way == "renamed":
        newest.rename(halfway / "step-90")
    else:
        (newest / "ckptool.json").unlink()
    told = "its ckptool.json is of step 5" if way == "renamed" else "it has no ckptool.json"
    with pytest.raises(DamagedError, match=f"is not as it was saved: {told}"):
        run(halfway, steps=10)


def test_a_file_in_the_way_of_a_save_is_to_be_moved_away(halfway):
    (halfway / "step-99").write_text("a note")
    with pytest.raises(TargetExistsError) as refused:
        run(halfway, steps=10)
    assert "no checkpoint, so move it away" in refused.value.hint


def test_another_model_to_begin_from_is_not_taken_and_that_is_said(halfway, capsys):
    make_base(halfway / "other", num_hidden_layers=3)
    other = json.loads((halfway / "other" / "ckptool.json").read_text()) | {"source": {"id": "other"}}
    (halfway / "other" / "ckptool.json").write_text(json.dumps(other))
    run(halfway, steps=6, init_from="other")
    said = capsys.readouterr().err
    assert "note: --init-from other is not taken: this root has a run, of another source" in said
    run(halfway, steps=7)
    assert "is not taken" not in capsys.readouterr().err


def test_an_edited_config_is_said(halfway, capsys):
    run(halfway, steps=6)
    assert "config.json was edited" not in capsys.readouterr().err
    path = halfway / "step-6" / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    run(halfway, steps=7)
    assert "note: its hf/config.json was edited since it was saved" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["base-hf", "some-org/some-model"])
def test_a_model_that_was_not_imported_is_to_be(root, monkeypatch, name):
    make_base(root / "more" / "base")
    monkeypatch.chdir(root / "more")
    with pytest.raises(NotFoundError) as refused:
        run(root, init_from=name)
    assert refused.value.hint.startswith(f"ckptool import-hf {name} base --root {root}")
