"""Ranks that were told different things refuse to train together; several nodes may have several config files."""

import pytest

from ckptool import UsageError
from tests.spawn import run_ranks
from tests.trainer.tiny import tiny_config
from trainer.train import train


def told(rank, root, changes):
    """What the second rank's changes lead to, on each rank."""
    try:
        train(tiny_config(root, **(changes if rank else {})))
    except UsageError as error:
        return str(error)
    return ""


# The first would bend the training without a word, the second and third leave the ranks waiting for each other.
@pytest.mark.parametrize(
    ("changes", "named"),
    [({"grad_clip": 2.0}, "--grad-clip is 2.0"), ({"save_every": 1}, "--save-every is 1"), ({"tp": 2}, "--tp is 2")],
)
def test_an_option_that_differs_is_named_on_every_rank(root, changes, named):
    first, second = run_ranks(2, told, root, changes)
    assert first == second
    assert first.startswith(f"{named} on rank 1 (") and " on rank 0 (" in first
    assert not (root / "metrics.jsonl").exists()


def told_nan(rank, root):
    try:
        train(tiny_config(root, lr=float("nan")))
    except UsageError as error:
        return str(error)


def test_what_is_wrong_on_all_ranks_is_no_difference(root):
    assert set(run_ranks(2, told_nan, root)) == {"--lr nan is no number to train with"}
