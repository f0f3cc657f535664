"""Write docs/reference/model-families.md from what tests prove: `make docs`. A test holds that the page is current."""

from __future__ import annotations

from pathlib import Path

from ckptool.naming.dialects import dialect_names, load_dialect
from tests.families.test_families import FAMILIES

PAGE = Path(__file__).with_name("model-families.md")

HEAD = """# Model families

<!-- Written by generate_families.py from tests/families; change the tests instead. -->

Every model that transformers knows is named by transformers' own rules, and is refused when a name doesn't fit. For the
families below a test holds more: a tiny model of random weights and unequal sizes is saved by transformers, imported,
and compared bit for bit with `from_pretrained`; exported, it is what was saved.

*As stored*: names and tensors are the same on the Hub and in the model. *Renamed*: other names. *Converted*: several
tensors of the Hub are one in the model, as experts are, or one is cut into several. *Tied*: a tensor of two names is
kept once.

The last column names the other libraries whose own names for the model are understood, and can be exported to."""


def render() -> str:
    """The whole page as Markdown."""
    dialects = [load_dialect(name) for name in dialect_names()]
    kinds = sorted({*FAMILIES, *(kind for dialect in dialects for kind in dialect.tables)})
    rows = [
        f"| `{kind}` | {FAMILIES.get(kind, 'not tested')} | {', '.join(d.name for d in dialects if kind in d.tables)} |"
        for kind in kinds
    ]
    return "\n".join([HEAD, "", "| model_type | Hub to model | also named by |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
