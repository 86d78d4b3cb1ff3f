"""Attention ops on tensors. Nothing here knows transformers; one op is one folder or file."""

from mha2mla.kernels.attention_combine import attention_combine
from mha2mla.kernels.attention_varlen.api import attention_varlen, explain_attention_varlen, mla_prefill_varlen
from mha2mla.kernels.attention_varlen.causal import causal_attention, explain_causal_attention
from mha2mla.kernels.gqa_decode.api import explain_gqa_decode, gqa_decode, plan_gqa_decode
from mha2mla.kernels.mixed_attention.api import gqa_attention, mla_attention
from mha2mla.kernels.mixed_attention.layout import (
    FEWEST_EXPANDED,
    MAX_DECODE_QUERY_LENGTH,
    MAX_EXPANDED_BYTES,
    absorbs_up_to,
    expanded_tokens,
    is_absorbed,
)
from mha2mla.kernels.mixed_attention.plan import MixedPlan, plan_gqa_attention, plan_mla_attention
from mha2mla.kernels.mla_decode.api import decodes_codes, explain_mla_decode, mla_absorbed, mla_decode, plan_mla_decode
from mha2mla.kernels.mla_decode.cost import kept_key_bits
from mha2mla.kernels.mla_decode.quantization import dequantize_latent, quantize_latent
from mha2mla.kernels.parallel_compilation import compile_ahead
from mha2mla.kernels.pointwise.api import rms_norm, silu_mul
from mha2mla.kernels.rope_append.api import (
    MAX_SLOTS,
    LatentRope,
    append_w_uk,
    compute_rotary_keys,
    gqa_append,
    kept_keys,
    mla_append,
    rotary_keys,
    rotate_keys,
    slots_of,
)
from mha2mla.kernels.row_codes.api import RowQuantizer, append_codes, read_codes
from mha2mla.kernels.skinny_linear.api import skinny_linear
from mha2mla.kernels.skinny_linear.selection import is_skinny
from mha2mla.kernels.split_kv.choice import MAX_BATCH
from mha2mla.kernels.split_kv.plan import DecodePlan

__all__ = [
    "FEWEST_EXPANDED",
    "MAX_BATCH",
    "MAX_DECODE_QUERY_LENGTH",
    "MAX_EXPANDED_BYTES",
    "MAX_SLOTS",
    "DecodePlan",
    "LatentRope",
    "MixedPlan",
    "RowQuantizer",
    "absorbs_up_to",
    "append_codes",
    "append_w_uk",
    "attention_combine",
    "attention_varlen",
    "causal_attention",
    "compile_ahead",
    "compute_rotary_keys",
    "decodes_codes",
    "dequantize_latent",
    "expanded_tokens",
    "explain_attention_varlen",
    "explain_causal_attention",
    "explain_gqa_decode",
    "explain_mla_decode",
    "gqa_append",
    "gqa_attention",
    "gqa_decode",
    "is_absorbed",
    "is_skinny",
    "kept_key_bits",
    "kept_keys",
    "mla_absorbed",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_prefill_varlen",
    "plan_gqa_attention",
    "plan_gqa_decode",
    "plan_mla_attention",
    "plan_mla_decode",
    "quantize_latent",
    "read_codes",
    "rms_norm",
    "rotary_keys",
    "rotate_keys",
    "silu_mul",
    "skinny_linear",
    "slots_of",
]
