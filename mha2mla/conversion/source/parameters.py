"""Which stored tensors make which parameters of a model: transformers' own conversion, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


class StoredParameters:
    """The names and shapes that a checkpoint of ``model`` has, and how its parameters are put together from them.

    For most families a parameter is the tensor of its name. A mixture of experts is stored expert by expert (the only
    layout on the hub, and what ``save_pretrained`` writes), and held in memory as stacks of all experts, sometimes
    under another name; a checkpoint that holds a stack under the parameter's own name is understood too.

    Args:
        model: may be on the meta device.
        stored: names of the tensors in the checkpoint.

    Attributes:
        shapes: stored name -> expected shape; without tensors that are tied to another.
        sources: parameter (or persistent buffer) -> the stored names it is made of.
    """

    def __init__(self, model: PreTrainedModel, stored: Collection[str]) -> None:
        self._model = model
        tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
        state = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in tied}
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._converters = {pattern: item for item in converters for pattern in item.source_patterns}
        self._patterns: dict[str, str] = {}  # stored name -> pattern of its converter
        shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
        sources: dict[str, list[str]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            parameter, pattern = rename_source_key(name, renamings, converters)
            sources.setdefault(parameter, []).append(name)
            if pattern is not None:
                self._patterns[name] = pattern
        for parameter, names in sources.items():
            if names != [parameter] and parameter in stored:
                for name in names:
                    self._patterns.pop(name, None)
                    del shapes[name]
                shapes[parameter] = tuple(state[parameter].shape)
                sources[parameter] = [parameter]
        self.shapes = shapes
        self.sources = {parameter: tuple(names) for parameter, names in sources.items()}

    def assemble(self, parameter: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """One parameter from its stored tensors.

        Args:
            read: stored name -> tensor.
        """
        names = self.sources[parameter]
        if names[0] not in self._patterns:
            return read(names[0])
        converter = deepcopy(self._converters[self._patterns[names[0]]])
        for name in names:
            converter.add_tensor(parameter, name, self._patterns[name], read(name))
        made = converter.convert(parameter, model=self._model, config=self._model.config)[parameter]
        return made[0] if isinstance(made, list) else made
