"""Turning a saved model into the quantised form that its makers publish."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FLOAT8 = torch.float8_e4m3fn
MAX_FLOAT8 = 448.0


def expanded(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The scale of every element."""
    wide = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return wide[..., : shape[-2], : shape[-1]]


def to_float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit weight and its scales; a block at the edge may be smaller than the others."""
    rows, columns = weight.shape
    grid = torch.zeros(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            grid[i, j] = part.float().abs().max() / MAX_FLOAT8
    return (weight.float() / expanded(grid, weight.shape, block)).to(FLOAT8), grid


def quantise_folder(
    folder: Path, block: tuple[int, int] | None, quantisation: dict[str, Any], suffix: str = "_scale_inv"
) -> dict[str, torch.Tensor]:
    """Store a folder's linear layers as float8, all scales in a second shard. Returns the weights that they stand for.

    `block` None makes one scale a tensor.
    """
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ("proj" in name or ".experts." in name):
            size = block or (tensor.shape[0], tensor.shape[1])
            weights[name], grid = to_float8(tensor, size)
            scales[name + suffix] = grid if block else grid.reshape(())
            plain[name] = (weights[name].float() * expanded(grid, tensor.shape, size)).to(tensor.dtype)
        else:
            weights[name] = plain[name] = tensor
    save_shards(folder, [weights, scales])
    set_config(folder, quantization_config=quantisation)
    return plain


def save_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
