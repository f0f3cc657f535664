"""config.json bombs: refused by their numbers, before transformers builds what they ask for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.main import run

BOMBS: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 1e9},
    {"num_labels": 10**9},
    {"hidden_size": 10**12},
    {"vocab_size": 10**15},
    {"num_attention_heads": 10**9},
    {"text_config": {"num_hidden_layers": 10**9}},
    {"vision_config": {"depths": [2, 2, 10**9]}},
    {"model_type": "mixtral", "num_local_experts": 10**9},
    {"configuration_files": ["config.4.0.0.json"]},
]
ODD: list[dict[str, Any]] = [
    {"num_attention_heads": 0},
    {"num_key_value_heads": 0},
    {"hidden_size": -5},
    {"num_hidden_layers": "a billion"},
    {"num_hidden_layers": None},
    {"num_hidden_layers": [10]},
    {"hidden_act": "exec"},
    {"rope_parameters": {"rope_type": "nonsense"}},
    {"architectures": ["PreTrainedModel"]},
    {"architectures": ["__builtins__"]},
    {"architectures": ["pipeline"]},
    {"architectures": "LlamaForCausalLM"},
    {"architectures": [5]},
    {"model_type": "no such model"},
    {"model_type": 5},
    {"quantization_config": "yes"},
    {"quantization_config": {"quant_method": {"a": 1}}},
]


def change_configs(victim: Path, change: dict[str, Any]) -> None:
    for path in (victim / "hub" / "config.json", victim / "ckpt" / "tiny" / "hf" / "config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


def commands(victim: Path) -> list[list[str]]:
    root = ["--root", str(victim / "ckpt"), "--quiet"]
    config = ["--config", str(victim / "ckpt" / "tiny" / "hf")]  # or it is told by its digest
    return [
        ["import-hf", str(victim / "hub"), "x", *root],
        ["import-hf", str(victim / "hub"), "y", "--engine", "transformers", *root],
        ["export", "tiny", *config, *root],
        ["export", "tiny", "--engine", "torch", "--out", str(victim / "out"), *config, *root],
    ]


@pytest.mark.parametrize("change", BOMBS, ids=str)
def test_a_bomb_is_refused_at_once(victim: Path, change: dict[str, Any]) -> None:
    change_configs(victim, change)
    began = time.process_time()
    assert [run(command) for command in commands(victim)] == [4] * 4
    assert time.process_time() - began < 20
    assert sorted(path.name for path in (victim / "ckpt").iterdir()) == ["tiny"]


@pytest.mark.parametrize("change", ODD, ids=str)
def test_an_odd_config_is_an_error_of_ours(
    victim: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    change_configs(victim, change)
    for command in commands(victim)[:1] + commands(victim)[2:3]:
        assert run(command) in (0, 1, 3, 4)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "raw", ["[" * 200_000, '{"a":' * 200_000, "5", "[]", "null", "{", '{"hidden_size": 9e999}', ""]
)
def test_a_config_that_is_no_object(victim: Path, raw: str) -> None:
    for path in (victim / "hub" / "config.json", victim / "ckpt" / "tiny" / "hf" / "config.json"):
        path.write_text(raw)
    assert [run(command) for command in commands(victim)] in ([4] * 4, [1, 1, 1, 1], [1, 4, 1, 4])


def test_a_config_that_was_changed_is_refused_whatever_it_says(victim: Path) -> None:
    change_configs(victim, {"num_hidden_layers": 10**9})
    assert run(["export", "tiny", "--root", str(victim / "ckpt")]) == 4


def test_the_trainer_refuses_a_bomb_too(victim: Path) -> None:
    from ckptool import DamagedError
    from tests.trainer.tiny import make_data, tiny_config
    from trainer.train import train

    change_configs(victim, {"num_hidden_layers": 10**9})
    make_data(victim / "ckpt" / "text")
    with pytest.raises(DamagedError, match="num_hidden_layers is 1000000000"):
        train(tiny_config(victim / "ckpt", init_from="tiny"))
