"""Tiny random checkpoints of every family, with a byte-level tokenizer, for tests that convert."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import mha2mla
from mha2mla.conversion import recipe as recipes
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.layer import finish_layer, prepare_layer
from mha2mla.conversion.layer_walk import LayerWalk
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.pipeline import report


def Recipe(preset: str = "minimal", **keys) -> recipes.Recipe:
    """What a test does not say is no better preset's choice. Keys have ``_`` for their dot: ``fit_steps=3``."""
    return recipes.Recipe.from_preset(preset, **dotted(keys))


# Drawn from a text that is cut into tokens in no time: the default one takes longer than all else of a conversion.
SHORT = {"preset": "minimal", "calibration.text": "builtin:prose", "calibration.tokens": 512, "calibration.lengths": 64}


FULL = {"cache_ratio": 1.0, **SHORT}


def dotted(keys: dict) -> dict:
    """Recipe keys as mappings have them."""
    return {re.sub("^(rope|latent|fit|calibration)_", r"\1.", key): value for key, value in keys.items()}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
PHI3_LONGROPE = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
QWEN2_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
QWEN3_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 24}
TWO_KINDS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
}
GEMMA3 = {**TWO_KINDS, "head_dim": 24, "query_pre_attn_scalar": 16}
BY_TYPE_YARN = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
# Of width 16, whatever head_dim the other families have: Phi-3's and OLMo2's code wants hidden / heads.
HEADS = {"hidden_size": 64}

# name -> (family, config keys): biases, norms, head widths, RoPE scaling, tied embeddings, windows, each at least once.
CASES = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-llama3-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "seed-oss": ("seed_oss", {"head_dim": 24}),
    "seed-oss-output-bias": ("seed_oss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True}),
    "ernie": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "apertus": ("apertus", {"head_dim": 24, "rope_parameters": LLAMA3}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3-sliding": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "smollm3-yarn": ("smollm3", {"no_rope_layers": [1, 0], "rope_parameters": YARN}),
    "mistral": ("mistral", {"head_dim": 24}),
    "mistral-sliding": ("mistral", {"sliding_window": 9}),
    "ministral": ("ministral", {**TWO_KINDS, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}),
    "mixtral-sliding": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen2-moe": ("qwen2_moe", QWEN2_EXPERTS),
    "qwen2-moe-sliding": ("qwen2_moe", {**QWEN2_EXPERTS, "use_sliding_window": True, "sliding_window": 9}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**QWEN3_EXPERTS, "mlp_only_layers": [0]}),
    "qwen3-moe-sliding": ("qwen3_moe", {**QWEN3_EXPERTS, "use_sliding_window": True, "sliding_window": 9}),
    "phi3": ("phi3", HEADS),
    "phi3-mha-sliding": ("phi3", {**HEADS, "num_key_value_heads": 4, "sliding_window": 9}),
    "phi3-longrope": ("phi3", {**HEADS, "rope_parameters": PHI3_LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-partial": (
        "phi3",
        {**HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3-partial-longrope": (
        "phi3",
        {
            **HEADS,
            "rope_parameters": {
                **PHI3_LONGROPE,
                "partial_rotary_factor": 0.5,
                "short_factor": PHI3_LONGROPE["short_factor"][:4],
                "long_factor": PHI3_LONGROPE["long_factor"][:4],
            },
            "original_max_position_embeddings": 64,
        },
    ),
    "glm": ("glm", {"head_dim": 24}),
    "glm4-no-biases": ("glm4", {"attention_bias": False}),
    "olmo2": ("olmo2", HEADS),
    "olmo2-mha-biases": ("olmo2", {**HEADS, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo3-yarn": ("olmo3", {**HEADS, **TWO_KINDS, "rope_parameters": BY_TYPE_YARN}),
    "olmoe": ("olmoe", {**HEADS, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("gemma3_text", {**GEMMA3, "query_pre_attn_scalar": 24}),
    "gemma3-yarn": ("gemma3_text", {**GEMMA3, "rope_parameters": BY_TYPE_YARN}),
    "gemma3-mqa-linear": ("gemma3_text", {**GEMMA3, "num_key_value_heads": 1, "rope_parameters": GEMMA3_LINEAR}),
    "qwen3-biases-yarn": ("qwen3", {"attention_bias": True, "head_dim": 16, "rope_parameters": YARN}),
}


# Of these, the traits that statistics see differently: norms over all heads, norms of weight 1 + w, tables by layer.
FAMILIES = ("llama", "smollm3", "mistral", "qwen2", "qwen3", "phi3", "olmo2-mha-biases", "olmo3-yarn", "gemma3")
FAMILIES += ("ministral", "phi3-partial-longrope", "glm", "glm4-no-biases")
FAMILIES += ("seed-oss", "ernie", "apertus", "mixtral", "qwen2-moe-sliding", "qwen3-moe", "olmoe")


def tokenizer(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Bytes and ``merges`` (from 258) as tokens, behind a start token that it adds itself."""
    from tokenizers.processors import TemplateProcessing

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>")


def config(family: str = "llama", **keys):
    """A config of two small layers; ``keys`` override."""
    values = {
        "vocab_size": 264,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return AutoConfig.for_model(family, **{**values, **keys})


def model(family: str = "llama", *, seed: int = 0, **keys) -> torch.nn.Module:
    """A random model whose attention looks at content and whose biases are not zero."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(family, **keys), attn_implementation="sdpa").eval().float()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.6, 1.4)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(std=1.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made


def checkpoint(folder: Path, family: str = "llama", *, shard_bytes: int | str = "5GB", **keys) -> Path:
    """A saved random model with its tokenizer."""
    model(family, **keys).save_pretrained(folder, max_shard_size=shard_bytes)
    tokenizer().save_pretrained(folder)
    return folder


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """float32 logits of a saved model, through ``from_pretrained``."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return loaded(tokens).logits


def difference(converted: Path, source: Path) -> float:
    """Relative error of the logits of saved models."""
    tokens = some_tokens()
    return relative(logits(converted, tokens), logits(source, tokens))


def convert(source, destination, recipe=SHORT, *, plot=False, **keys):
    """``mha2mla.convert`` on the CPU, verified over few tokens; the card's plot takes a third of the time."""
    keys = {"evaluation_tokens": 256, "device": "cpu", "progress": False, **keys}
    with pytest.MonkeyPatch.context() as patch:
        if not plot:
            patch.setattr(report, "loss_by_layer", _no_plot)
        return mha2mla.convert(source, destination, recipe, **keys)


def _no_plot(rows):
    raise ImportError("left out of tests")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


class State:
    """A model's parameters, as a checkpoint's reader hands them out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensor = model.state_dict().__getitem__


def convert_layer(spec, geometry, recipe, weights, statistics) -> dict[str, torch.Tensor]:
    """The tensors of one MLA layer, named as in the checkpoint below ``self_attn.``."""
    rules = recipe.layer_rules(geometry)
    return finish_layer(spec, geometry, rules, prepare_layer(spec, geometry, rules, weights, statistics))


def walk_over(folder: Path, recipe: recipes.Recipe, source=None) -> LayerWalk:
    """Without geometries, over a checkpoint of the config ``source``: by default three layers with heads of 32."""
    source, reader = source or config(head_dim=32, num_hidden_layers=3), CheckpointReader(folder)
    adapter = ADAPTERS[source.model_type]
    spec = adapter.specify(source)
    model = StreamedModel(source, reader, spec.sliding_windows, device=torch.device("cpu"), dtype=torch.float32)
    return LayerWalk(model, adapter, spec, (), recipe, TokenBlocks.of(some_tokens(8, 40)), folder)


def some_tokens(windows: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(2, 258, (windows, length), generator=torch.Generator().manual_seed(1))


def loaded_tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def spilt_files(folder: Path) -> int:
    """How many files without a name, of those that ``folder`` holds, this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f" {folder}/" in line and line.endswith("(deleted)")})
