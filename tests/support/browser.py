"""Opens pages in headless Chromium and reports their behaviour.

It uses a few calls of Chromium's DevTools protocol.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port

HERE = INSTALLED / "chromium"
DEADLINE_S = 60.0
_OPTIONS = (
    "--headless=shell",
    "--no-sandbox",  # the sandbox needs privileges that a container lacks
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
)


def find_chromium() -> Path | None:
    """Return the program, if it is installed."""
    program = HERE / "chromium"
    return program if program.exists() else None


@dataclass
class Seen:
    """The behaviour of a page. ``answer``: the result of the script; ``complaints``: messages on
    the console, and those of the browser; ``requested``: all addresses requested."""

    answer: Any = None
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)


@dataclass
class Browser:
    """A running Chromium that listens on ``port``."""

    port: int

    def look(
        self, page: Path, ask: str, *, width: int = 1280, dark: bool = False, picture: Path
    ) -> Seen:
        """Open the file ``page`` in a window of that width, and evaluate the JavaScript expression
        ``ask`` there. Return the page's behaviour. ``picture``: the file for a PNG of all of it."""
        return asyncio.run(self._look(page, ask, width, dark, picture))

    async def _look(self, page: Path, ask: str, width: int, dark: bool, picture: Path) -> Seen:
        async with asyncio.timeout(DEADLINE_S), self._tab() as tab:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            scheme = "dark" if dark else "light"
            wanted = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=wanted)
            window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.call("Emulation.setDeviceMetricsOverride", **window)
            await tab.call("Page.navigate", url=page.as_uri())
            await tab.until("Page.loadEventFired")
            found = await tab.call("Runtime.evaluate", expression=ask, returnByValue=True)
            sizes = await tab.call("Page.getLayoutMetrics")
            size = sizes["cssContentSize"]
            whole = {"x": 0, "y": 0, "scale": 1, "width": size["width"], "height": size["height"]}
            shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=whole)
        picture.write_bytes(base64.b64decode(shot["data"]))
        tab.seen.answer = found["result"].get("value", found)
        return tab.seen

    @contextlib.asynccontextmanager
    async def _tab(self) -> AsyncIterator[_Tab]:
        async with aiohttp.ClientSession() as session:
            new = f"http://127.0.0.1:{self.port}/json/new?about:blank"
            async with session.put(new) as answer:
                address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=1 << 28) as line:
                yield _Tab(line)


class _Tab:
    """A DevTools connection to one tab."""

    def __init__(self, line: aiohttp.ClientWebSocketResponse) -> None:
        self.seen = Seen()
        self._line = line
        self._calls = 0
        self._happened: set[str] = set()

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method; return its result. Raises RuntimeError if the browser refuses it."""
        self._calls += 1
        await self._line.send_json({"id": self._calls, "method": method, "params": arguments})
        while True:
            message = await self._next()
            if message.get("id") == self._calls:
                break
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def until(self, event: str) -> None:
        """Wait until ``event`` has happened."""
        while event not in self._happened:
            await self._next()

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._line.receive_json()
        method = message.get("method", "")
        self._happened.add(method)
        if method == "Network.requestWillBeSent":
            self.seen.requested.append(message["params"]["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.seen.complaints.append(str(message["params"]))
        return message


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser during the body; its profile and its log are in ``folder``."""
    program = find_chromium()
    if program is None:
        raise RuntimeError("Chromium is not installed: make test-servers")
    port = free_port()
    command = [
        program,
        *_OPTIONS,
        f"--remote-debugging-port={port}",
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]
    environment = {
        "LD_LIBRARY_PATH": str(HERE / "al2023/lib"),
        "FONTCONFIG_PATH": str(HERE / "fonts"),
        "HOME": str(folder),
    }
    daemon = Daemon(command, port=port, log=folder / "chromium.log", environment=environment)
    daemon.start()
    try:
        yield Browser(port)
    finally:
        daemon.stop()


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours, ``rgb(…)``, from 1 to 21, as WCAG 2 defines it."""
    dark, light = sorted([luminance(first), luminance(second)])
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(…)``, from 0 to 1, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
