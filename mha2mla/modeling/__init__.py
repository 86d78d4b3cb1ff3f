"""The Hugging Face model of a converted checkpoint: config, attention, cache, generation."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from mha2mla.modeling import source_attention, tensor_parallel
from mha2mla.modeling.attention import MLAAttention
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.batch import CacheCapacityError, SequenceBatch
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.model import (
    MHA2MLAForCausalLM,
    MHA2MLAForSequenceClassification,
    MHA2MLAModel,
    MHA2MLAPreTrainedModel,
)
from mha2mla.modeling.paged_cache import BatchModel, PagedCache
from mha2mla.modeling.pages import StaleBatchError
from mha2mla.modeling.registry import AttentionBackend, AttentionRegistry
from mha2mla.modeling.served import LayerAttention, what_serves
from mha2mla.modeling.source_attention import PagedSource, paged_model
from mha2mla.modeling.step import AttentionStep

source_attention.register()
tensor_parallel.register()
AutoConfig.register(MHA2MLAConfig.model_type, MHA2MLAConfig, exist_ok=True)
AutoModel.register(MHA2MLAConfig, MHA2MLAModel, exist_ok=True)
AutoModelForCausalLM.register(MHA2MLAConfig, MHA2MLAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MHA2MLAConfig, MHA2MLAForSequenceClassification, exist_ok=True)

__all__ = [
    "ATTENTION_BACKENDS", "AttentionBackend", "AttentionRegistry", "AttentionStep", "BatchModel", "CacheCapacityError",
    "LatentCache", "LayerAttention", "MHA2MLAConfig", "MHA2MLAForCausalLM", "MHA2MLAForSequenceClassification",
    "MHA2MLAModel", "MHA2MLAPreTrainedModel", "MLAAttention", "PagedCache", "PagedSource", "SequenceBatch",
    "StaleBatchError", "paged_model", "what_serves",
]  # fmt: skip
