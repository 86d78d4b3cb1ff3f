"""from_pretrained of a damaged converted checkpoint: refused by name, from headers alone."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.checkpoints import CheckpointError
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.stored_tensors import StoredParameters, check_finite, is_finite
from tests.folders import WEIGHTS, edit_json, edit_weights, read_json
from tests.modeling import models

INDEX = "model.safetensors.index.json"
LAYER = "model.layers.1.self_attn."


@pytest.fixture
def folder(tmp_path):
    models.mla_model().save_pretrained(tmp_path / "mla")
    return tmp_path / "mla"


DAMAGES = {
    "missing": (f"{LAYER}v_b_proj", ..., f"tensor {LAYER}v_b_proj is absent"),
    "unknown": ("model.other", torch.ones(2), r"tensor model\.other .* is unknown to MHA2MLAForCausalLM"),
    "missing outside attention": ("model.norm.weight", ..., "tensor model.norm.weight is absent"),
    "shape": (f"{LAYER}o_proj.weight", lambda x: x[:, 1:], f"tensor {LAYER}o_proj.weight has shape"),
    "transposed": ("model.layers.0.mlp.up_proj.weight", lambda x: x.T, "up_proj.weight has shape"),
    "int8": (f"{LAYER}o_proj.weight", lambda x: x.to(torch.int8), "o_proj.weight in model.safetensors has dtype I8"),
    "bool": ("lm_head.weight", lambda x: x > 0, "lm_head.weight in model.safetensors has dtype BOOL"),
    "float8": ("lm_head.weight", lambda x: x.to(torch.float8_e4m3fn), "has dtype F8_E4M3"),
    "int8 frequencies": (f"{LAYER}inv_freq", lambda x: x.to(torch.int8), f"{LAYER}inv_freq in .* has dtype I8"),
    "negative frequencies": (f"{LAYER}inv_freq", lambda x: -x, f"tensor {LAYER}inv_freq has a frequency of -1"),
    "NaN frequencies": (f"{LAYER}inv_freq", lambda x: x * torch.nan, f"{LAYER}inv_freq has a frequency of nan"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_refused_by_name(damage, folder):
    name, change, message = DAMAGES[damage]
    edit_weights(folder, {name: change})
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_tensors_of_the_caller_are_checked_alike():
    model = models.mla_model()
    load = {"config": model.config}
    again = MHA2MLAForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **load)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    name = f"{LAYER}inv_freq"
    for damage, message in (
        ({name: -model.state_dict()[name]}, "has a frequency of -1"),
        ({name: None}, "is absent from state_dict"),
        ({"lm_head.weight": torch.ones(96, 48, dtype=torch.int64)}, "has dtype torch.int64"),
    ):
        state = {name: tensor for name, tensor in {**model.state_dict(), **damage}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message):
            MHA2MLAForCausalLM.from_pretrained(None, state_dict=state, **load)


@pytest.mark.parametrize("case", ["llama-yarn-tied", "mixtral"])
def test_what_is_stored_otherwise_is_complete(case, tmp_path):
    """Tied embeddings once or twice; experts one by one, or as the stacks that a model holds."""
    model = models.full_rank(models.source_model(case))
    model.save_pretrained(tmp_path)
    stacked = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(stacked, tmp_path / WEIGHTS, {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, stacked[name]) for name, tensor in again.state_dict().items())


def test_one_missing_expert_is_named(tmp_path):
    model = models.full_rank(models.source_model("mixtral"))
    model.save_pretrained(tmp_path)
    name = next(name for name in load_file(tmp_path / WEIGHTS) if "experts.1." in name)
    edit_weights(tmp_path, {name: ...})
    with pytest.raises(CheckpointError, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_shards_outside_the_folder_are_not_read(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="50KB")
    index = read_json(sharded / INDEX)
    first = sorted(set(index["weight_map"].values()))[0]
    (sharded / first).rename(tmp_path / first)
    (sharded / first).symlink_to(tmp_path / first)
    with pytest.raises(CheckpointError, match=f"{first} is a link to .* leads out of"):
        AutoModelForCausalLM.from_pretrained(sharded)
    files = index["weight_map"].items()
    edit_json(sharded / INDEX, weight_map={name: f"../{file}" if file == first else file for name, file in files})
    with pytest.raises(CheckpointError, match=r"'\.\./model-.* leads out of"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_links_of_a_hub_snapshot_are_followed(folder, tmp_path, monkeypatch):
    """By folder, and by hub id."""
    # transformers looks for an adapter of a hub id whatever local_files_only says: 20 s where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache, commit = tmp_path / "models--owner--name", "0123456789" * 4
    snapshot, blobs = cache / "snapshots" / commit, cache / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir(), (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    in_cache = {"cache_dir": tmp_path, "local_files_only": True}
    again = AutoModelForCausalLM.from_pretrained("owner/name", **in_cache)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="leads out of"):
        AutoModelForCausalLM.from_pretrained("owner/name", **in_cache)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(share, folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_weights_that_are_no_safetensors_are_refused(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is no safetensors file"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_requested_mismatches_are_left_to_transformers(folder):
    config = AutoConfig.from_pretrained(folder, vocab_size=104)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape[0] == 104


def test_headers_are_checked_before_weights_are_read(folder, monkeypatch):
    """transformers makes random numbers of what is missing after it has read the rest."""
    edit_weights(folder, {f"{LAYER}v_b_proj": ...})
    read = []
    monkeypatch.setattr(
        "transformers.modeling_utils.convert_and_load_state_dict_in_model", lambda *_, **__: read.append(1)
    )
    with pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not read


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_no_number_is_found_anywhere(value):
    model = models.mla_model()
    check_finite(model)
    for name in ("model.embed_tokens.weight", f"{LAYER}v_b_proj", f"{LAYER}inv_freq"):
        tensor = model.get_parameter(name) if "inv_freq" not in name else model.get_buffer(name)
        kept = tensor.detach().flatten()[-1].item()
        tensor.data.view(-1)[-1] = value
        with pytest.raises(CheckpointError, match=f"tensor {name} has a NaN or infinite value"):
            check_finite(model)
        tensor.data.view(-1)[-1] = kept


def test_what_float32_cannot_hold_is_finite_in_float64():
    model = models.mla_model().double()
    model.lm_head.weight.data[0, 0] = 1e39
    check_finite(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_makes_a_tensor_not_finite(dtype):
    """Wherever it is: in a vector register, a thread's share, or the rest."""
    tensor = torch.randn(3, 70_001).to(dtype)
    assert is_finite(tensor) and is_finite(tensor[:0])
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 5, 33_000, tensor.numel() - 1):
            wrong = tensor.clone()
            wrong.view(-1)[place] = value
            assert not is_finite(wrong), (value, place)


def test_shapes_of_a_tied_head_are_not_asked_for():
    config = models.full_rank(models.source_model("llama-yarn-tied")).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "lm_head.weight" not in StoredParameters(model, ()).shapes
