"""What AutoModel and AutoModelForSequenceClassification make of a converted checkpoint: its base model, other heads."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast

from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.model import MHA2MLAPreTrainedModel, build_base_model


class MHA2MLAModel(MHA2MLAPreTrainedModel):
    """The source's base model with :class:`~mha2mla.modeling.MLAAttention` in every layer, as ``model``.

    It runs the expanded form, differentiable, over the caches of transformers.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\.", r"^score\."]

    def __init__(self, config: MHA2MLAConfig) -> None:
        super().__init__(config)
        self.model = build_base_model(config)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **options: Any) -> BaseModelOutputWithPast:
        """As the source's base model: ``attention_mask``, ``position_ids``, ``past_key_values``, ``inputs_embeds``, …

        Returns:
            ``last_hidden_state`` [B, S, hidden] after the final norm, and what else was asked for.
        """
        return self.model(input_ids=input_ids, **options)


class MHA2MLAForSequenceClassification(GenericForSequenceClassification, MHA2MLAPreTrainedModel):
    """A class for the last token of each sequence that is no padding: ``score`` [num_labels, hidden] on the base model,
    whose losses and arguments are those of transformers' own classes."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\."]

    def __init__(self, config: MHA2MLAConfig) -> None:
        MHA2MLAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = build_base_model(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()
