"""Model FLOPs utilization (MFU): the arithmetic that the model needs, by what the GPU could do in the time.

Chowdhery et al., PaLM (2022), appendix B: 6 N + 12 L H S floating-point operations for a token of training, with N
parameters (a tied one counts once), L layers, H features and S tokens a sequence. Recomputation doesn't count, and a
parameter that isn't trained needs 4 instead of 6: it has no gradient of its own.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

#: Dense bf16 operations a second, from the makers' data sheets; by a part of the device's name, the first that fits.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of one device; None for those that the table doesn't know, and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def flops_per_token(model: nn.Module, config: PretrainedConfig, seq_len: int) -> float | None:
    """Operations of the forward and backward pass for one token of a sequence of `seq_len`.

    Of experts only those count that a token visits: `num_experts_per_tok` of all of a layer. None for a config that
    doesn't say how many layers and features there are.
    """
    text = config.get_text_config()
    if not (getattr(text, "num_hidden_layers", None) and getattr(text, "hidden_size", None)):
        return None
    all_experts = next((n for n in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(text, n)), "")
    share = getattr(text, "num_experts_per_tok", 1) / getattr(text, all_experts) if all_experts else 1.0
    weights = sum(
        parameter.numel() * (6 if parameter.requires_grad else 4) * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
    )
    return weights + 12 * text.num_hidden_layers * text.hidden_size * seq_len
