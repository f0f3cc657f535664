"""Pages in a headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_SECONDS = 60.0


class Page:
    """One open page; `events` are what the browser has said of it so far."""

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self._num_calls = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        call = self._num_calls
        await self._connection.write_message(json.dumps({"id": call, "method": method, "params": params}))
        while True:
            raw = await asyncio.wait_for(self._connection.read_message(), _START_SECONDS)
            assert raw is not None, "the browser went away"
            message = json.loads(raw)
            if message.get("id") == call:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        until = time.monotonic() + _START_SECONDS
        while not (value := await self.value(expression)):
            assert time.monotonic() < until, f"never true: {expression}; {self.events}"
            await asyncio.sleep(0.05)
        return value

    async def open(self, file: Path) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Performance.enable", timeDomain="threadTicks")
        await self.call("Page.navigate", url=file.absolute().as_uri())

    async def processor_seconds(self) -> float:
        """What the page's main thread has worked so far; time that it waited for a core doesn't count."""
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def requests(self) -> list[str]:
        """The addresses that were asked for, those inside the page left out."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        addresses = [event["params"]["request"]["url"] for event in sent]
        return [address for address in addresses if not address.startswith(("data:", "blob:"))]

    def complaints(self) -> list[str]:
        """Uncaught exceptions, and errors in the browser's log such as a blocked request."""
        thrown = [json.dumps(e["params"]) for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        return thrown + [entry["text"] for entry in logged if entry["level"] == "error"]


@contextmanager
def browser() -> Iterator[str]:
    """Run Chromium and yield the address of an empty page's debugger."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [CHROMIUM, *arguments, f"--user-data-dir={profile}", "--window-size=1200,1000", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield _debugger(process)
        finally:
            os.killpg(process.pid, 9)
            process.communicate()


def _debugger(process: subprocess.Popen[str]) -> str:
    import urllib.request

    assert process.stderr is not None
    for line in process.stderr:
        if "DevTools listening on ws://" in line:
            host = line.split("ws://")[1].split("/")[0]
            with urllib.request.urlopen(f"http://{host}/json/list", timeout=_START_SECONDS) as reply:
                return next(page["webSocketDebuggerUrl"] for page in json.load(reply) if page["type"] == "page")
    raise AssertionError("Chromium ended before it could be talked to")


async def connect(address: str) -> Page:
    return Page(await websocket_connect(address, max_message_size=1 << 26))
