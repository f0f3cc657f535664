"""The shell blocks of the docs run as they are, a page at a time, with a tiny model under the real one's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.docs.pages import PAGES, TOP, shell_blocks
from tests.tiny_models import llama

HUB_ID = "HuggingFaceTB/SmolLM2-135M"
COMMIT = "0" * 40
WITH_BLOCKS = [page for page in PAGES if shell_blocks(page)]

#: The page that most people read; each takes half a minute, so the others run with the slow tests.
QUICK = {"README.md"}


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache, as huggingface_hub lays it out, in which HUB_ID is a tiny Llama with a tokenizer of bytes."""
    cache = tmp_path_factory.mktemp("hub-cache")
    folder = cache / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    llama(vocab_size=len(names), max_position_embeddings=256).save_pretrained(snapshot)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return cache


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow) for page in WITH_BLOCKS],
    ids=lambda page: str(page.relative_to(TOP)),
)
def test_the_shell_blocks_of_a_page_run(page: Path, hub_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "my-text").mkdir()
    (tmp_path / "my-text" / "page.md").write_text(page.read_text(encoding="utf-8") * 4)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CKPTOOL_")} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_CACHE": str(hub_cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = "\n".join(shell_blocks(page))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


def test_the_pages_have_blocks_to_run() -> None:
    assert {page.name for page in WITH_BLOCKS} > QUICK
