"""Model families, each by its tiny random model: import equals from_pretrained, export gives back what was stored."""

import json
from pathlib import Path

import pytest
import transformers

from tests.families.roundtrip import roundtrip
from tests.families.sweep import RESULTS
from tests.families.tiny import build

RECORDED = json.loads(RESULTS.read_text())

#: Those that are tried in every run of the tests; `sweep.py` tries all.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "gemma2", "gemma3"),
    *("gemma3_text", "phi3", "gpt2", "gpt_neox", "falcon", "olmo2", "olmoe", "granite", "deepseek_v3", "gpt_oss"),
    *("cohere", "mamba2", "starcoder2", "bert", "roberta", "albert", "t5", "vit", "clip", "whisper", "llava"),
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_comes_in_and_goes_out_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype="auto")
    assert ["works", roundtrip(loaded, tmp_path)] == RECORDED["results"][model_type]


def test_a_part_that_is_saved_alone_is_known_by_its_class(tmp_path: Path) -> None:
    """transformers has the class beside its config only, not at its top."""
    model = build("bridgetower_vision_model")
    assert not hasattr(transformers, type(model).__name__)
    model.save_pretrained(tmp_path)
    assert ["works", roundtrip(model, tmp_path)] == RECORDED["results"]["bridgetower_vision_model"]


def test_the_record_of_the_sweep_has_every_model_type() -> None:
    """Of the transformers that it was made with; `python -m tests.families.sweep` renews it."""
    assert {result for result, _ in RECORDED["results"].values()} <= {"works", "refused", "not tried", "no model"}
    if transformers.__version__ == RECORDED["transformers"]:
        assert RECORDED["results"].keys() == set(transformers.CONFIG_MAPPING)
