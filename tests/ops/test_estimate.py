"""`ckptool estimate`: sizes read off a config, what fits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptool
from ckptool.cli.main import run
from ckptool.errors import CkptoolError, DamagedError, NotFoundError, UnsupportedError, UsageError
from ckptool.ops.estimate import estimate, read_sizes
from tests.tiny_models import SIZES, llama, mixtral


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().config.save_pretrained(tmp_path)
    return tmp_path


def test_sizes_are_those_of_the_model(folder: Path) -> None:
    model = llama()
    sizes, num_parameters = read_sizes(folder)
    assert num_parameters == sizes.num_parameters == model.num_parameters()
    assert sizes.block_parameters == (sum(p.numel() for p in model.model.layers[0].parameters()),) * 2
    assert (sizes.hidden, sizes.query, sizes.key, sizes.mlp, sizes.vocab) == (48, 48, 16, 80, 97)
    assert (sizes.num_norms, sizes.has_head_norms) == (2, False)


def test_norms_of_heads_and_further_norms_are_counted(tmp_path: Path) -> None:
    transformers.Qwen3Config(**SIZES).save_pretrained(tmp_path / "qwen3")
    transformers.Gemma2Config(**SIZES).save_pretrained(tmp_path / "gemma2")
    assert read_sizes(tmp_path / "qwen3")[0].has_head_norms
    assert read_sizes(tmp_path / "gemma2")[0].num_norms == 4


def test_a_token_goes_through_its_experts_only(tmp_path: Path) -> None:
    mixtral().config.save_pretrained(tmp_path)
    sizes, num_parameters = read_sizes(tmp_path)
    assert num_parameters == mixtral().num_parameters()
    assert (sizes.mlp, sizes.routed) == (2 * SIZES["intermediate_size"], 2 * SIZES["hidden_size"])


def test_tensor_parallel_ranks_hold_their_part_of_what_the_plan_splits(folder: Path) -> None:
    whole, _ = read_sizes(folder)
    part, num_parameters = read_sizes(folder, tp=2)
    assert num_parameters == whole.num_parameters
    num_norm_parameters = 2 * SIZES["hidden_size"]
    assert part.block_parameters[0] - num_norm_parameters == (whole.block_parameters[0] - num_norm_parameters) // 2
    assert (part.query, part.mlp, part.hidden) == (whole.query // 2, whole.mlp // 2, whole.hidden)


def test_more_gpus_need_less_each(folder: Path) -> None:
    peaks = [[way["peak_bytes"] for way in estimate(str(folder), num_gpus=n).details["ways"]] for n in (1, 8)]
    (ddp, _, _, fsdp, _, _), (ddp_8, _, _, fsdp_8, _, _) = peaks
    assert ddp == ddp_8
    assert fsdp > fsdp_8


def test_what_is_kept_falls_with_checkpointing_and_with_compiled_blocks(folder: Path) -> None:
    eager, compiled = (
        [way["activations_bytes"] for way in estimate(str(folder), seq_len=4096, compiled=c).details["ways"][3:]]
        for c in (False, True)
    )
    assert eager == sorted(eager, reverse=True)
    assert compiled[0] < eager[0]


def test_the_fewest_gpus_are_the_first_that_fit(folder: Path) -> None:
    limit = estimate(str(folder), num_gpus=3).details["ways"][3]["needed_bytes"]
    way = estimate(str(folder), gpu_bytes=limit).details["ways"][3]
    assert (way["fits"], way["fewest_gpus"]) == (False, 3)


def test_a_checkpoint_has_its_config_beside_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "step-7" / "hf").mkdir(parents=True)
    (folder / "config.json").rename(tmp_path / "step-7" / "hf" / "config.json")
    assert estimate(str(tmp_path / "step-7")).details["num_blocks"] == 2


@pytest.mark.parametrize("name", ["base", "step-7", "latest", "step-7/hf"])
def test_a_checkpoint_is_found_by_its_name_under_the_root(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder / "runs"
    for step in ("base", "step-7"):
        state = {"model": {"w": torch.ones(2)}}
        ckptool.save(state, root / step, provenance=ckptool.Provenance("0", step=7), side_folder=folder)
    assert estimate(name, root=root).details["num_blocks"] == 2
    assert run(["estimate", name, "--root", str(root), "--quiet"]) == 0
    monkeypatch.setenv("CKPTOOL_ROOT", str(root))
    assert run(["estimate", name, "--quiet"]) == 0


def test_of_a_name_that_is_nowhere_the_hint_says_that_the_root_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError) as caught:
        estimate("step-99", root=tmp_path)
    assert caught.value.hint.startswith(f"{tmp_path} has no checkpoint step-99; ")
    with pytest.raises(NotFoundError, match="no complete step-N checkpoint"):
        estimate("latest", root=tmp_path)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / ".metadata").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"step-7 holds no config\.json"):
        estimate("step-7", root=tmp_path)


def test_the_command_says_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", str(folder), "--gpus", "2", "--gpu-memory", "24GB", "--seq-len", "64"]) == 0
    assert "FSDP2, checkpointing" in capsys.readouterr().out
    assert run(["estimate", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [way["fits"] for way in answer["ways"]] == [True] * 6
    assert run(["estimate", str(folder), "--quiet", "--gpu-memory", "1GB"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_gpus": 6, "tp": 4}, UsageError),
        ({"num_gpus": 5, "tp": 5}, UsageError),
        ({"num_gpus": 8, "global_batch_size": 4}, UsageError),
        ({"seq_len": 0}, UsageError),
        ({"param_dtype": "int8"}, UsageError),
        ({"loss": "hinge"}, UsageError),
        ({"optimizer": "sgd"}, UsageError),
        ({"optimizer": "adamw8bit", "optimizer_dtype": "fp32"}, UsageError),
    ],
)
def test_settings_that_can_not_be_are_refused(folder: Path, options: dict[str, Any], error: type[CkptoolError]) -> None:
    with pytest.raises(error) as caught:
        estimate(str(folder), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (None, NotFoundError, "no config.json"),
        ("{", DamagedError, "config.json"),
        ("[]", DamagedError, "not a JSON object"),
        ('{"model_type": "nobody-knows"}', UnsupportedError, "can't read its config"),
        ('{"model_type": "mine", "auto_map": {}}', UnsupportedError, "own code"),
        ('{"model_type": "llama", "num_hidden_layers": 100000}', DamagedError, "more than any model has"),
        ('{"model_type": "vit", "architectures": ["ViTModel"]}', UnsupportedError, "no decoder"),
        ('{"model_type": "llama", "hidden_size": "wide"}', UnsupportedError, "hidden_size"),
    ],
)
def test_what_is_no_config_of_a_decoder_is_refused(
    tmp_path: Path, config: str | None, error: type[CkptoolError], words: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=words) as caught:
        estimate(str(tmp_path))
    assert "\n" not in str(caught.value)
