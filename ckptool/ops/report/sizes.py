"""Bytes by module: the largest modules taken apart until there are enough rectangles to look at."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptool.core.checkpoint import Manifest

#: Rectangles of the treemap.
MAX_MODULES = 250


@dataclass(frozen=True)
class ModuleSize:
    """A module, or a tensor of its own, and all that is below it."""

    name: str
    num_bytes: int
    num_tensors: int


@dataclass
class _Node:
    name: str
    num_bytes: int = 0
    num_tensors: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def module_sizes(manifest: Manifest, limit: int = MAX_MODULES) -> tuple[ModuleSize, ...]:
    """Modules that share out all bytes, largest first, at most `limit` or those of the top level; ties count once."""
    top = _tree({fqn: entry.num_bytes for fqn, entry in manifest.tensors.items() if fqn not in manifest.ties})
    shown = [node for node in top.children.values() if node.num_bytes]
    heap = [(-node.num_bytes, number, node) for number, node in enumerate(shown)]
    heapq.heapify(heap)
    done: list[_Node] = []
    number = len(heap)
    while heap:
        _, _, node = heapq.heappop(heap)
        parts = [child for child in node.children.values() if child.num_bytes]
        own_bytes = node.num_bytes - sum(part.num_bytes for part in parts)
        if parts and own_bytes:  # a tensor may have the name of a module
            parts.append(_Node(node.name, own_bytes, 1))
        if not parts or len(heap) + len(done) + len(parts) > limit:
            done.append(node)
            continue
        for part in parts:
            number += 1
            heapq.heappush(heap, (-part.num_bytes, number, part))
    sizes = [ModuleSize(node.name, node.num_bytes, node.num_tensors) for node in done]
    return tuple(sorted(sizes, key=lambda module: (-module.num_bytes, module.name)))


def _tree(num_bytes: Mapping[str, int]) -> _Node:
    top = _Node("")
    for fqn, size in num_bytes.items():
        node = top
        node.num_bytes += size
        for end in [i for i, letter in enumerate(fqn) if letter == "."] + [len(fqn)]:
            name = fqn[:end]
            node = node.children.setdefault(name, _Node(name))
            node.num_bytes += size
            node.num_tensors += 1
    return top
