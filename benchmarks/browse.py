"""Looks at HTML pages in a headless Chromium: console messages, requests, and screenshots, light and dark.

    python benchmarks/browse.py report.html --shots shots        # Debian's package chromium, or CHROMIUM=path
    python benchmarks/browse.py --docs                           # the screenshots docs/*.png; needs the extra `docs`
    python benchmarks/browse.py --notebooks                      # those of the saved notebooks alone; needs no browser

Prints a line for each page and exits with 1 if a page logged a message, asked for another file, or is wider than the
window. ``--height`` cuts the screenshots.
"""

from __future__ import annotations

import argparse
import base64
import io
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
ROOT = Path(__file__).resolve().parents[1]
# Notebook → which of its saved pictures docs/NAME.png shows, one below the other.
NOTEBOOKS = {"compare_latencies": (0, 1), "convert_and_look_inside": (0, 2, 4), "kernel_explorer": (0, 1)}


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
        width = shoot(chromium, address, shots / f"{path.stem}-{scheme}.png", scheme, WIDTH, height)
        if width > WIDTH:
            problems.append(f"{width} pixels wide in a window of {WIDTH}")
        problems += _problems(chromium.events, address)
    return list(dict.fromkeys(problems))


def shoot(chromium: Browser, address: str, image: Path, scheme: str, width: int, height: int | None) -> int:
    """Takes a screenshot of a page, as high as it is or ``height``. Returns the page's width."""
    chromium.events.clear()
    chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    chromium.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    chromium.call("Page.navigate", url=address)
    chromium.wait("Page.loadEventFired")
    size = chromium.call("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], height or size["height"]), "scale": 1}
    found = chromium.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(base64.b64decode(found["data"]))
    return size["width"]


def docs(work: Path) -> None:
    """The report of a conversion and pictures of the notebooks, as docs/*.png."""
    from PIL import Image

    from mha2mla.eval.page import write_page

    report = work / "report.html"
    write_page([ROOT / "benchmarks" / "results" / "h200-quality-latent.json"], report)
    with browser() as chromium:
        for scheme in ("light", "dark"):
            image = ROOT / "docs" / f"report-{scheme}.png"
            shoot(chromium, report.as_uri(), image, scheme, WIDTH, 800)
            Image.open(image).convert("RGB").quantize(128).save(image, optimize=True)
    notebooks()


def notebooks() -> None:
    """Pictures of the saved notebooks, as docs/*.png."""
    from PIL import Image

    for name, places in NOTEBOOKS.items():
        saved = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
        outputs = [output.get("data", {}) for cell in saved["cells"] for output in cell.get("outputs", ())]
        found = ["".join(data["image/png"]) for data in outputs if "image/png" in data]
        parts = [Image.open(io.BytesIO(base64.b64decode(found[place]))).convert("RGB") for place in places]
        page = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
        for index, part in enumerate(parts):
            page.paste(part, (0, sum(above.height for above in parts[:index])))
        page.quantize(256).save(ROOT / "docs" / f"{name}.png", optimize=True)


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
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--docs", action="store_true", help="make the screenshots docs/*.png")
    parser.add_argument("--notebooks", action="store_true", help="make those of the saved notebooks alone")
    parser.add_argument("--shots", type=Path, default=Path("shots"), help="folder of the screenshots")
    parser.add_argument("--height", type=int, help="pixels of a screenshot at most")
    options = parser.parse_args()
    if options.docs:
        with tempfile.TemporaryDirectory() as work:
            docs(Path(work))
        return 0
    if options.notebooks:
        notebooks()
        return 0
    wrong = 0
    with browser() as chromium:
        for path in options.pages:
            problems = look(chromium, path, options.shots, options.height)
            wrong += bool(problems)
            print(f"{path}: {'; '.join(problems) or 'no messages, no requests'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
