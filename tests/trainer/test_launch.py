"""Launch files parse and name real options; two torchrun agents train one run; a root of one node is refused."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import trainer
from tests.spawn import skip_without_gpus
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


def start_nodes(config: Path, port: int, *options: list[str], elastic: list[str] | None = None) -> list:
    """Two torchrun agents of one rank each, the trainer's further options by node; `elastic` are torchrun's."""
    skip_without_gpus(2)
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *(elastic or ["--nnodes", "2"])),
                *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-id", "test", "--rdzv-conf", f"is_host={int(node == 0)},join_timeout=60,last_call_timeout=1"),
                *("-m", "trainer", "--config", str(config), *extra),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"}
            | ({"CUDA_VISIBLE_DEVICES": str(node)} if DEVICE == "cuda" else {}),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node, extra in enumerate(options)
    ]


def finish(nodes: list[subprocess.Popen]) -> list[str]:
    try:
        return [node.communicate(timeout=120)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def test_two_nodes_train_one_run(root):
    nodes = start_nodes(write_config(root, steps=3), free_port(), [], [])
    said = finish(nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [line["world_size"] for line in read_lines(root / "metrics.jsonl")] == [2, 2, 2]
    assert surviving_samples(root) == list(range(18))


@pytest.mark.slow
def test_a_root_that_only_the_first_node_sees_is_an_error_that_says_so(root, tmp_path):
    shutil.copytree(root, tmp_path / "elsewhere")
    nodes = start_nodes(write_config(root, steps=3), free_port(), [], ["--root", str(tmp_path / "elsewhere")])
    said = finish(nodes)
    assert all(node.returncode for node in nodes)
    assert "is not the same folder on all nodes" in "".join(said)
