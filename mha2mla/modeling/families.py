"""The source families: one entry for each, with all that sets it apart from Llama. No torch.

Conversion reads how the attention is stored and computed, decode which decoder layers compute what Llama's do, the
plug-in for vLLM and the exports which layers they can build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Family:
    """A family, by default with Llama's layers: RoPE on halves, separate q/k/v/o, one rotary table, pre-norms.

    Attributes:
        biased: for q, k, v and o, whether there is a bias, or the key of the config that says it.
        fused_qkv: q, k and v are the rows of one projection.
        qk_norm, norm_per_head: queries and keys are normed before RoPE, over each head or over all together.
        norm_offset: added to the stored weight of every norm.
        mixture_of_experts: some MLPs are experts.
        window_in_every_layer: the config's window is every layer's; else that of layers in ``layer_types``.
        rotating_layers: key of the config that says which layers rotate; None: all.
        table_by_layer_type: ``rope_parameters`` holds parameters for each of ``layer_types``.
        partial_rotary: its code looks at ``partial_rotary_factor``.
        neighbours_pair: rotary pairs are (2j, 2j + 1) instead of halves.
        softmax_width: key of the number whose root divides q·k; None: the head's width.
        norms: before and after the attention, before and after the MLP; None where there is none.
        scaled_embeddings: embeddings are multiplied by sqrt(hidden), rounded to the model's dtype.
        refused: keys of the config that must not be set, with the reason.
        llama_decoder: prefix of transformers' classes whose model, layer, norm and MLP compute what Llama's do.
        served_by_vllm: the plug-in builds its layers.
    """

    model_type: str
    biased: tuple[bool | str, ...] = ("attention_bias",) * 4
    fused_qkv: bool = False
    qk_norm: bool = False
    norm_per_head: bool = True
    norm_offset: float = 0.0
    mixture_of_experts: bool = False
    window_in_every_layer: bool = False
    rotating_layers: str | None = None
    table_by_layer_type: bool = False
    partial_rotary: bool = False
    neighbours_pair: bool = False
    softmax_width: str | None = None
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    scaled_embeddings: bool = False
    refused: tuple[tuple[str, str], ...] = ()
    llama_decoder: str | None = None
    served_by_vllm: bool = True

    @property
    def norms_to_mlp(self) -> tuple[str, ...]:
        """Norms that the attention's output passes on its way to the MLP."""
        return tuple(name for name in self.norms[1:3] if name is not None)


_UNBIASED = (False,) * 4
_GLM = {
    "partial_rotary": True,
    "neighbours_pair": True,
    "biased": ("attention_bias",) * 3 + (False,),
    "served_by_vllm": False,
}
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

_FAMILIES = (
    # Llama 2, 3 and 3.x, SmolLM2 and every checkpoint that calls itself llama.
    Family("llama", llama_decoder="Llama"),
    # Llama whose output projection has a bias of its own key.
    Family("seed_oss", biased=("attention_bias",) * 3 + ("attention_out_bias",), served_by_vllm=False),
    # ERNIE 4.5 (dense): rotary pairs of neighbours.
    Family("ernie4_5", biased=("use_bias",) * 4, neighbours_pair=True, served_by_vllm=False),
    # RMSNorm over each head of q and k, and an MLP of xIELUs.
    Family(
        "apertus",
        qk_norm=True,
        norms=("attention_layernorm", None, "feedforward_layernorm", None),
        served_by_vllm=False,
    ),
    # Llama in which some layers do not rotate at all, as by frequencies of zero.
    Family("smollm3", rotating_layers="no_rope_layers"),
    # Llama without biases, with a sliding window in every layer where the config sets one.
    Family("mistral", window_in_every_layer=True, biased=_UNBIASED, llama_decoder="Mistral"),
    # Ministral 8B: windows in the layers that the config lists. transformers takes a mistral that lists them for one.
    Family("ministral", biased=_UNBIASED, llama_decoder="Ministral"),
    Family("mixtral", window_in_every_layer=True, biased=_UNBIASED, mixture_of_experts=True),
    # Qwen2 and Qwen2.5 (dense): a sliding window in the layers that the config lists.
    Family("qwen2", biased=(True, True, True, False), llama_decoder="Qwen2"),
    # Qwen1.5-MoE and Qwen2-MoE: experts, and one that all tokens share.
    Family("qwen2_moe", biased=("qkv_bias",) * 3 + (False,), mixture_of_experts=True),
    # RMSNorm over each head of q and k before RoPE.
    Family("qwen3", qk_norm=True, llama_decoder="Qwen3"),
    # The same beside experts, or a dense MLP in the layers that the config lists.
    Family("qwen3_moe", qk_norm=True, window_in_every_layer=True, mixture_of_experts=True),
    # Phi-3, Phi-4 and Phi-4-mini: some rotate only part of a head.
    Family("phi3", fused_qkv=True, partial_rotary=True, window_in_every_layer=True, biased=_UNBIASED),
    # GLM-4-9B: half of every head rotates, in pairs of neighbours; no bias on o.
    Family("glm", **_GLM),
    # GLM-4-0414: norms after the attention and after the MLP, too.
    Family(
        "glm4",
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        **_GLM,
    ),
    # RMSNorm over all heads of q and k together; the attention reads the residual stream itself.
    Family("olmo2", qk_norm=True, norm_per_head=False, norms=_POST_NORMS),
    # The same with sliding windows, and long-context scaling of RoPE in the other layers only.
    Family("olmo3", qk_norm=True, norm_per_head=False, norms=_POST_NORMS, table_by_layer_type=True),
    Family(
        "olmoe",
        qk_norm=True,
        norm_per_head=False,
        mixture_of_experts=True,
        refused=(("clip_qkv", "clipped keys and values are not linear"),),
    ),
    # Text only: norms on q and k with weight 1 + w, a softmax scale of its own, and two rotary tables, one for layers
    # with a sliding window and one for the others.
    Family(
        "gemma3_text",
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        table_by_layer_type=True,
        qk_norm=True,
        norm_offset=1.0,
        scaled_embeddings=True,
        softmax_width="query_pre_attn_scalar",
        refused=tuple(
            (key, "a source that has it is not supported")
            for key in ("use_bidirectional_attention", "final_logit_softcapping")
        ),
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _FAMILIES})
