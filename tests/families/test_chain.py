"""The whole way of a family: imported, loaded by stock `dcp.load` into a model that two ranks built on meta and sharded
with FSDP2, logits equal to those of `from_pretrained`; exported, every tensor and side file as at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import ckptool
from tests.families.test_families import FAMILIES
from tests.families.tiny import build
from tests.spawn import run_ranks
from trainer.model import materialize, named_blocks, ties_of

#: One of each kind: plain, tied, experts that are fused, an encoder and its decoder.
QUICK = ("llama", "gemma2", "mixtral", "t5")


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Something that the model can compute with: the same for every build of it."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 90, (2, 12), generator=generator)
    config: Any = model.config
    if config.model_type == "clip":
        side = config.vision_config.image_size
        return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, side, side, generator=generator)}
    if model.main_input_name == "pixel_values":
        side = config.image_size
        return {"pixel_values": torch.randn(2, 3, side, side, generator=generator)}
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        features = torch.randn(2, config.num_mel_bins, frames, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens}
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        made: Any = model.eval()(**inputs_of(model))
    return made.logits_per_image if "logits_per_image" in made else made.logits


def load_sharded(rank: int, root: str, names: list[str]) -> list[str]:
    """The names of the models whose logits differ from those of `from_pretrained`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [name for name in names if not computes_the_same(Path(root, name), mesh)]


def computes_the_same(path: Path, mesh: Any) -> bool:
    config = transformers.AutoConfig.from_pretrained(path / "hf")
    model_class: Any = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.float32)
    ties = ties_of(model)
    for name, block in named_blocks(model).items():
        if not any(tied.startswith(f"{name}.") for tied in (*ties, *ties.values())):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, torch.device("cpu"), ties)
    assert all(model.get_parameter(alias) is model.get_parameter(name) for alias, name in ties.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    expected = model_class.from_pretrained(path.with_name(f"{path.name}-source"), dtype="auto")
    return bool(torch.equal(logits_of(model), logits_of(expected)))


def goes_all_the_way(names: list[str], root: Path) -> None:
    for name in names:
        source = root / f"{name}-source"
        build(name).save_pretrained(source)
        (source / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
        (source / "chat_template.jinja").write_text("{{ messages }}")
        ckptool.import_hf(str(source), name, root=root)
    assert run_ranks(2, load_sharded, str(root), names, limit_seconds=60 + 30 * len(names)) == [[], []]
    for name in names:
        source, out = root / f"{name}-source", Path(ckptool.export(name, root=root).target)
        files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
        assert files == {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
        for file in files:
            if file.suffix != ".safetensors":
                assert (out / file).read_bytes() == (source / file).read_bytes(), file
                continue
            stored, found = load_file(source / file), load_file(out / file)
            assert stored.keys() == found.keys()
            assert all(torch.equal(tensor, found[tensor_name]) for tensor_name, tensor in stored.items()), name


def test_a_few_families(tmp_path: Path) -> None:
    goes_all_the_way(list(QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_each_other_family(name: str, tmp_path: Path) -> None:
    goes_all_the_way([name], tmp_path)
