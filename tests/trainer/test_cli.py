"""The trainer's command line: the TOML file, the options' checks, one line for an error."""

import math
import os
import subprocess
import sys

import click
import pytest

from ckptool import NotFoundError, UsageError
from tests.trainer.tiny import run, tiny_config
from trainer.cli import command
from trainer.config import TrainConfig, read_defaults
from trainer.schedule import learning_rate

STABLE_NAMES = {
    *("--config", "--init-from", "--data", "--seq-len", "--global-batch-size", "--micro-batch-size", "--steps", "--lr"),
    *("--warmup-steps", "--schedule", "--weight-decay", "--grad-clip", "--save-every", "--root", "--resume", "--seed"),
    *("--device", "--activation-checkpointing", "--compile", "--log-every"),
}


def parse(*arguments):
    """The parameters that the command would run with."""
    context = command.make_context("trainer", list(arguments))
    return context.params


def trainer(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, **environment},
    )


def test_every_option_is_there_with_a_help_text():
    options = {name: p for p in command.params if isinstance(p, click.Option) for name in p.opts}
    assert set(options) >= STABLE_NAMES
    assert all(option.help for option in options.values())
    assert all(option.show_default for name, option in options.items() if name != "--config")


def test_options_are_exactly_the_fields_of_the_config():
    params = {p.name for p in command.params} - {"config", "more_data"}
    assert params == set(TrainConfig.__dataclass_fields__)


def test_the_file_gives_defaults_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nseq-len = 64\ndata = "text"\nschedule = "linear"\nlr = 1e-3\neval-data = "held-out"\n')
    values = parse("--config", str(file), "--seq-len", "32")
    assert (values["steps"], values["seq_len"], values["data"], values["schedule"]) == (7, 32, ("text",), "linear")
    assert (values["lr"], values["eval_data"]) == (1e-3, ("held-out",))


def test_a_switch_of_the_file_is_a_boolean_or_a_number(tmp_path):
    file = tmp_path / "run.toml"
    for value, is_on in (("true", True), ("false", False), ("1", True), ("0", False), ('"no"', False)):
        file.write_text(f"steps = 7\nasync-save = {value}\n")
        assert parse("--config", str(file))["async_save"] is is_on


@pytest.mark.parametrize(
    "line", ["lr = true", "save-every = 1.5", "save-every = true", "seed = 1.0", "steps = 2024-01-01"]
)
def test_a_value_that_the_command_line_would_refuse_is_refused_in_the_file(tmp_path, line):
    file = tmp_path / "run.toml"
    file.write_text(f"{line}\n")
    with pytest.raises((click.UsageError, UsageError)):
        parse("--config", str(file), *([] if "steps" in line else ["--steps", "1"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "unknown option stepz"),
        ("steps = ", "run.toml: "),
        ("config = 'x'", "config"),
        ("steps = 1\nsave-every = 1\nsave_every = 2", "twice"),
        ("data = ['a', 5]", "data should be a string, a number, true or false, or a list of strings"),
    ],
)
def test_a_file_with_an_unknown_key_or_bad_syntax_is_refused(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_defaults(tmp_path / "run.toml", {"steps", "save_every", "data"})
    with pytest.raises(NotFoundError):
        read_defaults(tmp_path / "other.toml", {"steps"})


def test_several_data_paths_follow_one_option_or_several():
    values = parse("--steps", "1", "--data", "a", "b", "--data", "c")
    assert (*values["data"], *values["more_data"]) == ("a", "c", "b")


def test_values_that_can_not_be_are_refused():
    for arguments in (["--steps", "0"], ["--steps", "1", "--seq-len", "0"], ["--steps", "1", "--schedule", "x"], []):
        with pytest.raises(click.UsageError):
            parse(*arguments)


def test_more_ranks_than_windows_in_a_step_are_refused(tmp_path):
    with pytest.raises(UsageError, match="7 ranks can't share a global batch of 6"):
        tiny_config(tmp_path).check(num_data_ranks=7)
    with pytest.raises(UsageError, match="no training data"):
        tiny_config(tmp_path, data=()).check(num_data_ranks=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "x"}, "--profile x: should be STEP:N"),
        ({"profile": "9:1"}, "--profile 9:1 begins after the last step, 4"),
        ({"lr": math.nan}, "--lr nan is no number"),
        ({"grad_clip": math.inf}, "--grad-clip inf is no number"),
        ({"lora_targets": "q_proj"}, "say nothing without --lora-rank"),
        ({"resume": ""}, "--resume is empty"),
        ({"init_from": ""}, "--init-from is empty"),
    ],
)
def test_bad_values_are_refused_before_anything_is_opened(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "not-there", **changes)
    assert list(tmp_path.iterdir()) == []


def test_saves_fall_on_multiples_and_on_the_end(tmp_path):
    every_4 = tiny_config(tmp_path, steps=10, save_every=4)
    assert [step for step in range(1, 11) if every_4.saves_after(step)] == [4, 8, 10]
    never = tiny_config(tmp_path, steps=10, save_every=0)
    assert [step for step in range(1, 11) if never.saves_after(step)] == [10]


def test_saves_fall_on_minutes_too(tmp_path):
    config = tiny_config(tmp_path, save_every_minutes=0.5)
    assert [config.saves_at_age(seconds) for seconds in (0, 29, 30, 31)] == [False, False, True, True]
    assert not tiny_config(tmp_path, save_every_minutes=0).saves_at_age(1e9)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.1464466094067262]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule, rates):
    computed = [learning_rate(n, peak=1.0, warmup_steps=2, steps=6, schedule=schedule) for n in range(6)]
    assert computed == pytest.approx(rates)


def test_help_needs_no_torch():
    code = "import sys, trainer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_store_that_is_gone_is_an_error_and_not_a_warning_with_frames_of_cpp():
    code = """if True:
        from trainer import cli
        cli._quiet_libraries()
        from torch.distributed import DistNetworkError, TCPStore
        server = TCPStore("127.0.0.1", 0, is_master=True)
        client = server.clone()
        del server
        try:
            client.check(["a"])
        except DistNetworkError as error:
            print("gone")
    """
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, env=environment)
    assert done.stdout == "gone\n"
    assert "frame #" not in done.stderr


def test_an_error_is_one_line_a_hint_and_its_exit_code(tmp_path):
    done = trainer("--steps", "1", "--data", str(tmp_path), "--root", str(tmp_path), "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: nothing to resume under {tmp_path}, and no --init-from",
        "hint: ckptool import-hf MODEL, then --init-from with its name",
    ]
    (tmp_path / "run.toml").write_text("stepz = 1")
    assert trainer("--config", str(tmp_path / "run.toml")).returncode == 2
