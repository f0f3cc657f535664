"""Data positions of checkpoints: shown, checked, compared and changed, with nothing else of a checkpoint touched."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool.cli.main import run
from ckptool.core.data_source import DataSource
from ckptool.core.history import Fed
from ckptool.core.position import DataPosition
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError, UsageError
from ckptool.ops.data_edit import edit, seek, skip, write_position
from ckptool.ops.data_read import read_position
from ckptool.ops.data_show import diff_positions, plan_step, show_position
from ckptool.ops.data_verify import verify_position
from ckptool.storage.data_files import files_record, find_source_files

A, B = DataSource("a", 40, {"tokens": "x"}), DataSource("b", 90, {"tokens": "y"})


def begin(*sources, weights=None):
    return DataPosition.begin(sources, seq_len=16, seed=0, global_batch_size=6, weights=weights)


def train(position, num_steps):
    """What a trainer does to the position, with everything fed once."""
    numbers = range(position.consumed, position.consumed + 6 * num_steps)
    fed = Fed(position.consumed).plus(zip(numbers, position.units(numbers), strict=True))
    return position.advance(num_steps).with_history([fed])


def save(path, position, **more):
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4)},
        "step": torch.tensor(position.num_steps),
        "data": {"cursor": torch.tensor(position.cursor()), "record": position.to_json(), **more},
    }
    provenance = ckptool.Provenance(tool_version="0", step=position.num_steps)
    ckptool.save(state, path, provenance=provenance, position=position)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """step-3 and step-8 of one source, step-20 of a mixture (another run)."""
    root = tmp_path_factory.mktemp("root")
    three = train(begin(A), 3)
    save(root / "step-3", three)
    save(root / "step-8", train(three, 5))
    save(root / "step-20", train(begin(A, B, weights={"a": 1, "b": 3}), 20))
    return root


@pytest.fixture
def root(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "root"))


def position_of(root, name) -> DataPosition:
    return read_position(name, root).position


def shard_bytes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("__[0-9]*.distcp")}


def test_show_says_where_each_source_stands(trained):
    facts = show_position("step-8", root=trained, num_next=2).details
    (source,) = facts["sources"]
    assert (facts["consumed"], facts["step"]) == (48, 8)
    assert (source["epoch"], source["place"], source["num_units"], source["num_tokens"]) == (1, 8, 48, 768)
    expected = position_of(trained, "step-8").units(range(48, 50))
    assert [(unit["number"], unit["index"]) for unit in facts["next_units"]] == [
        (48, expected[0].index),
        (49, expected[1].index),
    ]
    assert facts["even_world_sizes"] == [1, 2, 3, 6]
    of_mixture = show_position("step-20", root=trained).details["sources"]
    assert sum(source["num_units"] for source in of_mixture) == 120
    assert [source["slots"] for source in of_mixture] == [256, 768]


def test_plan_gives_every_unit_to_one_rank_and_counts_dummies(trained):
    facts = plan_step("step-3", 4, root=trained).details
    numbers = [[unit["number"] for unit in rank["units"]] for rank in facts["ranks"]]
    assert numbers == [[18, 22], [19, 23], [20], [21]]
    assert [rank["num_dummy_micro_batches"] for rank in facts["ranks"]] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="7 ranks can't share"):
        plan_step("step-3", 7, root=trained)


def test_diff_says_what_was_trained_between_and_refuses_another_run(trained):
    facts = diff_positions("step-3", "step-8", root=trained).details
    assert (facts["from_unit"], facts["to_unit"], facts["num_steps"]) == (18, 48, 5)
    assert facts["trained"] == [{"name": "a", "num_units": 30, "epoch": 1, "place": 8}]
    with pytest.raises(MismatchError, match="before unit 48"):
        diff_positions("step-8", "step-3", root=trained)
    with pytest.raises(MismatchError, match="its data from unit 0 on is another"):
        diff_positions("step-3", "step-20", root=trained)


@pytest.mark.parametrize("name", ["step-3", "step-20"])
def test_verify_replays_what_was_fed(trained, name):
    result = verify_position(name, root=trained, replay=True)
    assert (result.exit_code, result.details["replayed"]) == (0, True)


@pytest.mark.parametrize("wrong", ["twice", "skipped"])
def test_verify_finds_units_fed_twice_or_never_that_the_count_hides(tmp_path, wrong):
    position = begin(A)
    numbers = [0, 1, 2, 3, 4, 4] if wrong == "twice" else [0, 1, 2, 3, 4, 6]
    fed = Fed(0).plus((number, position.unit(number)) for number in numbers)
    save(tmp_path / "step-1", position.advance().with_history([fed]))
    assert verify_position("step-1", root=tmp_path).exit_code == 0
    assert verify_position("step-1", root=tmp_path, replay=True).exit_code == 4


def test_verify_finds_records_that_disagree(root):
    (root / "step-3" / "data_position.json").write_text('{"consumed": 5}')
    assert [f.message for f in verify_position("step-3", root=root).findings] == [
        "data_position.json says 5 units, data.record 18"
    ]


@pytest.fixture
def of_files(tmp_path):
    """step-1, trained on the files in text/."""
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number}")
    fingerprint = {"kind": "files", **files_record(find_source_files("files", (str(tmp_path / "text"),)))}
    save(tmp_path / "step-1", train(begin(DataSource("files", 40, fingerprint)), 1))
    return tmp_path


def test_verify_compares_the_data_by_size_or_in_full(of_files):
    def found(full):
        path = str(of_files / "text")
        result = verify_position("step-1", root=of_files, data={"": path}, full=full)
        return [finding.message.split(" ")[1] for finding in result.findings], result.exit_code

    assert found(full=False) == found(full=True) == ([], 0)
    (of_files / "text" / "1.txt").write_text("text X")
    assert (found(full=False), found(full=True)) == (([], 0), (["files"], 3))
    (of_files / "text" / "3.txt").write_text("more")
    assert found(full=False) == (["num_files", "num_bytes"], 3)
    (of_files / "text" / "2.txt").rename(of_files / "text" / "0.md")
    assert found(full=True)[1] == 3


def test_verify_refuses_data_that_it_can_not_compare(of_files, trained):
    with pytest.raises(UsageError, match="no source is called 'web'"):
        verify_position("step-1", root=of_files, data={"web": "x"})
    with pytest.raises(UsageError, match="several sources"):
        verify_position("step-20", root=trained, data={"": "x"})
    with pytest.raises(UnsupportedError, match="fingerprint of a has no files"):
        verify_position("step-3", root=trained, data={"a": "x"})
    with pytest.raises(NotFoundError):
        verify_position("step-1", root=of_files, data={"files": "nowhere"})
    assert run(["data", "verify", "step-1", "--root", str(of_files), "--full"]) == 2


def test_a_record_of_version_1_has_no_history_to_replay(tmp_path):
    record = {"consumed": 12, "fingerprint": {"tokens": "x"}, "global_batch_size": 6, "num_units": 40, "seed": 0}
    old = DataPosition.from_json(json.dumps(record | {"order_version": 1, "seq_len": 16}), "x")
    save(tmp_path / "step-2", old)
    write_position(tmp_path / "step-2", old)
    result = verify_position("step-2", root=tmp_path, replay=True)
    assert (result.exit_code, result.details["replayed"]) == (0, False)
    assert "nothing to replay" in result.notes[0]


def test_a_loop_that_counts_nothing_has_no_history_to_replay(tmp_path):
    save(tmp_path / "step-2", begin(A).advance(2))
    result = verify_position("step-2", root=tmp_path, replay=True)
    assert (result.exit_code, result.details["replayed"]) == (0, False)


@pytest.mark.parametrize(
    ("to", "unit", "repeated", "skipped"),
    [
        ("unit:10", 10, 38, 0),
        ("unit:60", 60, 0, 12),
        ("step:2", 12, 36, 0),
        ("step:12", 72, 0, 24),
        ("token:165", 10, 38, 0),
        ("epoch:0", 0, 48, 0),
        ("epoch:2", 80, 0, 32),
        ("+5", 53, 0, 5),
        ("-8", 40, 8, 0),
    ],
)
def test_a_seek_goes_on_there_and_says_what_repeats_and_what_is_skipped(root, to, unit, repeated, skipped):
    before = position_of(root, "step-8")
    facts = seek("step-8", to, root=root, reason="a test").details
    after = position_of(root, "step-8")
    assert (facts["num_repeated"], facts["num_skipped"]) == (repeated, skipped)
    assert after.units(range(48, 78)) == before.units(range(unit, unit + 30))
    assert after.consumed == 48
    (record,) = after.edits
    assert (record.action, record.reason, record.unit, record.step) == ("seek", "a test", 48, 8)
    assert verify_position("step-8", root=root, replay=True).exit_code == 0
    assert verify_position("step-8", root=root, replay=True).details["replayed"]


def test_an_edit_touches_the_data_items_only_and_the_checkpoint_stays_whole(root):
    folder = root / "step-8"
    shards = shard_bytes(folder)
    inodes = {path.name: path.stat().st_ino for path in folder.glob("__[0-9]*.distcp")}
    names = {path.name for path in folder.iterdir()}
    for to in ("unit:10", "+3"):
        seek("step-8", to, root=root)
        assert shard_bytes(folder) == shards
        assert {path.name: path.stat().st_ino for path in folder.glob("__[0-9]*.distcp")} == inodes
        assert {path.name for path in folder.iterdir()} == names | {"__data_edit.distcp"}
        assert ckptool.verify("step-8", root=root, level="content").findings == ()
    assert len(position_of(root, "step-8").edits) == 2
    state = {"model": {"w": torch.zeros(3, 4)}, "data": {"cursor": torch.zeros(8, dtype=torch.int64), "record": ""}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["w"], torch.arange(12.0).reshape(3, 4))
    assert state["data"]["record"] == position_of(root, "step-8").to_json()
    assert json.loads((folder / "data_position.json").read_text()) == json.loads(state["data"]["record"])
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


def test_training_goes_on_after_a_seek_with_a_history_that_replays(root):
    seek("step-8", "unit:10", root=root)
    resumed = begin(A).at(position_of(root, "step-8"))
    save(root / "step-11", train(resumed, 3))
    assert verify_position("step-11", root=root, replay=True).exit_code == 0
    facts = show_position("step-11", root=root).details
    assert facts["sources"][0]["num_units"] == 66
    assert (facts["sources"][0]["epoch"], facts["sources"][0]["place"]) == (0, 28)
    assert diff_positions("step-3", "step-11", root=root).details["edits"][0]["action"] == "seek"


@pytest.mark.parametrize("units", ["unit:60..72", "step:10..12"])
def test_a_range_ahead_is_skipped(root, units):
    before = position_of(root, "step-8")
    assert skip("step-8", units, root=root).details["num_skipped"] == 12
    after = position_of(root, "step-8")
    assert after.units(range(48, 90)) == before.units(range(48, 60)) + before.units(range(72, 102))


def test_weights_are_edited_and_a_source_added(root):
    before = position_of(root, "step-8")
    edit("step-8", weights={"a": 1, "b": 1}, add_sources=(B,), root=root)
    after = position_of(root, "step-8")
    assert after.segment.slots == (512, 512)
    units = after.units(range(48, 1048))
    of_a = [unit for unit in units if unit.source == "a"]
    assert of_a == before.units(range(48, 48 + len(of_a)))
    assert begin(A, B, weights={"a": 1, "b": 1}).at(after) == after
    edit("step-20", weights={"b": 1}, root=root)
    assert [source.name for source in position_of(root, "step-20").segment.sources] == ["b"]


def test_a_dry_run_writes_nothing(root):
    before = (root / "step-8" / ".metadata").read_bytes()
    assert not seek("step-8", "unit:10", root=root, dry_run=True).executed
    assert (root / "step-8" / ".metadata").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: seek("step-8", "somewhere", root=root), "is no place"),
        (lambda root: seek("step-8", "unit:48", root=root), "there already"),
        (lambda root: seek("step-8", "-49", root=root), "49 units back"),
        (lambda root: seek("step-20", "epoch:1", root=root), "its own epochs"),
        (lambda root: skip("step-8", "unit:5..9", root=root), "unit 5 is trained already"),
        (lambda root: skip("step-8", "unit:60..60", root=root), "holds no unit"),
        (lambda root: skip("step-8", "60-70", root=root), "is no range"),
        (lambda root: skip("step-8", "epoch:1..2", root=root), "is no unit"),
        (lambda root: edit("step-8", root=root), "needs weights"),
        (lambda root: edit("step-8", weights={"c": 1}, root=root), "no source is called c"),
        (lambda root: edit("step-20", weights={"a": 1, "b": 3}, root=root), "defined already"),
        (lambda root: edit("step-20", weights={"a": 1, "b": 0}, root=root), "not a positive number"),
    ],
)
def test_changes_that_mean_nothing_are_refused(root, change, message):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=message):
        change(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_a_stream_can_not_jump(tmp_path):
    save(tmp_path / "step-2", train(begin(A), 2), lane={"a": {"00000": "state"}})
    with pytest.raises(UnsupportedError, match="trained on a stream"):
        seek("step-2", "unit:0", root=tmp_path)


def test_a_checkpoint_without_a_position_is_named(tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(NotFoundError, match="has no data position"):
        show_position("step-1", root=tmp_path)


def test_every_command_speaks_json_and_ends_with_its_code(root, capsys):
    (root / "c.json").write_text(json.dumps({"name": "c", "num_units": 7, "fingerprint": {}}))
    (root / "b.json").write_text(begin(B).to_json())
    commands = {
        "show step-8": 0,
        "verify step-8 --replay": 0,
        "diff step-3 step-8": 0,
        "diff step-8 step-3": 3,
        "plan step-8 --world-size 4 --micro-batch-size 2": 0,
        "seek step-8 --to +3 --dry-run": 0,
        "seek step-8 --to nowhere": 2,
        "skip step-8 unit:60..66": 0,
        f"edit step-20 --weights a=.5,b=.3,c=.2 --add-source {root / 'c.json'}": 0,
        "edit step-20 --weights a": 2,
        f"edit step-20 --weights a=1 --add-source {root / 'step-8' / 'ckptool.json'}": 2,
        f"edit step-3 --weights a=1,b=1 --add-source {root / 'b.json'}": 0,
    }
    for command, code in commands.items():
        assert run(["data", *command.split(), "--root", str(root), "--json"]) == code, command
        said = capsys.readouterr()
        assert "internal error" not in said.err, command
        assert code or json.loads(said.out)["verb"] == f"data {command.split()[0]}"


def test_every_command_speaks_to_people_and_to_scripts(root, capsys):
    said = {
        "show step-8": ("48 units trained in 8 steps", "48"),
        "verify step-8 --replay": ("is good: 48 units, replayed", ""),
        "diff step-3 step-8": ("a: 30 units, up to epoch 1 place 8", "30"),
        "plan step-8 --world-size 4": ("rank 2 reads 1; 1 without a unit", "48 52\n49 53\n50\n51"),
        "seek step-8 --to -2": ("2 units are trained again, 0 skipped", str(root / "step-8")),
        "skip step-8 unit:60..66": ("0 units are trained again, 6 skipped", str(root / "step-8")),
        "edit step-20 --weights a=3,b=1": ("slots of a 256 -> 768", str(root / "step-20")),
    }
    for command, (human, bare) in said.items():
        dry_run = ["--dry-run"] * (command.split()[0] in ("seek", "skip", "edit"))
        for option, expected in (([], human), (["--quiet"], bare)):
            assert run(["data", *command.split(), "--root", str(root), *dry_run, *option]) == 0
            out = capsys.readouterr().out
            assert expected in out if not option else out.strip() == expected, command
