from __future__ import annotations

import click
import pytest

from ckptool.cli._options import Size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("32MiB", 32 * 2**20),
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("1.5kB", 1500),
        ("2TiB", 2 * 2**40),
        ("4096", 4096),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert Size().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "5 XB", "-1GB", "1e9", "5GBit", "0", "0.2B", "nan"])
def test_anything_else_is_a_usage_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a size\. Write|less than one byte"):
        Size().convert(text, None, None)
