"""Attention ops on tensors. Nothing here knows transformers; one op is one folder."""

from mha2mla.kernels.attention_combine.api import attention_combine
from mha2mla.kernels.mla_decode.api import mla_decode
from mha2mla.kernels.mla_decode.dispatch import explain_mla_decode
from mha2mla.kernels.mla_decode.plan import DecodePlan, plan_mla_decode

__all__ = ["DecodePlan", "attention_combine", "explain_mla_decode", "mla_decode", "plan_mla_decode"]
