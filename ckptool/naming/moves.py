"""Does a transform only move elements, and which ones go where? Found out by running it on meta tensors.

Stacking, concatenating and cutting are then planned as copies of boxes, a piece at a time. Whatever computes, reorders
or changes a tensor in place is not followed, and the whole group is converted in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptool.core.box import Box
from ckptool.core.moves import Move
from ckptool.core.parts import Transform
from ckptool.core.tensors import TensorEntry

_aten = torch.ops.aten


def find_moves(transform: Transform, sources: Mapping[str, TensorEntry]) -> dict[str, tuple[Move, ...]] | None:
    """For each target that `transform` makes of `sources`, the moves that make it; None when it does more than move."""
    given = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        for name, entry in sources.items()
    }
    followed = _Followed(given)
    try:
        with followed:
            made = transform(given)
    except Exception:  # a transform that needs values fails on meta tensors, in ways of its own
        return None
    moves = {name: followed.moves_of(tensor) for name, tensor in made.items()}
    found = {name: tuple(of) for name, of in moves.items() if of is not None}
    return found if len(found) == len(moves) and not followed.changes_in_place else None


class _Followed(TorchDispatchMode):
    """Follows the elements of the `given` tensors through the operations that only move them."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.changes_in_place = False
        # With the tensors themselves, so that no other one gets the id of one that is gone.
        self._known: dict[int, tuple[torch.Tensor, list[Move]]] = {}
        for name, tensor in given.items():
            whole = Box.whole(tensor.shape)
            self._known[id(tensor)] = (tensor, [Move(name, whole, whole)])

    def moves_of(self, tensor: torch.Tensor) -> list[Move] | None:
        known = self._known.get(id(tensor))
        return known[1] if known else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.changes_in_place |= func._schema.is_mutable
        rule = _RULES.get(func.overloadpacket)
        if rule is not None:
            outputs = made if isinstance(made, list | tuple) else [made]
            inputs = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            moves = [self.moves_of(tensor) for tensor in inputs]
            is_one_dtype = len({tensor.dtype for tensor in (*inputs, *outputs)}) == 1
            if is_one_dtype and all(of is not None for of in moves):
                names = [argument.name for argument in func._schema.arguments]
                arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
                for output, of in zip(outputs, rule(inputs, moves, outputs, arguments), strict=True):
                    if of is not None:
                        self._known[id(output)] = (output, of)
        return made


#: (inputs, their moves, outputs, arguments by name) -> the moves of each output, None where it is not followed.
_Rule = Callable[[Sequence[torch.Tensor], Sequence[Any], Sequence[torch.Tensor], Mapping[str, Any]], list[Any]]


def _same(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    """The same elements in the same order, in a shape that differs in sizes of one at most."""
    (tensor,), (of,), (made,) = inputs, moves, outputs
    if tensor.shape == made.shape:
        return [of]
    if [size for size in tensor.shape if size != 1] != [size for size in made.shape if size != 1]:
        return [None]
    whole = Move("", Box.whole(made.shape), Box.whole(tensor.shape))
    return [[Move(move.source, move.source_box, whole.source_of(move.box)) for move in of]]


def _stack(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    dim = arguments.get("dim", 0) % outputs[0].dim()
    return [[_widened(move, dim, i) for i, of in enumerate(moves) for move in of]]


def _widened(move: Move, dim: int, index: int) -> Move:
    """The move into a tensor that has one dim more: `dim`, along which it is at `index`."""
    offsets, sizes = list(move.box.offsets), list(move.box.sizes)
    offsets.insert(dim, index)
    sizes.insert(dim, 1)
    return Move(move.source, move.source_box, Box(tuple(offsets), tuple(sizes)))


def _cat(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    if any(tensor.dim() != outputs[0].dim() for tensor in inputs):  # torch lets an empty 1-d tensor pass
        return [None]
    dim = arguments.get("dim", 0) % outputs[0].dim()
    start, joined = 0, []
    for tensor, of in zip(inputs, moves, strict=True):
        joined += [_shifted(move, dim, start) for move in of]
        start += tensor.shape[dim]
    return [joined]


def _split(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    (tensor,), (of,) = inputs, moves
    dim = arguments.get("dim", 0) % tensor.dim()
    start, parts = 0, []
    for made in outputs:
        parts.append(_cut(tensor, of, dim, start, made.shape[dim]))
        start += made.shape[dim]
    return parts


def _slice(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    (tensor,), (of,), (made,) = inputs, moves, outputs
    if arguments.get("step", 1) != 1:
        return [None]
    dim = arguments.get("dim", 0) % tensor.dim()
    start, _, _ = slice(arguments.get("start"), None).indices(tensor.shape[dim])
    return [_cut(tensor, of, dim, start, made.shape[dim])]


def _select(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    (tensor,), (of,) = inputs, moves
    dim = arguments["dim"] % tensor.dim()
    return [_row(tensor, of, dim, arguments["index"] % tensor.shape[dim])]


def _unbind(inputs: Any, moves: Any, outputs: Any, arguments: Any) -> list[Any]:
    (tensor,), (of,) = inputs, moves
    dim = arguments.get("dim", 0) % tensor.dim()
    return [_row(tensor, of, dim, index) for index in range(len(outputs))]


def _row(tensor: torch.Tensor, of: list[Move], dim: int, index: int) -> list[Move]:
    """The moves into the part of a tensor that is at `index` along `dim`, which the part lacks."""
    return [
        Move(move.source, move.source_box, Box(_without(move.box.offsets, dim), _without(move.box.sizes, dim)))
        for move in _cut(tensor, of, dim, index, 1)
    ]


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])


def _cut(tensor: torch.Tensor, of: list[Move], dim: int, start: int, size: int) -> list[Move]:
    """The moves into the part of a tensor that begins at `start` along `dim`."""
    shape = tensor.shape
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    window = Box(offsets, tuple(size if d == dim else n for d, n in enumerate(shape)))
    parts = [(move, move.box.intersect(window)) for move in of]
    cut = [Move(move.source, move.source_of(part), part) for move, part in parts if part is not None]
    return [_shifted(move, dim, -start) for move in cut]


def _shifted(move: Move, dim: int, by: int) -> Move:
    offsets = tuple(offset + by if d == dim else offset for d, offset in enumerate(move.box.offsets))
    return Move(move.source, move.source_box, Box(offsets, move.box.sizes))


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((_aten.clone, _aten.detach, _aten.alias, _aten.lift_fresh), _same),
    **dict.fromkeys((_aten.squeeze, _aten.unsqueeze, _aten.view, _aten._unsafe_view, _aten.expand), _same),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split),
    _aten.stack: _stack,
    _aten.cat: _cat,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.unbind: _unbind,
}
