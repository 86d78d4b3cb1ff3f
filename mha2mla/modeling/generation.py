"""``generate`` over a latent cache: the cache, masks over a static one, captured steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.captured import GraphStore
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.recorders import explain_capture

# Fields of a model's config that ``generate`` takes as arguments.
_CACHE_OPTIONS = ("attention_window", "num_sink_tokens", "rotary_key_cache")


class LatentGenerationMixin(GenerationMixin):
    """``generate`` over a :class:`LatentCache`, for a model whose base model is the source's.

    On CUDA decode steps of one to eight tokens over a growing cache are captured in CUDA graphs and replayed; the
    tokens are the same. ``generate(..., capture=False)``, or ``capture`` in a generation config, turns that off. Pages
    and graphs of the last call are kept for the next one of as many sequences, unless they take more memory than the
    model does, until :meth:`release_captured`.

    ``generate(..., attention_window=1020, num_sink_tokens=4, rotary_key_cache="bfloat16")``, or a generation config
    that has them, stand for what the config says by these names, for the cache of one call.
    """

    graph_store: GraphStore

    def release_captured(self) -> None:
        """Gives back the memory that ``generate`` keeps for its next call: cache pages and CUDA graphs."""
        self.graph_store.release()

    def explain_uncaptured(self) -> str | None:
        """Why ``generate`` would run its decode steps uncaptured, or None; layers that no kernel serves stay so too."""
        return explain_capture(self, self.graph_store.new_recorder.device_type) or self.graph_store.failure

    def _prepare_generation_config(
        self,
        generation_config: GenerationConfig | None,
        capture: bool | None = None,
        attention_window: int | None = None,
        num_sink_tokens: int | None = None,
        rotary_key_cache: str | None = None,
        **kwargs: Any,
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """``generate``'s hook for its config, which takes the arguments ``capture``, by default True, and those of
        ``_CACHE_OPTIONS``, by default the config's."""
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        prepared.capture = getattr(prepared, "capture", True) if capture is None else capture
        for name, given in zip(_CACHE_OPTIONS, (attention_window, num_sink_tokens, rotary_key_cache), strict=True):
            if given is not None:
                setattr(prepared, name, given)
        return prepared, model_kwargs

    def prepare_inputs_for_generation(
        self, *args: Any, past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """transformers' inputs, and ``mla_captured``, by which ``forward`` knows that it may replay a step."""
        inputs = super().prepare_inputs_for_generation(
            *args, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        captured = getattr(past_key_values, "captured", None)
        return inputs if captured is None else {**inputs, "mla_captured": captured}

    def create_masks_for_generate(
        self,
        config: MHA2MLAConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The mask that ``generate`` gives to ``forward`` when the cache is static.

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

        Raises:
            ValueError: an option of ``_CACHE_OPTIONS`` is not what a cache that the caller brings was made with.
        """
        config = self.config.with_options(**{name: getattr(generation_config, name, None) for name in _CACHE_OPTIONS})
        kind = generation_config.cache_implementation
        if (
            generation_config.use_cache is False
            or model_kwargs.get("past_key_values") is not None
            or kind not in (None, "dynamic", "static")
        ):
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            cache = model_kwargs.get("past_key_values")
            has = cache.constants if isinstance(cache, LatentCache) else self.config.attention_constants()
            if config is not self.config and has != config.attention_constants():
                options = ", ".join(f"{name} is {getattr(config, name)!r}" for name in _CACHE_OPTIONS)
                raise ValueError(
                    f"{options} for {type(cache).__name__ if cache is not None else 'no cache'}; expected a LatentCache"
                    " of a config that says so, or that the model's config says so"
                )
            if isinstance(cache, LatentCache):
                captures = generation_config.capture and self.explain_uncaptured() is None
                cache.captured = self.graph_store.steps_for(self, cache) if captures else None
            return
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if kind != "static":
            if generation_config.capture and self.explain_uncaptured() is None:
                prompt = model_kwargs["position_ids"].shape[-1]
                cache = self.graph_store.new_cache(self, config, rows, prompt, max_cache_length)
            else:
                cache = LatentCache(config)
            model_kwargs["past_key_values"] = cache
            return
        # A step compiled for an earlier call is kept as long as the cache has its length.
        length = max(
            max_cache_length, generation_config.max_cache_len or 0, getattr(self, "_previous_max_cache_length", 0)
        )
        self._previous_max_cache_length = length
        cache = model_kwargs["past_key_values"] = LatentCache(config, max_cache_len=length)
        if generation_config.prefill_chunk_size is not None and not hasattr(self, "hf_device_map"):
            # Chunked prefill is compiled, and allocation must stay out of what is.
            cache.early_initialization(rows, 1, 1, dtype=self.dtype, device=self.device)
