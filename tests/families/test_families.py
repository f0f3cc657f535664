"""Model families, each by its tiny random model: import equals from_pretrained, export gives back what was stored."""

from pathlib import Path

import pytest

from tests.families.roundtrip import roundtrip
from tests.families.tiny import build

FAMILIES = {
    "llama": "as stored",
    "mistral": "as stored",
    "mixtral": "converted, renamed",
    "qwen2": "as stored",
    "qwen2_moe": "converted",
    "qwen2_5_vl": "renamed",
    "qwen3": "as stored",
    "qwen3_moe": "converted",
    "gemma2": "tied",
    "gemma3": "renamed, tied",
    "gemma3_text": "tied",
    "phi3": "as stored",
    "gpt2": "tied",
    "gpt_neox": "renamed",
    "falcon": "tied",
    "olmo2": "as stored",
    "olmoe": "converted",
    "granite": "as stored",
    "deepseek_v3": "converted",
    "gpt_oss": "as stored",
    "cohere": "tied",
    "mamba2": "as stored",
    "starcoder2": "tied",
    "bert": "tied",
    "roberta": "tied",
    "albert": "tied",
    "t5": "tied",
    "vit": "renamed",
    "clip": "as stored",
    "whisper": "tied",
    "llava": "renamed",
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_comes_in_and_goes_out_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    assert roundtrip(model, tmp_path) == FAMILIES[model_type]
