"""Does this model keep apart the documents of a packed row? Tried on the model itself, before the first step."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ckptool import UnsupportedError

_DOCUMENT_TOKENS = 8

#: Share of what an open view of the first document changes that may remain: rounding, not attention.
_TOLERATED = 0.05


def check_documents_apart(model: PreTrainedModel, device: torch.device) -> None:
    """Raises UnsupportedError when a document's logits depend on the document before it in a packed row.

    `position_ids` that begin again at 0 are how transformers is told of documents; models that mix tokens by other
    means than attention (state space, linear attention) or build their own mask may take no notice. All ranks call
    this: a sharded model's forward is collective.
    """
    was_training = model.training
    model.eval()
    try:
        # Not compiled: the shapes here would make compiled blocks give up on fixed ones.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            apart, joined = (_influence(model, device, is_packed) for is_packed in (True, False))
    except TypeError as error:
        raise _refused(model) from error
    finally:
        model.train(was_training)
    if not apart <= _TOLERATED * joined:
        raise _refused(model)


def _influence(model: PreTrainedModel, device: torch.device, is_packed: bool) -> float:
    """How much the logits of one document change with the document before it."""
    vocab_size = model.config.get_text_config().vocab_size
    tokens = (torch.arange(3 * _DOCUMENT_TOKENS, device=device) * 7919 + 17) % vocab_size
    first, other, last = tokens.split(_DOCUMENT_TOKENS)
    rows = torch.stack([torch.cat([first, last]), torch.cat([other, last])])
    positions = torch.arange(_DOCUMENT_TOKENS, device=device).repeat(2, 2)
    options = {"position_ids": positions} if is_packed else {}
    logits = model(input_ids=rows, use_cache=False, **options).logits[:, _DOCUMENT_TOKENS:].float()
    return (logits[0] - logits[1]).norm().item()


def _refused(model: PreTrainedModel) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__.removeprefix('FSDP')} lets the documents of a packed row see each other",
        hint="--unit document keeps them apart in rows of their own; --unit window joins them",
    )
