"""The pages that people read, their shell blocks, and the scripts beside them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

TOP = Path(__file__).parents[2]
PAGES = [TOP / "README.md", TOP / "CHANGELOG.md", *sorted((TOP / "docs").rglob("*.md"))]
NOT_RUN = "# not run in tests: "


def shell_blocks(page: Path) -> list[str]:
    """The ```bash blocks of a page that tests run: all but those whose first line says why not."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if not block.startswith(NOT_RUN)]


def load_script(name: str) -> ModuleType:
    """Import a script of the repository, which is no package, by its path."""
    path = TOP / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
