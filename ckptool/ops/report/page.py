"""The page itself. All of it is in one file: styles, Bokeh's script, and the charts as data.

Names in a checkpoint may be anything. Jinja escapes what becomes HTML, charts travel as JSON that no browser takes for
a script, and a Content-Security-Policy names the two scripts that may run by their hashes and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from importlib.resources import files
from typing import Any

from ckptool import __version__
from ckptool.core.text import one_line
from ckptool.errors import UnsupportedError
from ckptool.ops.report.contents import Contents


def check_libraries() -> None:
    """Raise UnsupportedError when what draws the charts is not installed."""
    try:
        for name in ("bokeh", "jinja2", "squarify"):
            importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"report: {error.name} is needed to draw", hint="pip install 'ckptool[report]'"
        ) from error


def render(contents: Contents) -> str:
    """The page as HTML."""
    from bokeh.core.types import ID
    from bokeh.embed import json_item
    from bokeh.resources import INLINE
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from ckptool.ops.report.sections import sections

    environment = Environment(loader=PackageLoader("ckptool.ops.report", "template"), autoescape=True)
    environment.finalize = lambda value: one_line(value) if type(value) is str else value
    # Bokeh's models refer to those before them.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    shown = list(sections(contents))
    items: dict[str, Any] = {}
    for section in shown:
        for number, chart in enumerate(section.charts):
            target = f"{section.anchor}-{number}"
            items[target] = json_item(chart.figure, ID(target))
    library = INLINE.js_raw[0]
    script = files("ckptool.ops.report").joinpath("template/page.js").read_text("utf-8")
    subject = contents.subject
    return environment.get_template("page.html").render(
        title=str(subject.run or subject.checkpoint),
        checkpoint=str(subject.checkpoint) if subject.checkpoint else "",
        sections=shown,
        notes=contents.notes,
        items=items,
        version=__version__,
        scripts=[Markup(text) for text in (library, script)],
        hashes=[_csp_hash(text) for text in (library, script)],
    )


def _csp_hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
