"""Attention ops on tensors. Nothing here knows transformers; one op is one folder."""

from mha2mla.kernels.mla_decode.api import DecodePlan, explain_mla_decode, mla_decode, plan_mla_decode

__all__ = ["DecodePlan", "explain_mla_decode", "mla_decode", "plan_mla_decode"]
