"""Matrix products of the blocks in 8-bit floats, by torchao's `Float8Linear`.

A layer's input, weight and gradient are scaled and cast to 8 bits before each of its three products, whose results are
in the dtype of the input (Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433). Weights, their
gradients and the optimizer stay as they are, and so do the names and dtypes in checkpoints. FSDP2 gathers weights in
the compute dtype: with torchao's gather in 8 bits the weights would be tensors of its own class, in checkpoints too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from ckptool import DataPosition, UnsupportedError
from trainer.config import TrainConfig
from trainer.model import named_blocks

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

#: The kernels take matrices whose dims are multiples of this.
MULTIPLE = 16

#: The first GPUs with 8-bit products: NVIDIA's Ada and Hopper, AMD's MI300.
_FIRST_CAPABILITY = (9, 4) if torch.version.hip else (8, 9)


def use_fp8(model: PreTrainedModel, recipe: str, device: torch.device, pad_tokens: bool) -> None:
    """Make the linear layers inside the blocks of a meta model compute in 8 bits, but for those of `is_convertible`.

    With `pad_tokens`, a micro-batch may have any number of tokens, for some memory. On a CPU the products are emulated.
    Raises UnsupportedError where the GPU has no such products, torchao is absent, or no layer can be converted.
    """
    if device.type == "cuda":
        check_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    settings = _torchao_config(recipe, pad_tokens, emulate=device.type == "cpu")
    from torchao.float8 import convert_to_float8_training

    expert_counts = _expert_counts(model)
    for block in named_blocks(model).values():
        convert_to_float8_training(
            block, module_filter_fn=lambda module, _: is_convertible(module, expert_counts), config=settings
        )
    if not any(hasattr(module, "linear_mm_config") for module in model.modules()):
        raise UnsupportedError(
            f"--fp8 {recipe}: {type(model).__name__} has no linear layer that 8 bits fit: inside of a block, with dims "
            f"that are multiples of {MULTIPLE}",
            hint="--fp8 none",
        )
    if recipe == "rowwise":
        # What a compiled block recomputes must round as in the forward pass, or NaN follows: pytorch/pytorch#150859.
        torch._inductor.config.emulate_precision_casts = True


def has_odd_tokens(seq_len: int, position: DataPosition) -> bool:
    """True when micro-batches may have a number of tokens that the kernels don't take. The gradient of a weight is a
    product over tokens; rows have `seq_len` of them or a multiple of 64, and as many as it likes in a loader's items.
    """
    kinds = [source.fingerprint.get("kind") for source in position.segment.sources]
    return seq_len % MULTIPLE != 0 or "loader" in kinds


def check_gpu(name: str, capability: tuple[int, int]) -> None:
    """Raises UnsupportedError for a GPU without 8-bit products."""
    if capability < _FIRST_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, _FIRST_CAPABILITY))
        raise UnsupportedError(
            f"--fp8: {name} has no 8-bit matrix products: compute capability {found}, and {needed} is needed",
            hint="--fp8 none",
        )


def is_convertible(module: nn.Module, expert_counts: frozenset[int]) -> bool:
    """True for a linear layer whose dims the kernels take, and that is no router: its outputs are not one for each
    expert."""
    return (
        isinstance(module, nn.Linear)
        and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
        and module.out_features not in expert_counts
    )


def notes(config: TrainConfig, device: torch.device) -> list[str]:
    """What a user who asked for 8 bits should know of this run."""
    if config.fp8 == "none":
        return []
    if device.type == "cpu":
        return [f"note: --fp8 {config.fp8} is emulated on a CPU: it rounds as a GPU would, and is slower than without"]
    if not config.compile:
        return ["note: --fp8 without --compile is slow: casts and scales are kernels of their own"]
    return []


def _torchao_config(recipe: str, pad_tokens: bool, emulate: bool) -> Float8LinearConfig:
    """torchao's settings for a recipe. Raises UnsupportedError without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise UnsupportedError(f"--fp8 {recipe} needs torchao", hint="pip install 'ckptool[fp8]'") from error
    return replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=pad_tokens, emulate=emulate)


def _expert_counts(model: PreTrainedModel) -> frozenset[int]:
    """All numbers that a config gives about experts but their sizes, how many there are among them."""
    settings = model.config.get_text_config().to_dict()
    return frozenset(
        value
        for name, value in settings.items()
        if "expert" in name and not name.endswith("_size") and isinstance(value, int)
    )
