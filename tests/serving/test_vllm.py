"""The plug-in inside vLLM: on a CPU its own layers and cache groups around the reference ops; on a GPU, its engine."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import ATTENTION_BACKENDS
from mha2mla.modeling.tensor_parallel import HeadShard
from tests.commands import ROOT, python
from tests.modeling.models import TOLERANCE, full_rank, mla_model, randomise, relative_error, source_model, tokens

pytest.importorskip("vllm", reason="vLLM is not installed (docs/serving.md)")
PAGE = 64
EXPERT_SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SHARED_EXPERT = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}


def experts_of(family, **sizes):
    config = AutoConfig.for_model(family, **EXPERT_SIZES, **sizes)
    return full_rank(randomise(AutoModelForCausalLM.from_config(config).eval()))


CASES = (
    "per-group", "per layer", "latent per layer", "latent qk-norm", "kept per layer", "kept qk-norm", "sliding",
    "maps per query head",
)  # fmt: skip
CODES = ("codes latent per layer", "codes kept qk-norm")
A_CODE_MOVED = 1e-3  # relative error of logits; float32's rounding may move a code


def coded_model(case):
    model = mla_model(case.removeprefix("codes "), latent_bits=[4, 3])
    for layer in model.model.layers:
        layer.self_attn.latent_centers.normal_(std=0.5)
    return model


# name -> a model that vLLM's layers are put together for; ranks that differ by layer in four of them.
MODELS = {
    **{case: partial(mla_model, case) for case in CASES},
    **{case: partial(coded_model, case) for case in CODES},
    "olmo2": lambda: full_rank(source_model("olmo2")),
    "gemma3": lambda: full_rank(source_model("gemma3"), rope_from_latent=True),
}
EXPERTS = {
    "mixtral": lambda: full_rank(source_model("mixtral")),
    "qwen2-moe": lambda: experts_of("qwen2_moe", **SHARED_EXPERT),
    "olmoe": lambda: experts_of("olmoe"),
    "qwen3-moe": lambda: full_rank(source_model("qwen3-moe"), rope_from_latent=True),
}
MODELS |= EXPERTS
CODE = "import sys; from tests.serving.test_vllm import main; main(*sys.argv[1:])"


class Engine:
    """vLLM's model, cache groups and our metadata builder, without its scheduler; of one rank of ``size``."""

    def __init__(self, folder: str, model: torch.nn.Module, rank: int, size: int) -> None:
        from vllm.config import (
            CompilationConfig,
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.config import set_current_vllm_config as current
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
        from vllm.v1.worker.gpu import attn_utils

        from mha2mla.serving.vllm_model import VLLMForCausalLM

        scheduler = SchedulerConfig(
            max_num_batched_tokens=256, max_num_seqs=8, max_model_len=256, is_encoder_decoder=False
        )
        self.config = config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256),
            device_config=DeviceConfig(device="cpu"),
            scheduler_config=scheduler,
            parallel_config=ParallelConfig(tensor_parallel_size=size),
            compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
        )
        config.cache_config.block_size = PAGE
        with current(config):
            store = f"file://{folder}/store"
            init_distributed_environment(
                world_size=size, rank=rank, local_rank=rank, distributed_init_method=store, backend="gloo"
            )
            initialize_model_parallel(size)
            self.model = VLLMForCausalLM(vllm_config=config)
            if size == 1:
                self.check_absent(model)
            loaded = self.model.load_weights(iter(model.state_dict().items()))
            assert {name for name, _ in self.model.named_parameters()} <= loaded
            self.model.load_weights([("model.norm.weight", model.state_dict()["model.norm.weight"])])  # an update
            process_weights_after_loading(self.model, config.model_config, torch.device("cpu"))
            self.specs = attn_utils.get_kv_cache_spec(config)
            groups = get_kv_cache_groups(config, self.specs)
            assert len(groups) == 1  # one block table, whatever the widths of the layers' rows
            self.cache = get_kv_cache_config_from_groups(config, groups, 10_000_000)
            device, context = torch.device("cpu"), config.compilation_config.static_forward_context
            self.groups, _, sizes = attn_utils.init_attn_backend(self.cache, config, device)
            attn_utils.init_kv_cache([], context, self.cache, self.groups, device, "auto", sizes, config)
            cached = [
                HeadShard.of(model.config.cached_geometry(i), rank, size).geometry for i in range(len(self.specs))
            ]
            assert sum(spec.page_size_bytes for spec in self.specs.values()) == PAGE * sum(
                geometry.cache_bytes_per_token(4) for geometry in cached
            )
            for geometry, name in zip(cached, self.specs, strict=True):
                cache, coded = context[name].kv_cache, geometry.has_codes
                assert cache.dtype == (torch.uint8 if coded else torch.float32)
                width = geometry.cache_bytes_per_token(4) // cache.itemsize
                assert tuple(cache.shape[1:]) == (PAGE, width) and cache.is_contiguous()

    def check_absent(self, model: torch.nn.Module) -> None:
        """vLLM itself takes a model whose linears and buffers were not loaded."""
        names = ("self_attn.inv_freq", "self_attn.o_proj.weight", "mlp.up_proj.weight")
        absent = {f"model.layers.1.{name}" for name in names} & model.state_dict().keys()
        assert absent
        for name in sorted(absent):
            others = {other: tensor for other, tensor in model.state_dict().items() if other != name}
            with pytest.raises(ValueError, match=rf"the checkpoint lacks {name} \(1 absent in all\)"):
                self.model.load_weights(iter(others.items()))

    @torch.no_grad()
    def step(self, ids: list[torch.Tensor], begins: list[int], tables: list[list[int]], pad: int) -> list[torch.Tensor]:
        """Logits of new tokens ``ids`` of sequences with ``begins`` cached ones, and ``pad`` rows of padding; of the
        rank's part of the vocabulary."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        lengths = [len(each) for each in ids]
        totals = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        count, rest = sum(lengths), torch.zeros(pad, dtype=torch.long)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), *[count] * pad], dtype=torch.int32)
        at = [torch.arange(begin, total) for begin, total in zip(begins, totals, strict=True)]
        slots = [torch.tensor(table)[p // PAGE] * PAGE + p % PAGE for p, table in zip(at, tables, strict=True)]
        positions, slots = torch.cat([*at, rest]), torch.cat([*slots, rest - 1])
        seqlens = torch.tensor([*totals, *rest], dtype=torch.int32)
        table = torch.tensor([*tables, *[[0] * len(tables[0])] * pad], dtype=torch.int32)
        metadata = build_attn_metadata(
            self.groups, len(seqlens), count + pad, bounds, bounds, max(lengths), seqlens, 256, [table], [slots],
            self.cache, seq_lens_cpu_upper_bound=seqlens, positions=positions,
        )  # fmt: skip
        mapping = dict.fromkeys(self.specs, slots)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(metadata, self.config, num_tokens=count + pad, slot_mapping=mapping),
        ):
            hidden = self.model(torch.cat([*ids, rest]), positions)
        return F.linear(hidden, self.model.lm_head.weight)[:count].split(lengths)

    @torch.no_grad()
    def profile(self, tokens: int) -> None:
        """What vLLM runs before there is a cache, to see what a step takes."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with set_current_vllm_config(self.config), set_forward_context(None, self.config, num_tokens=tokens):
            self.model(torch.zeros(tokens, dtype=torch.long), torch.zeros(tokens, dtype=torch.long))


def main(name: str, folder: str, rank: str, size: str) -> None:
    steps_on_a_cpu(name, folder, int(rank), int(size))


def steps_on_a_cpu(name: str, folder: str, rank: int, size: int) -> None:
    """In a process of its own: vLLM's groups of ranks are global."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import UnspecifiedPlatform

    # No GPU's, which a machine may have: its operators take no tensors of a CPU. Experts have a torch implementation
    # for CPUs, and none for no platform.
    vllm.platforms.current_platform = CpuPlatform() if name in EXPERTS else UnspecifiedPlatform()
    import mha2mla.serving.vllm_attention as attention
    from mha2mla.serving import paged_step
    from mha2mla.serving.plugin import register

    attention.SERVED_BY = paged_step.SERVED_BY = "mla_reference"  # the kernels' oracle
    register()
    torch.manual_seed(0)
    model = MODELS[name]()
    engine, ids = Engine(folder, model, rank, size), [tokens(1, 150)[0], tokens(1, 90)[0]]
    tables, got = [[5, 2, 7], [3, 6, 0]], [[], []]
    layers = [engine.config.compilation_config.static_forward_context[name].impl for name in engine.specs]
    lengths = [layer._warm_up_length for layer in layers]
    assert lengths[0] == 256 and lengths.count(256) == len({*model.config.attention_constants()})
    engine.profile(40)
    assert {layer._warm_up_length for layer in layers} == {None}
    for parts, pad in (
        ({0: (0, 100)}, 0),
        ({0: (100, 148), 1: (0, 88)}, 0),  # a chunk beside a prompt
        ({0: (148, 149), 1: (88, 89)}, 2),  # as in a CUDA graph of four sequences
        ({0: (149, 150), 1: (89, 90)}, 0),
    ):
        begins = [begin for begin, _ in parts.values()]
        new = [ids[sequence][slice(*part)] for sequence, part in parts.items()]
        for sequence, rows in zip(parts, engine.step(new, begins, [tables[s] for s in parts], pad), strict=True):
            got[sequence].append(rows)
    for mine, sequence in zip(got, ids, strict=True):
        with torch.no_grad():
            expected = model(sequence[None]).logits[0]
        found = torch.cat(mine)
        expected = expected[:, rank * found.shape[1] :][:, : found.shape[1]]
        limit = A_CODE_MOVED if name in CODES else TOLERANCE
        assert relative_error(found[:, : expected.shape[1]], expected) < limit, name


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 1) for name in MODELS),
        ("per-group", 2),
        ("latent per layer", 2),
        ("latent qk-norm", 2),
        ("kept qk-norm", 2),
        ("codes kept qk-norm", 2),
        ("qwen3-moe", 2),
    ],
)
def test_vllm_layers_give_the_models_logits(name, size, tmp_path):
    model = MODELS[name]()
    model.config.architectures = ["MHA2MLAForCausalLM"]
    model.save_pretrained(tmp_path)  # ranks read its config; weights they make themselves, all the same
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, name, str(tmp_path), str(rank), str(size)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate(timeout=250)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * size, "".join(text[-3000:] for text in said)


def test_what_is_not_served_is_refused_by_name():
    from vllm.model_executor.models import supports_lora, supports_pp

    from mha2mla.serving.vllm_attention import LatentImpl, _check_served
    from mha2mla.serving.vllm_model import VLLMForCausalLM, family_of

    config = mla_model("shared").config
    config.source_config = {**config.source_config, "model_type": "glm4"}
    with pytest.raises(ValueError, match="model_type is 'glm4'; expected one that is served"):
        family_of(config)
    impl = LatentImpl.__new__(LatentImpl)
    impl.backend = ATTENTION_BACKENDS.get("mla_paged")
    geometry = MLAGeometry(8, 1, 64, 16, 16, 16)

    def asked(cache_dtype, quantized=None):
        model = SimpleNamespace(dtype=torch.bfloat16, hf_config=config, quantization="fp8")
        return SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(cache_dtype=cache_dtype), quant_config=quantized
        )

    for served in ("auto", "bfloat16"):
        _check_served(impl, geometry, asked(served))
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8'; expected 'auto' or 'bfloat16'"):
        _check_served(impl, geometry, asked("fp8"))
    with pytest.raises(ValueError, match="no kernel serves H=8 G=1 d_c=60"):
        _check_served(impl, replace(geometry, kv_lora_rank=60), asked("auto"))
    assert not supports_lora(VLLMForCausalLM) and not supports_pp(VLLMForCausalLM)  # so vLLM refuses them
    with pytest.raises(ValueError, match="quantization is 'fp8'; expected none"):
        VLLMForCausalLM(vllm_config=asked("auto", quantized=object()))


def test_long_drafts_are_not_captured():
    from vllm.v1.attention.backend import AttentionCGSupport

    from mha2mla.serving.vllm_attention import LatentMetadataBuilder

    def captured(drafted):
        return LatentMetadataBuilder.get_cudagraph_support(SimpleNamespace(num_speculative_tokens=drafted), None)

    assert captured(0) == captured(7) == AttentionCGSupport.UNIFORM_BATCH
    assert captured(8) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["random:latent", "--requests", "40"],
        ["random:shared", "--chunk", "256"],
        ["random:per-group", "--no-prefix-caching", "--eager"],
        ["random:by-layer", "--blocks", "48", "--requests", "40"],
    ],
    ids=lambda options: options[0],
)
def test_the_engines_tokens_are_transformers(options):
    command = [sys.executable, "benchmarks/vllm_serving.py", "exact", *options, "--tokens", "64", "--cache-gb", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


ENGINE = """
import sys
from benchmarks.vllm_engine import checkpoint, engine, with_entry_point
with_entry_point()
name, value = sys.argv[1:]
options = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
engine(checkpoint("random:latent", 1), **options, **{name: value or True})
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("enable_lora", "", "does not support LoRA"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype is 'fp8'; expected 'auto' or 'bfloat16'"),
        ("quantization", "fp8", "quantization is 'fp8'; expected none"),
    ],
)
def test_the_engine_refuses_by_name(option, value, said):
    done = python(ENGINE, option, value)
    assert done.returncode != 0 and said in done.stdout + done.stderr, done.stderr[-3000:]
