"""Sources, arguments and destinations that are no good are named and leave nothing; sources that are odd convert."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import mha2mla
from mha2mla.checkpoints import CheckpointError
from mha2mla.conversion.destination import DestinationError
from mha2mla.conversion.families import UnsupportedSourceError
from tests.conversion import tiny
from tests.conversion.tiny import SHORT, convert
from tests.folders import edit_weights

KEYS = "model.layers.1.self_attn.k_proj.weight"
# One by the place where it shows: the folder, the headers, the weights, the text.
DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "missing tensor": (lambda f: edit_weights(f, {KEYS: ...}), f"{KEYS} is absent"),
    "unknown tensor": (lambda f: edit_weights(f, {"model.sinks": torch.ones(4)}), "tensor model.sinks .* is unknown"),
    "Inf in a weight": (lambda f: edit_weights(f, {KEYS: lambda weight: weight * torch.inf}), f"{KEYS} in .* has"),
    "no tokenizer": (
        lambda f: [path.unlink() for path in f.glob("tokenizer*.json")],
        "no tokenizer files; copy them from the .* model$",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_source_is_named_and_leaves_nothing(damage, tmp_path):
    source = tiny.checkpoint(tmp_path / "source")
    change, named = DAMAGES[damage]
    change(source)
    with pytest.raises((UnsupportedSourceError, CheckpointError), match=named):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"calibration": "builtin:novel"}, "calibration 'builtin:novel'"),
        ({"calibration": "EMPTY"}, "is empty"),
        ({"calibration": "SHORT"}, "at least one window"),
        ({"calibration": "LATIN"}, "is not UTF-8"),
        ({"calibration": torch.zeros(3, dtype=torch.int64)}, "calibration is torch.int64"),
        ({"calibration": torch.full((1, 8), 999)}, "token 999; expected tokens from 0, below vocab_size=264"),
        ({"recipe": "TEXT LATIN"}, "calibration .*LATIN.* is not UTF-8"),
        ({"recipe": "TEXT absent"}, "calibration .*absent' is no file"),
        ({"evaluation": "EMPTY"}, "is empty"),
        ({"evaluation": "SHORT"}, "evaluation .*at least one window"),
        ({"evaluation": "LATIN"}, "evaluation .*is not UTF-8"),
        ({"device": "cuda:77"}, "device is 'cuda:77'"),
        ({"device": "gpu"}, "device is 'gpu'; expected cpu, cuda or"),
        ({"device": [0]}, r"device is '\[0\]'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"recipe": ["layout"]}, "recipe is a list; expected a Recipe or a mapping of its keys"),
        ({"recipe": {}, "preset": "best"}, "preset is 'best'; expected one of 'auto'"),
        ({"dtype": "int4"}, "dtype is 'int4'; expected one of float32, bfloat16, float16, float64"),
        ({"compute_dtype": None}, "compute_dtype is None"),
        ({"compute_dtype": torch.float8_e4m3fn}, "compute_dtype is torch.float8_e4m3fn"),
        ({"evaluation_tokens": 0}, "evaluation_tokens is 0"),
        ({"evaluation_tokens": "256"}, "evaluation_tokens is '256'"),
        ({"evaluation": None}, "evaluation is None"),
        ({"evaluation": [[1, 2]]}, "evaluation is"),
        ({"evaluation": torch.zeros(2, 1, dtype=torch.int64)}, "evaluation is torch.int64"),
        ({"calibration": 5}, "calibration is 5"),
        ({"calibration": []}, r"calibration is \[\]; expected the name of a text or token windows"),
        ({"calibration": ["one.txt", "two.txt"]}, "calibration has 'one.txt'; expected tensors"),
        ({"calibration": [torch.tensor(3)]}, r"calibration is torch.int64 \(\)"),
        ({"calibration": torch.full((1, 8), -1)}, "calibration has token -1"),
        ({"spill_bytes": "1G"}, "spill_bytes is '1G'"),
        ({"spill_bytes": -1}, "spill_bytes is -1"),
        ({"max_shard_bytes": None}, "max_shard_bytes is None"),
        ({"overwrite": "no"}, "overwrite is 'no'"),
        ({"progress": 1}, "progress is 1"),
        ({"resume": "maybe"}, "resume is 'maybe'; expected one of 'auto', 'never'"),
        ({"recipe": "TOO WIDE"}, "qk_rope_head_dim is 18"),
    ],
)
def test_a_bad_argument_is_named_before_work(keys, named, source, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "SHORT").write_text("short")
    (tmp_path / "LATIN").write_bytes("Grüße".encode("latin-1"))
    texts = sorted(path.name for path in tmp_path.iterdir())
    keys = {key: str(tmp_path / value) if value in texts else value for key, value in keys.items()}
    if keys.get("recipe") == "TOO WIDE":
        keys["recipe"] = tiny.Recipe(layout="per-group", qk_rope_head_dim=18, kv_lora_rank=8)
    elif str(keys.get("recipe")).startswith("TEXT "):
        name = keys["recipe"].removeprefix("TEXT ")
        keys["recipe"] = tiny.Recipe(**{**SHORT, "calibration.text": str(tmp_path / name)})
    with pytest.raises(ValueError, match=named):
        convert(source, tmp_path / "out", **keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == texts


@pytest.mark.parametrize("name", [None, 5, b"x"])
def test_a_path_that_is_none_is_named(name, source, tmp_path):
    with pytest.raises(ValueError, match="source is"):
        convert(name, tmp_path / "out")
    with pytest.raises(ValueError, match="destination is"):
        convert(source, name)


def test_no_name_is_not_the_current_folder(source, monkeypatch):
    monkeypatch.chdir(source)
    with pytest.raises(ValueError, match="source is ''; expected a folder or hub id"):
        convert("", source.parent / "out")


def test_a_tilde_is_the_home_folder(source, monkeypatch):
    monkeypatch.setenv("HOME", str(source.parent))
    with pytest.raises(DestinationError, match=f"destination '{source}' and source '{source}' overlap"):
        convert(source, f"~/{source.name}")
    with pytest.raises(DestinationError, match="overlap"):
        convert(f"~/{source.name}", source)


@pytest.mark.parametrize("keys", [{"layout": "shared", "rope_share": 0.5}, {"layout": "latent"}])
def test_a_head_of_zeros_is_converted(keys, tmp_path):
    """Pruned heads are; where every other pair rotates, all that is left for the latent's keys is zero."""
    source = tiny.checkpoint(tmp_path / "source")
    kept = torch.arange(32)[:, None] >= 16
    edit_weights(source, {"model.layers.1.self_attn.k_proj.weight": lambda weight: weight * kept})
    convert(source, tmp_path / "out", tiny.Recipe(**keys, cache_ratio=0.5, **SHORT))


def test_old_rotary_buffers_in_a_source_are_passed_over(tmp_path):
    source = tiny.checkpoint(tmp_path / "source")
    edit_weights(source, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    convert(source, tmp_path / "out", tiny.Recipe(cache_ratio=1.0, **SHORT))


def test_keyword_arguments_are_recipe_keys(source, tmp_path):
    common = {"evaluation_tokens": 64, "device": "cpu", "progress": False}
    stages = {"fit": {"steps": 1}, "calibration": {"text": "builtin:prose", "tokens": 512, "lengths": 64}}
    keys = {"cache_ratio": 0.25, "layout": "shared", **stages}
    nested = mha2mla.convert(source, tmp_path / "one", preset="minimal", **keys, **common)
    assert nested.recipe == mha2mla.Recipe(preset="minimal", **keys).to_dict()
    flat = {**SHORT, "fit.steps": 1, "layout": "shared"}
    beside = mha2mla.convert(source, tmp_path / "two", {"cache_ratio": 0.25}, **flat, **common)
    assert beside.recipe == nested.recipe
    parameters = inspect.signature(mha2mla.convert).parameters
    assert parameters["recipe_keys"].kind is inspect.Parameter.VAR_KEYWORD
    assert 'cache_ratio=0.5, layout="shared"' in mha2mla.convert.__doc__


@pytest.mark.parametrize(
    ("recipe", "keys", "named"),
    [
        (None, {"layot": "shared"}, r"recipe key 'layot' is unknown; did you mean 'layout'\? expected one of source, "),
        (None, {"overwrit": True}, r"'overwrit' is unknown; did you mean 'overwrite'\? .*overwrite, .*, fit.steps, "),
        (None, {"fit": {"stops": 3}}, r"'fit.stops' is unknown; did you mean 'fit.steps'\?"),
        (None, {"cache_ratio": 2}, "cache_ratio is 2; expected a number above 0, at most 1"),
        (None, {"fit": {"steps": 3}, "fit.steps": 3}, "'fit.steps' is given twice"),
        ({"cache_ratio": 0.5}, {"cache_ratio": 0.5}, "'cache_ratio' is given twice, by itself, .* or in the recipe"),
        (mha2mla.Recipe(), {"cache_ratio": 0.5}, "cache_ratio is given beside a Recipe; expected it in the recipe"),
        (None, {"calibration": {"text": 3}}, "calibration.text is 3"),
    ],
)
def test_a_bad_keyword_argument_is_named(recipe, keys, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        mha2mla.convert(tmp_path / "absent", tmp_path / "out", recipe, **keys)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_disk_too_small_for_the_weights_is_named_at_once(free, tmp_path, monkeypatch, capsys):
    source = tiny.checkpoint(tmp_path / "source")
    (source / "model.fp16.safetensors").symlink_to("pruned")  # none of the model's files
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    convert(source, tmp_path / "new" / "out", {"cache_ratio": 1.0}, progress=True)
    said = "disk: 0 GB are free at the destination, the source's weights take "
    assert (said in capsys.readouterr().err) == (free == 0)
