"""A run that is told to go saves and ends; what it trained is all there, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time

import ckptool
from tests.spawn import skip_without_gpus
from tests.trainer.processes import start_ranks, wait_for_step
from tests.trainer.test_exactly_once import write_config
from tests.trainer.tiny import read_lines, run, surviving_samples, tiny_config
from trainer.origin import find_origin
from trainer.signals import StopSignals
from trainer.train import train

STEPS = 5000  # more than a test waits for


def test_a_signal_to_one_rank_saves_on_all_and_exits_0(root):
    ranks = start_ranks(2, root, ["--config", str(write_config(root, steps=STEPS, schedule="constant"))])
    wait_for_step(root / "metrics.jsonl", 3, lambda: all(rank.is_alive for rank in ranks))
    ranks[1].send(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [0, 0]

    trained = read_lines(root / "metrics.jsonl")[-1]["step"]
    assert ckptool.find_latest(root).path.name == f"step-{trained}"
    lines = run(root, steps=trained + 2, schedule="constant")
    assert [line["step"] for line in lines] == list(range(1, trained + 3))
    assert surviving_samples(root) == list(range(6 * (trained + 2)))


def test_a_second_signal_ends_the_process_at_once_even_inside_a_call_that_never_returns():
    code = (
        "import threading\n"
        "from trainer.signals import StopSignals\n"
        "lock = threading.Lock()\n"
        "with StopSignals():\n"
        "    print('ready', flush=True)\n"
        "    lock.acquire(); lock.acquire()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "SIGTERM: saving at the end of this step, then stopping\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 128 + signal.SIGUSR1
    assert process.stderr.read() == "SIGUSR1 again: stopped at once, nothing saved\n"


def test_a_signal_before_the_first_step_trains_nothing(root, monkeypatch):
    def signalled(config):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return find_origin(config)

    monkeypatch.setattr("trainer.train.find_origin", signalled)
    train(tiny_config(root))
    assert not (root / "metrics.jsonl").exists()
    assert ckptool.find_latest(root) is None


def test_what_listened_before_listens_again():
    heard = []
    old = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 10
            while not stop.received and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stop.received == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_minutes_between_checkpoints(root):
    run(root, steps=3, save_every_minutes=1e-9)
    names = [summary.name for summary in ckptool.list_checkpoints(root) if summary.name.startswith("step-")]
    assert names == ["step-1", "step-2", "step-3"]


def test_torchrun_starts_the_ranks_again_they_resume_and_it_hands_a_signal_on(root):
    """Rank 1 dies once, after step 4. A run that began with --resume never goes on from step 3 all the same."""
    skip_without_gpus(2)
    config = write_config(root, steps=STEPS, save_every=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "tests.trainer.mortal", "dies", "1", "4"]
    command += ["--config", str(config), "--resume", "never"]
    torchrun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for_step(root / "metrics.jsonl", 7, lambda: torchrun.poll() is None)
    torchrun.send_signal(signal.SIGTERM)
    _, said = torchrun.communicate(timeout=90)
    trained = read_lines(root / "metrics.jsonl")[-1]["step"]
    assert f"resuming from {root / 'step-3'}" in said
    assert f"stopped at step {trained} of {STEPS}: {root}/step-{trained} holds it" in said
    assert ckptool.find_latest(root).path.name == f"step-{trained}"
    assert surviving_samples(root) == list(range(6 * trained))
