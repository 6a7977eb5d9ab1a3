#!/usr/bin/env python3
"""Opens a page in the Chromium that runs in the sandbox: prints its text after its scripts, or takes a picture.

browse URL [PICTURE.png]
"""

import asyncio
import base64
import json
import sys
import urllib.request
from pathlib import Path

import websockets

DEVTOOLS = "http://127.0.0.1:9222"
TIMEOUT_S = 60.0
LOADED = "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', () => done()))"


def ask(path: str, method: str = "GET") -> bytes:
    """A call of the browser itself."""
    request = urllib.request.Request(f"{DEVTOOLS}{path}", method=method)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.read()


class Tab:
    """One tab, by its socket."""

    def __init__(self, socket: websockets.WebSocketClientProtocol) -> None:
        self._socket = socket
        self._calls = 0

    async def call(self, method: str, **params: object) -> dict[str, object]:
        """A call of the DevTools protocol; events that come meanwhile are skipped."""
        self._calls += 1
        await self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            message = json.loads(await self._socket.recv())
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(message["error"]["message"])
                return message["result"]

    async def value(self, expression: str) -> object:
        """What a JavaScript expression is in the page; of a promise, what it comes to."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")


async def browse(url: str, picture: Path | None) -> None:
    """Open, wait until it is loaded, show, close."""
    opened = json.loads(ask("/json/new?about:blank", "PUT"))
    try:
        async with websockets.connect(opened["webSocketDebuggerUrl"], max_size=None) as socket:
            tab = Tab(socket)
            await tab.call("Page.navigate", url=url)
            await tab.value(LOADED)
            if picture is None:
                print(await tab.value("document.documentElement.innerText"))
            else:
                taken = await tab.call("Page.captureScreenshot", format="png")
                picture.write_bytes(base64.b64decode(taken["data"]))
    finally:
        ask(f"/json/close/{opened['id']}")


if __name__ == "__main__":
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    asyncio.run(asyncio.wait_for(browse(sys.argv[1], target), TIMEOUT_S))
