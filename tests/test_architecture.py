"""What keeps the project simple: imports point one way, heavy libraries stay out, files stay short."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptool

TOP = Path(ckptool.__file__).parents[1]
PACKAGE = TOP / "ckptool"
LAYERS = (
    {"cli", "__main__"},
    {"ops"},
    {
        "planner",
        "engine",
        "formats",
        "naming",
        "hub",
        "runs",
        "distributed",
        "ranks",
        "template",
        "load_check",
        "sampler",
        "save_plan",
        "snapshot",
        "distributed_async",
        "shared_target",
    },
    {"storage"},
    {"core"},
    {"errors"},
)
EAGER_TORCH_PARTS = {
    "naming",
    "engine",
    "distributed",
    "ranks",
    "template",
    "load_check",
    "sampler",
    "save_plan",
    "snapshot",
    "distributed_async",
    "shared_target",
}
EAGER_TORCH_FILES = {
    *("formats/dcp_adapters.py", "formats/dcp_reader.py", "formats/dcp_storage_writer.py"),
    *("formats/host_memory.py", "formats/tensor_reads.py"),
}
MAX_LINES = 500
HELP_SECONDS = 0.4


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (TOP / folder).rglob("*.py"))


def imports(path: Path, *, top_only: bool = False) -> Iterator[str]:
    """The absolute names of the modules that a file imports; `top_only` leaves out those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(node)
        if not (top_only and deferred):
            pending.extend(ast.iter_child_nodes(node))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def part(path: Path) -> str:
    """The folder or module of the package that a file belongs to: `core`, `runs`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int | None:
    return next((level for level, names in enumerate(LAYERS) if name in names), None)


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part(path) for path in sources("ckptool")} - {"__init__"} <= set().union(*LAYERS)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources("ckptool"):
        here = layer(part(path))
        for name in imports(path):
            there = layer(name.split(".")[1]) if name.startswith("ckptool.") else None
            if here is not None and there is not None and there < here:
                wrong.append(f"{path.relative_to(TOP)} imports {name}")
    assert wrong == []


def test_formats_and_namings_know_nothing_of_each_other() -> None:
    wrong = [
        f"{path.relative_to(TOP)} imports {name}"
        for folder, other in (("formats", "naming"), ("naming", "formats"))
        for path in sources(f"ckptool/{folder}")
        for name in imports(path)
        if name.startswith(f"ckptool.{other}")
    ]
    assert wrong == []


def test_core_is_standard_library_only() -> None:
    outside = {
        name.split(".")[0]
        for path in sources("ckptool/core")
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert outside <= {"ckptool"}


def test_click_is_imported_by_the_command_lines_only() -> None:
    users = {path.relative_to(TOP).parts[:2] for path in sources("ckptool") if uses(path, "click")}
    assert users == {("ckptool", "cli")}


def test_torch_is_imported_at_the_top_only_where_tensors_are() -> None:
    eager = {path.relative_to(PACKAGE) for path in sources("ckptool") if uses(path, "torch", top_only=True)}
    assert {str(path) for path in eager if part(PACKAGE / path) not in EAGER_TORCH_PARTS} <= EAGER_TORCH_FILES


def test_what_must_start_quickly_has_no_torch_at_all() -> None:
    users = {part(path) for path in sources("ckptool") if uses(path, "torch")}
    assert users <= EAGER_TORCH_PARTS | {"formats", "ops"}
    for name in ("formats/dcp_metadata.py", "ops/ls.py", "ops/inspect.py"):
        assert not uses(PACKAGE / name, "torch"), name


def uses(path: Path, library: str, *, top_only: bool = False) -> bool:
    return any(name.split(".")[0] == library for name in imports(path, top_only=top_only))


def test_the_trainer_uses_the_public_door_only() -> None:
    names = {name for path in sources("trainer") for name in imports(path) if name.split(".")[0] == "ckptool"}
    assert names <= {f"ckptool.{public}" for public in ckptool.__all__} | {"ckptool"}


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources("ckptool", "trainer", "tests", "docs")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_nothing_is_left_open_in_the_code() -> None:
    marked = [
        f"{path.relative_to(TOP)}:{number}"
        for path in sources("ckptool", "trainer", "docs")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "TODO" in line or "FIXME" in line or "raise NotImplementedError" in line
    ]
    assert marked == []


def test_the_public_door_is_frozen_and_opens() -> None:
    assert ckptool.__all__ == [
        "AccessError",
        "AsyncSaver",
        "CkptoolError",
        "DamagedError",
        "DataPosition",
        "DataSource",
        "DistributedError",
        "Fed",
        "GlobalBatchSampler",
        "LockedError",
        "Manifest",
        "Mesh",
        "MismatchError",
        "Naming",
        "NotFoundError",
        "PendingSave",
        "Place",
        "Plan",
        "Provenance",
        "PushTarget",
        "Result",
        "SourceFile",
        "StorageError",
        "StorageReader",
        "StorageWriter",
        "TargetExistsError",
        "UnitLayout",
        "UnsafeError",
        "UnsupportedError",
        "UsageError",
        "__version__",
        "accept_data_change",
        "async_save",
        "copy",
        "data_diff",
        "data_edit",
        "data_import",
        "data_plan",
        "data_seek",
        "data_show",
        "data_skip",
        "data_verify",
        "diff",
        "estimate",
        "export",
        "files_record",
        "find_latest",
        "find_source_files",
        "hold_root",
        "import_hf",
        "inspect",
        "is_as_written",
        "list_checkpoints",
        "load",
        "model_folder",
        "open_checkpoint",
        "pin",
        "place",
        "plan_reads",
        "prune",
        "push",
        "rank_units",
        "read_config",
        "read_provenance",
        "report",
        "reshard",
        "resolve",
        "save",
        "top",
        "verify",
        "weights_digest",
    ]
    assert all(getattr(ckptool, name) is not None for name in ckptool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        ckptool.absent  # noqa: B018


def test_help_is_quick() -> None:
    """Counted in processor seconds, the best of five, so that a busy machine doesn't fail it."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "ckptool", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < HELP_SECONDS, seconds


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["ls", "--help"], ["completion", "bash"]])
def test_looking_around_imports_no_heavy_library(args: list[str]) -> None:
    assert heavy_modules_after(args) == ""


def heavy_modules_after(args: list[str]) -> str:
    """Run a command in a fresh interpreter and return which heavy libraries it has loaded, space separated."""
    script = (
        "import sys\n"
        "from ckptool.cli.main import run\n"
        "code = run(sys.argv[1:])\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules]\n"
        "print('heavy:', *heavy, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], check=True, capture_output=True, text=True)
    return done.stderr.splitlines()[-1].removeprefix("heavy:").strip()


def test_the_repository_has_the_agreed_top_level() -> None:
    allowed = {
        *{"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"},
        *{"ckptool", "trainer", "tests", "docs", "benchmarks", ".ci", ".gitignore", "mkdocs.yml", "CITATION.cff"},
    }
    if not (TOP / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, check=True, capture_output=True, text=True).stdout
    assert {name.split("/")[0] for name in listed.split("\0") if name} <= allowed
