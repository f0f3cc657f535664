import threading
import time

import pytest

from ckptool.core.budget import Cancelled, MemoryBudget


def test_reservations_wait_for_each_other_and_a_large_one_is_alone() -> None:
    budget = MemoryBudget(10)
    held, most, lock = 0, 0, threading.Lock()

    def work(num_bytes: int) -> None:
        nonlocal held, most
        with budget.reserve(num_bytes):
            with lock:
                held += num_bytes
                most = max(most, held)
                assert held <= 10 or held == 25
            time.sleep(0.005)
            with lock:
                held -= num_bytes

    threads = [threading.Thread(target=work, args=(size,)) for size in (6, 6, 4, 25, 3, 10, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert held == 0 and most == 25


def test_cancelling_wakes_those_that_wait() -> None:
    budget = MemoryBudget(10)
    stopped = []

    def wait() -> None:
        try:
            with budget.reserve(8):
                stopped.append("went on")
        except Cancelled:
            stopped.append("stopped")

    with budget.reserve(8):
        thread = threading.Thread(target=wait)
        thread.start()
        budget.cancel()
        thread.join(10)
    assert stopped == ["stopped"]
    with pytest.raises(Cancelled):
        budget.check_going_on()
