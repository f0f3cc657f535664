"""Write docs/reference/model-families.md from what tests prove: `make docs`. A test holds that the page is current."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

from ckptool.naming.dialects import dialect_names, load_dialect
from tests.families.sweep import RESULTS

PAGE = Path(__file__).with_name("model-families.md")

HEAD = """# Model families

<!-- Written by generate_families.py from tests/families/sweep.json; `python -m tests.families.sweep` renews that. -->

Every model that transformers knows is named by transformers' own rules, and is refused when a name doesn't fit. The
table has every `model_type` of transformers {version}. For those that *work* a test has shown it: a tiny model of
random weights is saved by transformers, imported, and compared bit for bit with `from_pretrained`; exported, it is what
was saved. {num_works} of {num_all} work, {num_refused} are refused, and {num_untried} were not tried, since no tiny
model of them could be built; the same rules hold for these. {num_parts} are no models: transformers has no class that
loads them alone. They are parts of other types, or other names for them.

*As stored*: names and tensors are the same on the Hub and in the model. *Renamed*: other names. *Converted*: several
tensors of the Hub are one in the model, as experts are, or one is cut into several. *Tied*: a tensor of two names is
kept once.

The last column names the other libraries whose own names for the model are understood, and can be exported to.

| model_type | result | also named by |
|---|---|---|
"""


def render() -> str:
    """The whole page as Markdown."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    results = record["results"]
    counts = collections.Counter(result for result, _ in results.values())
    dialects = [load_dialect(name) for name in dialect_names()]
    rows = [
        f"| `{kind}` | {_said(*results[kind])} | {', '.join(d.name for d in dialects if kind in d.tables)} |"
        for kind in sorted(results)
    ]
    head = HEAD.format(
        version=record["transformers"],
        num_all=len(results),
        num_works=counts["works"],
        num_refused=counts["refused"],
        num_untried=counts["not tried"],
        num_parts=counts["no model"],
    )
    return head + "\n".join(rows) + "\n"


def _said(result: str, detail: str) -> str:
    if result == "no model":
        return "no model of its own"
    detail = re.sub(r"([|<>`*_\[\]])", r"\\\1", detail)
    return f"works: {detail}" if result == "works" else f"{result}: {detail}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
