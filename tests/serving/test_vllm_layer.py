"""One attention layer of the plug-in where vLLM is not installed: its own code, over stand-ins of vLLM's classes."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.commands import python

CASES = ("per-group", "no nope", "per layer", "sliding", "latent", "latent per layer", "latent qk-norm")
CASES += ("kept per layer", "kept qk-norm", "kept no nope", "int8 latent qk-norm", "int8 latent no nope")
# Codes, in float64, in which no rounding of another order of sums moves one; computed keys and kept ones.
CASES += ("codes latent", "codes latent per layer", "codes latent qk-norm", "codes latent sliding")
CASES += ("codes kept per layer", "codes kept qk-norm", "codes kept some sliding")
EIGHT_BITS = 2**-3  # relative error that keys in 8 bits make in a row of few numbers, at most
CODE = "import sys; from tests.serving.test_vllm_layer import main; main(*sys.argv[1:])"
PAGE = 4
PAGES = 16
TABLES = [[0, 2, 9, 4, 1, 11], [3, 8, 5, 6, 0, 0], [12, 13, 7, 0, 0, 0], [12, 13, 10, 0, 0, 0]]
# Sequence -> (first, stop); rows of padding, as in a CUDA graph; columns of the table, which engines cut to the longest
# sequence of a step: one batch size comes with many widths.
STEPS = (
    ({0: (0, 10)}, 0, 3),  # a prompt's first chunk
    ({0: (10, 18), 1: (0, 5)}, 0, 5),  # the rest of it beside another prompt
    ({0: (18, 19), 1: (5, 11)}, 0, 5),  # decode beside a prompt's rest
    *(({0: (19, 20), 1: (11, 12)}, pad, columns) for pad, columns in ((2, 5), (0, 5), (0, 6))),
    *(({0: (20, 21), 1: (12, 13)}, pad, 6) for pad in (2, 0)),
    ({3: (8, 9), 2: (0, 11)}, 0, 6),  # the first one's prefix is on pages that the other writes in this step
)


class Linear(nn.Linear):
    """vLLM's, on one rank: it returns the product, and None for a bias that is added elsewhere."""

    def __init__(self, size: int, out: int, bias: bool, prefix: str) -> None:
        super().__init__(size, out, bias=bias)

    def forward(self, x):
        return super().forward(x), None


def stand_in() -> dict[str, type]:
    """Modules by the names that ``vllm_attention`` imports."""
    bare = (
        "AttentionBackend", "AttentionCGSupport", "AttentionImplBase", "AttentionLayerBase", "AttentionMetadata",
        "AttentionMetadataBuilder", "AttentionSpec", "CommonAttentionMetadata", "VllmConfig",
    )  # fmt: skip
    own = {"UNIFORM_BATCH": 0, "__class_getitem__": classmethod(lambda cls, of: cls)}
    found = {name: type(name, (), own) for name in bare}
    found |= dict.fromkeys(("ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear"), Linear)
    found |= {"FullAttentionSpec": SimpleNamespace, "_encode_layer_name": str}
    found |= {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    for name in (
        "vllm", "vllm.config", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.layers",
        "vllm.model_executor.layers.attention_layer_base", "vllm.model_executor.layers.linear", "vllm.utils",
        "vllm.utils.torch_utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend",
        "vllm.v1.kv_cache_interface",
    ):  # fmt: skip
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(found)
    return found


def alone(attention, hidden, window):
    """The model's own layer over a sequence, [S, hidden]."""
    visible = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
    visible &= ~visible.tril(-window) if window else visible
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
    return attention(hidden[None], attention_mask=mask, position_ids=torch.arange(len(hidden))[None])[0][0]


@torch.no_grad()
def main(*cases: str) -> None:
    stand_in()
    import mha2mla.serving.vllm_attention as attention
    from mha2mla.serving.paged_step import EngineSteps
    from tests.modeling.models import TOLERANCE, mla_model, relative_error

    attention.SERVED_BY = "mla_reference"
    layers, metadata = {}, []
    engine = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=100),
        num_speculative_tokens=0,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=PAGE),
    )
    library = torch.library.Library("vllm", "DEF")
    library.define("unified_attention_with_output(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str name) -> ()")

    def attend(q, k, v, out, name):
        layers[name].impl.forward(layers[name], q, k, v, layers[name].kv_cache, metadata[-1], out)

    library.impl("unified_attention_with_output", attend, "CPU")
    for case, index in itertools.product(cases, range(2)):
        torch.manual_seed(0)
        has_codes, eight = case.startswith("codes "), case.startswith("int8")
        keys = {"latent_bits": [4, 3]} if has_codes else {}
        model = mla_model(case.removeprefix("int8 ").removeprefix("codes "), **keys)
        model.config.rotary_key_cache = "int8" if eight else model.config.rotary_key_cache
        model, limit = model.double() if has_codes else model, EIGHT_BITS if eight else TOLERANCE
        dtype = engine.model_config.dtype = model.dtype
        ours = model.model.layers[index].self_attn
        if has_codes:
            ours.latent_centers.normal_(std=0.5)
        torch.set_default_dtype(dtype)  # as vLLM makes a model
        layer = attention.MLAParallelAttention(model.config, index, LlamaRMSNorm, engine, f"{case}.{index}")
        layer.load_state_dict(ours.state_dict())
        cached, spec = model.config.cached_geometry(index), layer.get_kv_cache_spec(engine)
        width, row_bytes = spec.head_size, cached.cache_bytes_per_token(dtype.itemsize)
        assert cached.has_codes == has_codes and layer.impl.head_size == width
        assert width * spec.dtype.itemsize == row_bytes and (spec.dtype == torch.uint8) == (has_codes or eight)
        hidden = [torch.randn(length, 48) for length in (21, 13, 11, 9)]
        hidden[3][:8] = hidden[2][:8]
        metadata.append(None)
        zeros = ours.o_proj.bias.expand(21, -1) if ours.o_proj.bias is not None else torch.zeros(21, 48)
        assert torch.equal(layer(hidden[0]), zeros)  # while memory is measured
        layer.kv_cache = torch.zeros(
            attention.LatentBackend.get_kv_cache_shape(PAGES, PAGE, 1, width), dtype=spec.dtype
        )
        unused = [page for page in range(PAGES) if page not in itertools.chain(*TABLES)]
        layer.kv_cache.view(torch.uint8)[unused] = 255  # NaN
        steps = EngineSteps([layer.constants], layer.impl.backend, dtype, 64, torch.device("cpu"))
        expected = [alone(ours, rows, layer.constants.window) for rows in hidden]
        for parts, pad, columns in STEPS:
            new = [*(stop - first for first, stop in parts.values()), *[0] * pad]
            totals = [*(stop for _, stop in parts.values()), *[0] * pad]
            places, rest = [torch.arange(*part) for part in parts.values()], torch.zeros(pad, dtype=torch.long)
            slots = [torch.tensor(TABLES[s])[p // PAGE] * PAGE + p % PAGE for s, p in zip(parts, places, strict=True)]
            table = torch.tensor([*(TABLES[s][:columns] for s in parts), *[[0] * columns] * pad], dtype=torch.int32)
            where, seqlens = (torch.cat([*places, rest]), torch.cat([*slots, rest - 1])), torch.tensor(totals).int()
            step = steps.step(layer.kv_cache, new, totals, *where, table, seqlens)
            metadata.append(attention.LatentMetadata(step, steps))
            asked = [hidden[s][slice(*part)] for s, part in parts.items()]
            found = layer(torch.cat([*asked, torch.zeros(pad, 48)])).split([*map(len, asked), pad])
            for (s, part), rows in zip(parts.items(), found[:-1], strict=True):
                error = relative_error(rows, expected[s][slice(*part)])
                assert error < limit, (case, index, parts, error)
            layer.kv_cache = layer.kv_cache.clone()  # as when vLLM gives a layer other pages
            assert layer.views is None
        torch.set_default_dtype(torch.float32)


def long_drafts() -> None:
    """Copies of lengths to the host, and the lengths that a step gets."""
    stand_in()
    from mha2mla.serving.vllm_attention import LatentMetadataBuilder

    class Lengths(torch.Tensor):
        copies = 0

        def cpu(self):
            Lengths.copies += 1
            return super().cpu()

    builder = object.__new__(LatentMetadataBuilder)
    builder._layers = [SimpleNamespace(kv_cache=None)]
    builder._steps = SimpleNamespace(step=lambda rows, query_lengths, totals, *rest: totals)
    for drafted, news, copied in ((0, (1, 1), 0), (0, (9, 1), 0), (7, (8, 8), 0), (8, (40, 1), 0), (8, (9, 9), 1)):
        builder._longest_draft, Lengths.copies = 1 + drafted, 0
        common = SimpleNamespace(
            num_actual_tokens=sum(news), num_reqs=2, query_start_loc_cpu=torch.tensor([0, news[0], sum(news)]),
            seq_lens=torch.tensor([50, 40]).as_subclass(Lengths), seq_lens_cpu_upper_bound=torch.tensor([53, 43]),
            positions=torch.arange(sum(news)), slot_mapping=torch.arange(sum(news)),
            block_table_tensor=torch.zeros(2, 1),
        )  # fmt: skip
        totals = builder.build(0, common).step
        assert (totals, Lengths.copies) == ([50, 40] if copied else [53, 43], copied), (drafted, news)


def test_long_drafts_get_exact_lengths():
    done = python("from tests.serving.test_vllm_layer import long_drafts; long_drafts()")
    assert done.returncode == 0, done.stderr[-3000:]


def test_vllm_layer_gives_the_layers_output():
    """In a process of its own, since the stand-ins would hide vLLM from other tests."""
    done = python(CODE, *CASES)
    assert done.returncode == 0, done.stderr[-3000:]
