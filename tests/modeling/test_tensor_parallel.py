"""Two ranks of tensor parallelism, by gloo on a CPU: what one device computes, or refused by name."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from mha2mla.modeling import LatentCache, MHA2MLAForCausalLM, PagedSource
from mha2mla.modeling.tensor_parallel import tensor_parallel_plan
from tests.commands import ROOT
from tests.modeling import models

# A rotary key per head and per group, or none cached; norms of queries, biases, ranks by layer, windows, codes.
CASES = ("per-group", "per layer", "some sliding", "latent qk-norm", "per-head", "kept qk-norm", "latent codes")
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def prompt() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3, 25).view(2, 11), "attention_mask": models.left_mask(11, 0, 3)}


@torch.no_grad()
def results(model) -> dict[str, torch.Tensor]:
    """Greedy tokens over both kinds of cache, in both forms, and logits of a ragged batch."""
    given = {name: tensor.to(model.device) for name, tensor in prompt().items()}
    found = {}
    for backend, length in ((None, None), (None, 32), ("mla_expanded", None)):
        model.config.attention_backend = backend
        cache = LatentCache(model.config, max_cache_len=length)
        made = model.generate(**given, past_key_values=cache, disable_compile=True, **OPTIONS)
        found[f"{backend} {length}"] = made.cpu()
    model.config.attention_backend = None
    cache = model.paged_cache(4, 16)
    batch = cache.extend({cache.open(): 5, cache.open(): 11})
    new = batch.flatten([given["input_ids"][0, :5], given["input_ids"][1]])
    found["batch"] = model.forward_batch(new, cache.step(batch), all_logits=True).cpu()
    return found


@torch.no_grad()
def of_source(model) -> torch.Tensor:
    """Logits of a prompt, over a paged cache."""
    paged = PagedSource(model.eval())
    cache, ids = paged.paged_cache(2, 16), prompt()["input_ids"][0].to(model.device)
    return paged.forward_batch(ids, cache.step(cache.extend({cache.open(): len(ids)})), all_logits=True).cpu()


def rank_main(folder: str, cases: Sequence[str] = CASES) -> None:
    """What each process does: all cases, against what one process wrote; then what is refused."""
    options = {"dtype": torch.float32, "distributed_config": {"tp_size": 2}}
    for case in cases:
        model = MHA2MLAForCausalLM.from_pretrained(Path(folder, case), **options).eval()
        attention = model.model.layers[0].self_attn
        assert len(attention.q_proj.weight.to_local()) * 2 == len(attention.q_proj.weight), case
        whole = model.config.layer_geometry(0)
        cached = model.paged_cache(1, 16).tensors[0]
        assert cached["latent_cache"].shape[-1] == (20 if whole.has_codes else whole.kv_lora_rank)
        if whole.num_rope_heads > 1:  # split with the heads that read them
            assert cached["rope_cache"].shape[2] * 2 == whole.num_rope_heads
        wanted = torch.load(Path(folder, f"{case}.pt"))
        for name, value in results(model).items():
            if name == "batch":
                assert models.relative_error(value, wanted[name]) < models.TOLERANCE, case
            else:
                assert torch.equal(value, wanted[name]), (case, name)
    source = AutoModelForCausalLM.from_pretrained(Path(folder, "source"), attn_implementation="mha2mla", **options)
    assert models.relative_error(of_source(source), torch.load(Path(folder, "source.pt"))) < models.TOLERANCE
    with pytest.raises(ValueError, match="tensor_parallel_size is more than 1"):
        model(prompt()["input_ids"].to(model.device), use_cache=False).logits.sum().backward()
    with pytest.raises(ValueError, match="share one of num_rope_heads=3"):
        MHA2MLAForCausalLM.from_pretrained(Path(folder, "odd groups"), **options)
    distributed.destroy_process_group()


def write(folder: Path, case: str, model: MHA2MLAForCausalLM) -> None:
    """A checkpoint for the ranks, and what one process makes of it."""
    model.save_pretrained(folder / case)
    torch.save(results(model), folder / f"{case}.pt")


def write_source(folder: Path) -> None:
    """The same of a source model."""
    model = models.source_model("llama")
    model.save_pretrained(folder / "source")
    model.set_attn_implementation("mha2mla")
    torch.save(of_source(model), folder / "source.pt")


def gloo_rank_main(rank: str, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    rank_main(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers takes the GPUs; see test_gpu_ranks.py")
def test_two_ranks_compute_what_one_does(tmp_path):
    for case in (*CASES, "odd groups"):
        keys = {"latent_bits": 4} if case.endswith(" codes") else {}
        write(tmp_path, case, models.mla_model(case.removesuffix(" codes"), **keys))
    write_source(tmp_path)
    code = "import sys; from tests.modeling.test_tensor_parallel import gloo_rank_main as main; main(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def test_the_plan_is_the_sources_but_for_its_attention():
    plan = tensor_parallel_plan(models.source_config("qwen3-moe"))
    assert plan["layers.*.mlp.experts.down_proj"] == "rowwise"
    assert {name for name in plan if ".self_attn" in name} == {
        "layers.*.self_attn",
        "layers.*.self_attn.q_proj",
        "layers.*.self_attn.o_proj",
    }


def test_queries_normed_over_all_heads_are_not_split():
    normed = models.full_rank(models.source_model("olmo2")).model.layers[0].self_attn
    with pytest.raises(ValueError, match="q_norm is over 48 numbers, all heads"):
        normed.split_heads(0, 2)
