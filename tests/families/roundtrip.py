"""One family's proof: import equals from_pretrained, export equals what was stored, every name accounted for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ckptool import engine
from ckptool.core.cuts import cut_tensor, stream_tensor
from ckptool.core.provenance import Provenance
from ckptool.naming.meta_model import build_meta_model
from ckptool.naming.transformers_names import plan_export
from ckptool.ops.inputs import open_input
from ckptool.planner import plan_conversion
from tests.memory_sink import MemorySink, MemorySource


def roundtrip(model: PreTrainedModel, folder: Path) -> str:
    """Of a model that `from_pretrained` has made of `folder`, and the folder: what fired on the way ("renamed",
    "converted", "tied"). Raises when anything differs."""
    stored = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    opened = open_input(folder, None)
    source, names = opened.source, opened.names
    plan = plan_conversion("import", source.manifest, names, "memory", cut=cut_tensor, piece_bytes=1 << 20)
    live = MemorySink([entry for item in plan.items for entry in item.targets])
    engine.run(plan.parts, source, live)
    for name, tensor in model.state_dict().items():
        ours = live.tensors[names.ties.get(name, name)]
        assert ours.dtype == tensor.dtype and torch.equal(ours, tensor), (
            f"import of {name} differs from from_pretrained"
        )
    provenance = Provenance(
        "test", naming=names.naming, ties=dict(names.ties), stored_tied_names=names.stored_tied_names
    )
    chosen = _chosen(live.tensors, provenance)
    again = MemorySource(chosen)
    back_names = plan_export(build_meta_model(folder), again.manifest.tensors, provenance, None)
    back_plan = plan_conversion("export", again.manifest, back_names, "memory", cut=stream_tensor, piece_bytes=1 << 20)
    back = MemorySink([entry for item in back_plan.items for entry in item.targets])
    engine.run(back_plan.parts, again, back)
    expected = {name: t for name, t in stored.items() if name not in names.extra}
    assert set(back.tensors) == set(expected), sorted(set(back.tensors) ^ set(expected))[:6]
    for name, tensor in expected.items():
        assert torch.equal(back.tensors[name], tensor), f"export of {name} differs from what was stored"
    source.close()
    converted = any(group.transform is not None for group in names.groups)
    renamed = any(group.transform is None and group.sources != tuple(group.targets) for group in names.groups)
    happened = {"converted": converted, "renamed": renamed, "tied": bool(names.ties)}
    fired = [word for word, is_so in happened.items() if is_so]
    return ", ".join(fired) or "as stored"


def _chosen(live: dict[str, torch.Tensor], provenance: Provenance) -> dict[str, torch.Tensor]:
    """The live tensors under the tied names that the source stored."""
    chosen = dict(live)
    for canonical in set(provenance.ties.values()):
        aliases = [alias for alias, target in provenance.ties.items() if target == canonical]
        for name in (canonical, *aliases):
            if name in provenance.stored_tied_names:
                chosen[name] = live[canonical]
            else:
                chosen.pop(name, None)
    return chosen
