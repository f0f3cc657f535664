"""Killed before any file operation, or in the middle of a write, or by a power cut: the old state or the new one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.errors import TargetExistsError
from ckptool.storage.lock import is_stale
from ckptool.storage.staging import is_staging
from tests.faults.scenarios import NAME, SCENARIOS, Scenario, state_of
from tests.faults.shim import Shim, run_forked

MODES = ("kill", "tear", "power")
SAMPLE_EVERY = 11


class Prepared:
    """A scenario with the state before it, the state after it, and how many operations lie between."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.template, self.root = folder / "template", folder / "root"
        scenario.prepare(self.template)
        self.old = state_of(self.template)
        self.reset()
        scenario.run(self.root)  # what libraries do once, at their first use, is not to be counted
        self.reset()
        self.num_operations = int(run_forked(lambda: scenario.run(self.root), Shim(), count_operations))
        self.new = state_of(self.root)
        assert self.new not in (self.old, "absent")

    def reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.template, self.root)

    def kill(self, mode: str, at: int) -> str:
        """Die before operation `at`; the state found afterwards. Then run once more, to the end."""
        self.reset()
        assert run_forked(lambda: self.scenario.run(self.root), Shim(at, mode), count_operations) == "killed"
        assert all(is_stale(path) for path in self.root.iterdir() if is_staging(path))
        found = state_of(self.root)
        assert found in (self.old, self.new), f"{mode} before operation {at}"
        try:
            self.scenario.run(self.root)
        except TargetExistsError:
            assert found == self.new
        else:
            assert [path.name for path in self.root.iterdir() if is_staging(path)] == []
        assert state_of(self.root) == self.new
        return found


def count_operations(shim: Shim, error: BaseException | None) -> str:
    assert error is None, error
    return str(shim.count)


@pytest.fixture(scope="module", params=SCENARIOS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    yield Prepared(SCENARIOS[request.param], tmp_path_factory.mktemp("kills"))


def test_killed_at_some_boundaries(prepared: Prepared) -> None:
    ends = [1, prepared.num_operations]
    found = [
        prepared.kill(MODES[at % 3], at)
        for at in sorted({*ends, *range(SAMPLE_EVERY // 2, prepared.num_operations, SAMPLE_EVERY)})
    ]
    assert found[0] == prepared.old and found[-1] == prepared.new


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_every_boundary(prepared: Prepared, mode: str) -> None:
    found = [prepared.kill(mode, at) for at in range(1, prepared.num_operations + 1)]
    turned = found.index(prepared.new)
    assert found == [prepared.old] * turned + [prepared.new] * (len(found) - turned)


def test_the_boundaries_of_all_runs_are_many(tmp_path: Path) -> None:
    counts = {name: Prepared(scenario, tmp_path / name).num_operations for name, scenario in SCENARIOS.items()}
    assert len(MODES) * sum(counts.values()) >= 1000, counts
    assert all((tmp_path / name / "root" / NAME).exists() for name in counts)
