"""Licence and hub name of a source, for the card of its conversion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mha2mla.checkpoints import CONFIG_FILE, CheckpointError, read_json, regular_file
from mha2mla.conversion.recipe import PlainLoader

CARD_FILE = "README.md"
_LARGEST = 1 << 16  # characters of a card that are looked at
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_SHORT = re.compile(r"[^\n]{1,200}")


def card_metadata(folder: Path, name: str) -> dict[str, Any]:
    """``license`` (with ``license_name`` and ``license_link`` where there are any) and ``base_model``, if it is known.

    The licence is that of the source's card; else the file LICENSE, which is copied; else it is unknown. The name is
    the hub id that the caller gave, of the hub's cache, of the source's config, or of its card.

    Raises:
        CheckpointError: its ``config.json`` cannot be read.
    """
    card, config = _front_matter(folder), read_json(folder, CONFIG_FILE)
    found = {key: card[key] for key in ("license", "license_name", "license_link") if _is(_SHORT, card.get(key))}
    if "license" not in found and (folder / "LICENSE").is_file():
        found = {"license": "other", "license_name": "see-license", "license_link": "LICENSE"}
    found.setdefault("license", "unknown")
    cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", folder.resolve().as_posix())
    given = None if Path(name).exists() else name
    ids = (given, cached and f"{cached[1]}/{cached[2]}", config.get("_name_or_path"), card.get("base_model"))
    if known := [each for each in ids if _is(_HUB_ID, each)]:
        found["base_model"] = known[0]
    return found


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _front_matter(folder: Path) -> dict[str, Any]:
    """The YAML at the head of the source's card; empty where there is none that can be read."""
    try:
        with open(regular_file(folder, CARD_FILE), encoding="utf-8", errors="replace") as file:
            head = re.match(r"---\n(.*?)\n---\n", file.read(_LARGEST), re.S)
        values = yaml.load(head[1], PlainLoader) if head else {}
    except (CheckpointError, OSError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
