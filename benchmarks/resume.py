"""Whether a conversion that is killed and goes on gives the bytes of one that was not.

    python benchmarks/resume.py MODEL --device cuda
    python benchmarks/resume.py MODEL --device cpu --kills 3 --recipe '{"fit.steps": 20}'

Converts MODEL once undisturbed, then again under ``kill -9`` at drawn moments until it is through, each time in a new
process, and compares the tensors and config.json of both. Without kills it is converted twice undisturbed.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mha2mla.conversion.resume import tensor_hash

RECIPE = (
    '{"preset": "shared", "cache_ratio": 0.5, "fit.steps": 60, "calibration.text": "builtin:pydoc", '
    '"calibration.tokens": 65536}'
)


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every tensor and every key of the config; a card tells times, which differ."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                found[name] = tensor_hash(file.get_tensor(name))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    recipe = {f"recipe.{key}": value for key, value in (config.pop("recipe", None) or {}).items()}
    found |= {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in (config | recipe).items()}
    return found


def in_order(name: str) -> list[int | str]:
    """Layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def start(source: Path, destination: Path, recipe: dict, device: str, log: Path) -> subprocess.Popen:
    program = (
        "import json, sys, mha2mla; source, destination, recipe, device = sys.argv[1:]; "
        "print('resumed', mha2mla.convert(source, destination, json.loads(recipe), "
        "device=device, progress=False).resumed_layers)"
    )
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(source), str(destination), json.dumps(recipe), device],
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def resume(source: Path, device: str = "cuda", kills: int = 2, seed: int = 0, recipe: str = RECIPE) -> bool:
    """Converts twice and compares.

    Args:
        source: folder of a model that this package converts.
        device: of the conversions.
        kills: how often the second conversion is killed; 0: it runs as undisturbed as the first.
        seed: of the moments.
        recipe: keys as JSON.
    """
    keys, draw = json.loads(recipe), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        log, plain, killed = Path(folder) / "log", Path(folder) / "plain", Path(folder) / "killed"
        began = time.monotonic()
        if start(source, plain, keys, device, log).wait():
            sys.exit(log.read_text(encoding="utf-8")[-2000:])
        seconds = time.monotonic() - began
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        for _ in range(kills):
            process = start(source, killed, keys, device, log)
            after = seconds * draw.uniform(0.5, 0.9)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(f"killed after {after:.0f} s" if process.returncode else "it was through before the kill", flush=True)
        if not killed.exists() and start(source, killed, keys, device, log).wait():
            sys.exit(log.read_text(encoding="utf-8")[-2000:])
        print(log.read_text(encoding="utf-8").strip().splitlines()[-1] + " layers", flush=True)
        expected, found = hashes(plain), hashes(killed)
        names = expected.keys() | found.keys()
        differing = sorted((name for name in names if expected.get(name) != found.get(name)), key=in_order)
        shown = ", ".join(differing[:8])
        print(
            f"{len(differing)} of {len(names)} differ: {shown}" if differing else f"bit-equal: all {len(names)}",
            flush=True,
        )
        return not differing


if __name__ == "__main__":
    from jsonargparse import auto_cli

    sys.exit(0 if auto_cli(resume) else 1)
