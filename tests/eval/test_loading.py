"""What every verb reads models with: damaged folders, sources and converted ones, are refused by name."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mha2mla
from mha2mla.checkpoints import LONGEST_MESSAGE, CheckpointError, shorten
from mha2mla.cli.verbs import main
from mha2mla.conversion.fit.repeatable import UNGROUPED_SDPA
from mha2mla.eval.loading import load_model, load_tokenizer
from tests.folders import edit_config, edit_weights
from tests.ops import SdpaCalls

NORM = "model.norm.weight"


@pytest.fixture(params=["source", "converted"])
def folder(request, tiny_source, tiny_converted, tmp_path):
    original = tiny_source if request.param == "source" else tiny_converted
    return shutil.copytree(original, tmp_path / request.param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (..., f"{NORM} is absent"),
        (lambda weight: weight * torch.nan, f"{NORM} has a NaN or infinite"),
        (lambda weight: weight * -torch.inf, f"{NORM} has a NaN or infinite"),
        (lambda weight: weight.to(torch.int8), f"{NORM} in model.safetensors has dtype I8"),
        (lambda weight: weight[1:], f"{NORM} has shape"),
    ],
    ids=["missing", "NaN", "infinite", "int8", "shape"],
)
def test_a_damaged_tensor_is_refused_by_name(change, message, folder):
    edit_weights(folder, {NORM: change})
    with pytest.raises(CheckpointError, match=message):
        mha2mla.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_links_out_of_the_folder_are_not_read(name, folder, tmp_path):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link to"):
        mha2mla.load(folder, device="cpu")


CONFIG_VALUES = (
    ("softmax_scale", 10**30),
    ("softmax_scale", True),
    ("attention_window", [[4]]),
    ("rope_attention_scaling", 10**30),
    ("kv_lora_rank", "32"),
    ("num_rope_heads", -1),
    ("num_hidden_layers", 10**12),
    ("source_config", None),
    ("source_config", {"model_type": "llama", "num_hidden_layers": 10**12}),
    ("source_config", {"model_type": "llama", "output_hidden_states": "12"}),
    ("schema_version", 10**9),
    ("model_type", ["mha2mla"]),
    ("attention_backend", "x" * 1_000_000),
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("key", "value"), CONFIG_VALUES, ids=[key for key, _ in CONFIG_VALUES])
def test_a_config_that_no_model_has_is_refused_by_the_key(key, value, tiny_converted, tmp_path):
    folder = shutil.copytree(tiny_converted, tmp_path / "mla")
    edit_config(folder, **{key: value})
    with pytest.raises(
        ValueError, match="num_hidden_layers|output_hidden_states|source_config" if key == "source_config" else key
    ) as error:
        load_model(folder, "checkpoint", device="cpu")
    assert len(str(error.value)) <= LONGEST_MESSAGE


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_pipes_are_refused_unopened(name, folder):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        load_model(folder, "checkpoint", device="cpu")
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        load_tokenizer(folder, "checkpoint")


def test_a_source_of_pickled_weights_is_left_to_transformers(tiny_source, tmp_path):
    folder = shutil.copytree(tiny_source, tmp_path / "source")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    state = load_model(folder, "source", device="cpu").state_dict()
    assert torch.equal(state[NORM], load_model(tiny_source, "source", device="cpu").state_dict()[NORM])
    tensors = torch.load(folder / "pytorch_model.bin")
    del tensors[NORM]
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{NORM} is absent"):
        load_model(folder, "source", device="cpu")


def test_messages_are_short(folder, capsys):
    edit_weights(folder, {"x" * 3_000_000: torch.ones(1)})
    assert main(["generate", str(folder), "--prompt", "a", "--device", "cpu"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "is unknown to" in message and len(message) < LONGEST_MESSAGE + 60
    assert main(["convert", "a", "b", "--recipe", "y" * 100_000]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "File name too long" in message and len(message) < LONGEST_MESSAGE + 60
    assert shorten("a  b\nc") == "a b c"
    assert len(shorten("y" * 1_000)) == LONGEST_MESSAGE and shorten("y" * LONGEST_MESSAGE) == "y" * LONGEST_MESSAGE


@pytest.mark.parametrize("padded", [False, True], ids=["causal", "left padded"])
def test_ungrouped_sdpa_equals_transformers(tiny_source, padded):
    model = load_model(tiny_source, "source", device="cpu", dtype=torch.float64)
    ids = torch.randint(5, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : 7 if padded else 0] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation(UNGROUPED_SDPA)
    with SdpaCalls() as sdpa:
        found = model(ids, attention_mask=mask).logits
    heads = model.config.num_attention_heads
    assert model.config.num_key_value_heads < heads
    assert set(sdpa.calls) == {(heads, heads, False)}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_ungrouped_sdpa_decodes_over_grouped_keys(tiny_source):
    model = load_model(tiny_source, "source", device="cpu", dtype=torch.float64)
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits[:, -1]
    model.set_attn_implementation(UNGROUPED_SDPA)
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    with SdpaCalls() as sdpa:
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    assert sdpa.calls
    assert all(keys == model.config.num_key_value_heads or grouped for _, keys, grouped in sdpa.calls)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
def test_float32_source_holds_no_square_of_its_length(tiny_source):
    model = load_model(tiny_source, "source", device="cuda", dtype=torch.float32)
    length, heads = 8192, model.config.num_attention_heads
    ids = torch.randint(5, 200, (1, length), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        model.base_model(ids, use_cache=False)
    assert torch.cuda.max_memory_allocated() - before < heads * length**2 * 4 / 4
