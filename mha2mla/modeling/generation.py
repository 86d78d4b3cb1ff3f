"""What ``generate`` asks of a model that has a latent cache: the cache itself, and masks over a static one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig


class LatentGenerationMixin(GenerationMixin):
    """``generate`` over a :class:`LatentCache`, for a model whose base model is the source's."""

    def create_masks_for_generate(
        self,
        config: MHA2MLAConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What ``generate`` hands to ``forward`` as a mask when the cache is static.

        Over a LatentCache it stays 2-D, because the absorbed form takes its starts from it, and gets the cache's
        length, so that a compiled step sees one shape. Other caches get the masks of the source's architecture.
        """
        if isinstance(past_key_values, LatentCache):
            if attention_mask is None:
                return None
            return F.pad(attention_mask, (0, past_key_values.capacity - attention_mask.shape[-1]))
        return create_masks_for_generate(
            config=self.model.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """``generate``'s hook for its cache: a LatentCache for "dynamic" (and by default) and "static".

        The other implementations, and caches that the caller brings, are left to transformers.
        """
        kind = generation_config.cache_implementation
        if (
            generation_config.use_cache is False
            or model_kwargs.get("past_key_values") is not None
            or kind not in (None, "dynamic", "static")
        ):
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if kind != "static":
            model_kwargs["past_key_values"] = LatentCache(self.config)
            return
        # A step compiled for an earlier call is kept as long as the cache has its length.
        length = max(
            max_cache_length, generation_config.max_cache_len or 0, getattr(self, "_previous_max_cache_length", 0)
        )
        self._previous_max_cache_length = length
        cache = model_kwargs["past_key_values"] = LatentCache(self.config, max_cache_len=length)
        if generation_config.prefill_chunk_size is not None and not hasattr(self, "hf_device_map"):
            # Chunked prefill is compiled, and allocation must stay out of what is.
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            cache.early_initialization(rows, 1, 1, dtype=self.dtype, device=self.device)
