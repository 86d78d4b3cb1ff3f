"""Looks at HTML pages in a headless Chromium: console messages, requests, and screenshots, light and dark.

    python benchmarks/browse.py report.html --shots shots        # Debian's package chromium, or CHROMIUM=path

Prints a line for each page and exits with 1 if a page logged a message, asked for another file, or is wider than the
window. ``--height`` cuts the screenshots.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTH = 1280


class Browser:
    """A Chromium that is driven through its pipes (Chrome DevTools Protocol, one JSON message to a NUL)."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb")
        self._ids, self._session = itertools.count(1), None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": params, **session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (found := self._read()).get("id") != number:
            self.events.append(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def wait(self, event: str) -> None:
        while all(each.get("method") != event for each in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        return json.loads(b"".join(iter(lambda: self._in.read(1), b"\0")))


@contextmanager
def browser() -> Iterator[Browser]:
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is not installed; expected Debian's package chromium, or its path in CHROMIUM")
    (child_in, to_browser), (from_browser, child_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        # The protocol has file descriptors 3 and 4.
        shell = f'exec "$0" {flags} 3<&{child_in} 4>&{child_out} 2>/dev/null'
        running = subprocess.Popen(["bash", "-c", shell, program], pass_fds=(child_in, child_out))
        os.close(child_in), os.close(child_out)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            running.terminate()
            running.wait()


def look(chromium: Browser, path: Path, shots: Path, height: int | None) -> list[str]:
    """Takes two screenshots of a page. Returns what is wrong with it."""
    problems, address = [], path.resolve().as_uri()
    for scheme in ("light", "dark"):
        chromium.events.clear()
        chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        chromium.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)
        chromium.call("Page.navigate", url=address)
        chromium.wait("Page.loadEventFired")
        size = chromium.call("Page.getLayoutMetrics")["cssContentSize"]
        if size["width"] > WIDTH:
            problems.append(f"{size['width']} pixels wide in a window of {WIDTH}")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(size["height"], height or size["height"]), "scale": 1}
        image = chromium.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        shots.mkdir(parents=True, exist_ok=True)
        (shots / f"{path.stem}-{scheme}.png").write_bytes(base64.b64decode(image["data"]))
        problems += _problems(chromium.events, address)
    return list(dict.fromkeys(problems))


def _problems(events: list[dict[str, Any]], address: str) -> Iterator[str]:
    for event in events:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            yield f"{params['entry']['level']}: {params['entry']['text']}"
        elif event.get("method") == "Runtime.consoleAPICalled":
            yield f"console.{params['type']}: {[each.get('value') for each in params['args']]}"
        elif event.get("method") == "Runtime.exceptionThrown":
            yield f"exception: {params['exceptionDetails']['text']}"
        elif event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url.partition("#")[0] != address and not url.startswith("data:"):
                yield f"asked for {url}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--shots", type=Path, default=Path("shots"), help="folder of the screenshots")
    parser.add_argument("--height", type=int, help="pixels of a screenshot at most")
    options = parser.parse_args()
    wrong = 0
    with browser() as chromium:
        for path in options.pages:
            problems = look(chromium, path, options.shots, options.height)
            wrong += bool(problems)
            print(f"{path}: {'; '.join(problems) or 'no messages, no requests'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
