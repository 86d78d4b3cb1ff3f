"""The card of a checkpoint, and what of its source and of this machine it shows."""

import json
import shutil
import stat

import pytest
import yaml

from mha2mla.conversion.card import _origin, card_metadata
from tests.conversion import tiny
from tests.folders import read_json

QUICK = {"preset": "minimal", "cache_ratio": 1.0}


def header(folder) -> dict:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_card_has_licence_task_and_installation(tiny_converted):
    found = {"license": "unknown", "library_name": "transformers", "pipeline_tag": "text-generation"}
    assert header(tiny_converted) == found | {"tags": ["mha2mla", "mla"]}
    card = (tiny_converted / "README.md").read_text()
    assert "pip install " in card and f'mha2mla.load("{tiny_converted.name}")' in card


def test_records_name_no_folder_of_this_machine(tiny_source, tmp_path):
    """Neither the source's, nor the destination's, nor those of texts."""
    text = tmp_path / "private" / "corpus.txt"
    text.parent.mkdir()
    text.write_text("Letters of nobody's business, each a token. " * 40)
    recipe = {"preset": "minimal", "calibration.tokens": 256, "calibration.lengths": 32, "calibration.text": str(text)}
    tiny.convert(tiny_source, tmp_path / "out", recipe, evaluation=str(text), evaluation_tokens=64)
    for name in ("config.json", "conversion.json", "README.md"):
        content = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in content and str(tiny_source.parent) not in content, name
    config = read_json(tmp_path / "out" / "config.json")
    assert config["source_config"]["_name_or_path"] == tiny_source.name
    assert config["recipe"]["calibration"]["text"] == "corpus.txt"


def test_weight_files_have_the_mode_of_the_others(tiny_converted):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tiny_converted.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] and len(set(modes.values())) == 1


def written(folder, card=None, config=None, licence=False):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if card is not None:
        (folder / "README.md").write_text(card)
    if licence:
        (folder / "LICENSE").write_text("terms")
    return folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"card": "---\nlicense: llama2\n---\n# Llama"}, {"license": "llama2"}),
        (
            {"card": "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\nbase_model: a/b\n---\n"},
            {"license": "other", "license_name": "own", "license_link": "LICENSE", "base_model": "a/b"},
        ),
        ({"licence": True}, {"license": "other", "license_name": "see-license", "license_link": "LICENSE"}),
        ({"config": {"_name_or_path": "meta/llama"}}, {"license": "unknown", "base_model": "meta/llama"}),
        ({"config": {"_name_or_path": "/home-of/somebody/llama"}}, {"license": "unknown"}),
        ({"card": "---\nlicense: [a, b\n---\n"}, {"license": "unknown"}),
        ({"card": "---\nlicense: {a: b}\nbase_model: 7\n---\n"}, {"license": "unknown"}),
        ({"card": "no head"}, {"license": "unknown"}),
    ],
)
def test_licence_and_base_model_are_the_source_s(given, expected, tmp_path):
    assert card_metadata(written(tmp_path / "source", **given), str(tmp_path / "source")) == expected


def test_a_hub_id_is_known_by_name_or_by_the_hub_s_cache(tmp_path):
    assert card_metadata(written(tmp_path / "a"), "owner/name")["base_model"] == "owner/name"
    cached = written(tmp_path / "models--owner--a-model" / "snapshots" / "0a1b")
    assert card_metadata(cached, cached.name)["base_model"] == "owner/a-model"


def test_a_converted_source_keeps_what_is_known(tiny_source, tmp_path):
    source = shutil.copytree(tiny_source, tmp_path / "llama")
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: owner/llama\n---\n")
    tiny.convert(source, tmp_path / "out", QUICK, evaluation_tokens=64)
    assert header(tmp_path / "out")["license"] == "apache-2.0"
    assert header(tmp_path / "out")["base_model"] == "owner/llama"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            {"base_model": "a/b"},
            "Source: [a/b](https://huggingface.co/a/b). Licence: unknown; the source's card names none.",
        ),
        ({"license": "apache-2.0"}, "Licence: `apache-2.0`, the source's."),
        ({"license": "other", "license_name": "own", "license_link": "FILE"}, "Licence: [own](FILE), the source's."),
    ],
)
def test_the_card_names_source_and_licence(metadata, said):
    assert _origin(metadata) == said
