"""Launch files parse and name real options; two torchrun agents train one run; a root of one node is refused."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import trainer
from tests.spawn import skip_without_gpus
from tests.trainer.processes import wait_for_step
from tests.trainer.test_exactly_once import write_config
from tests.trainer.tiny import DEVICE, read_lines, surviving_samples
from trainer.cli import command

LAUNCH = Path(trainer.__file__).parents[1] / "docs" / "howto" / "launch"
OPTIONS = {name for parameter in command.params for name in parameter.opts}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_slurm_file_is_bash_and_names_options_of_the_trainer():
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=False).returncode == 0
    call = text.partition("exec python -m trainer")[2].partition("'")[0]
    used = set(re.findall(r"--[a-z-]+", call))
    assert {"--config", "--root"} < used <= OPTIONS
    assert "#SBATCH --signal=USR1@" in text


def test_the_kubernetes_file_is_a_service_and_a_job_that_fit_together():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    words = container["command"]
    options = {word.partition("=")[0] for word in words[words.index("trainer") + 1 :]}
    assert {"--config", "--root"} < options <= OPTIONS
    torchrun = dict(word.removeprefix("--").split("=") for word in words[1 : words.index("-m")])
    assert int(torchrun["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    port = service["spec"]["ports"][0]["port"]
    assert torchrun["rdzv-endpoint"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(torchrun["shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    assert int(torchrun["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def start_nodes(
    config: Path, port: int, *options: list[str], nodes: tuple[str, ...] = ("2",)
) -> list[subprocess.Popen]:
    """Two torchrun agents of one rank each, the trainer's further options by node; silent for 6 s, one is gone."""
    skip_without_gpus(2)
    settings = "join_timeout=60,last_call_timeout=1,keep_alive_interval=2"
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", *nodes),
                *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-id", "test", "--rdzv-conf", f"is_host={int(node == 0)},{settings}"),
                *("-m", "trainer", "--config", str(config), *extra),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"}
            | ({"CUDA_VISIBLE_DEVICES": str(node)} if DEVICE == "cuda" else {}),
            stderr=(config.parent / f"said-{node}.txt").open("w"),
            start_new_session=True,
        )
        for node, extra in enumerate(options)
    ]


def finish(root: Path, nodes: list[subprocess.Popen]) -> list[str]:
    """Wait for the agents; what each said."""
    try:
        for node in nodes:
            node.wait(120)
    finally:
        for node in nodes:
            node.kill()
    return [(root / f"said-{number}.txt").read_text() for number in range(len(nodes))]


def test_two_nodes_train_one_run(root):
    nodes = start_nodes(write_config(root, steps=3), free_port(), [], [])
    said = finish(root, nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [line["world_size"] for line in read_lines(root / "metrics.jsonl")] == [2, 2, 2]
    assert surviving_samples(root) == list(range(18))


def has_caught_up(metrics: Path) -> bool:
    """The rank that is left has trained all steps again that two have, one that is not in the file yet among them."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    lost = max(line["step"] for line in lines if line["world_size"] == 2)
    return lines[-1]["world_size"] == 1 and lines[-1]["step"] > lost + 1


@pytest.mark.slow
def test_when_a_node_vanishes_the_other_goes_on_from_the_newest_checkpoint(root):
    """As in a power failure: torchrun and the rank are killed. The rest is one rank, which is then told to stop."""
    metrics = root / "metrics.jsonl"
    config = write_config(root, steps=5000, save_every=5, schedule="constant")
    first, second = start_nodes(config, free_port(), [], [], nodes=("1:2", "--max-restarts", "3"))
    try:
        wait_for_step(metrics, 8, lambda: first.poll() is None)
        ranks = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        for pid in (second.pid, *map(int, ranks)):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while not has_caught_up(metrics):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        said = finish(root, [first, second])[0]
    finally:
        first.kill()
        second.kill()
    lines = read_lines(metrics)
    saved = next(line["step"] for line in lines if line["world_size"] == 1) - 1
    assert saved % 5 == 0
    assert f"resuming from {root}/step-{saved}\n" in said
    assert "failed in step" in said
    assert surviving_samples(root) == list(range(6 * lines[-1]["step"]))


@pytest.mark.slow
def test_a_root_that_only_the_first_node_sees_is_an_error_that_says_so(root, tmp_path):
    shutil.copytree(root, tmp_path / "elsewhere")
    nodes = start_nodes(write_config(root, steps=3), free_port(), [], ["--root", str(tmp_path / "elsewhere")])
    said = finish(root, nodes)
    assert all(node.returncode for node in nodes)
    assert "is not the same folder on all nodes" in "".join(said)
