"""The student beside its teacher as one module whose output is the loss, and passes over it that train nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import deterministic
from mha2mla.healing.loss import distillation_loss, divergence
from mha2mla.healing.student import Models

# One graph for each shape: with dynamic ones bits would depend on the shapes that a process saw before. Values are
# rounded where the uncompiled code rounds them.
_COMPILATION = {"dynamic": False, "options": {"emulate_precision_casts": True}}
# Ranks and bits by layer, both models and window lengths share this limit; beyond PyTorch's 8 nothing was compiled.
_GRAPHS = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}


class Distillation(nn.Module):
    """The student as the Trainer sees it: its output is the loss, its state the trained weights alone.

    Args:
        models: the teacher is no submodule; nothing moves, wraps or saves it.
        autocast: dtype of products; None: the weights' own.
    """

    def __init__(self, models: Models, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.compiled, self.diverge = False, divergence
        self.student, self._teacher, self._autocast = models.student, (models.teacher,), autocast
        # accelerate reads here which modules FSDP shards one by one
        self._no_split_modules = sorted({type(layer).__name__ for layer in models.student.base_model.layers})
        self.register_state_dict_post_hook(_keep_trained)
        self.register_load_state_dict_post_hook(lambda module, found: found.missing_keys.clear())

    def compile_layers(self) -> None:
        """Lets torch.compile make the decoder layers and the loss of training; evaluation runs them as they are.

        Only once it is known whether layers recompute activations: those that are to and were compiled before would run
        compiled in the backward pass alone.
        """
        self.compiled, self.diverge = True, torch.compile(divergence, **_COMPILATION)
        for model in (*self._teacher, self.student):
            for layer in model.base_model.layers:
                layer.compile(**_COMPILATION)

    def forward(self, input_ids: Tensor, lengths: Sequence[int], weights: Tensor | None = None) -> dict[str, Tensor]:
        """Mean over tokens of KL(teacher ‖ student) in nats.

        Args:
            input_ids: [blocks, size]; the last token of a window has a prediction as the others.
            lengths: [blocks], tokens of a window in each.
            weights: [blocks, size], of mean 1 over the text; None: ones.
        """
        stance = torch.compiler.set_stance("default" if self.compiled and self.training else "force_eager")
        with stance, torch.compiler.config.patch(_GRAPHS):
            return self._forward(input_ids, lengths, weights)

    def _forward(self, input_ids: Tensor, lengths: Sequence[int], weights: Tensor | None) -> dict[str, Tensor]:
        (teacher,), total, kinds = self._teacher, 0.0, sorted(set(map(int, lengths)))
        for length in kinds:
            # A slice where all are alike: the host would wait for the device to index it.
            chosen = slice(None) if len(kinds) == 1 else [place for place, each in enumerate(lengths) if each == length]
            ids = input_ids[chosen].view(-1, length)
            with torch.autocast(ids.device.type, self._autocast, enabled=self._autocast is not None):
                with torch.no_grad():
                    expected = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
                found = self.student.base_model(input_ids=ids, use_cache=False).last_hidden_state
                total = total + distillation_loss(
                    found.flatten(0, 1),
                    expected.flatten(0, 1),
                    self.student.get_output_embeddings(),
                    teacher.get_output_embeddings(),
                    weights=None if weights is None else weights[chosen].flatten(),
                    diverge=self.diverge,
                )
        return {"loss": total / input_ids.numel()}


def _keep_trained(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    kept = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in kept]:
        del state[name]


@deterministic(warn_only=True)  # the mode of train: in another one layers are compiled again
def warm_up(distillation: Distillation, blocks: TokenBlocks, per_pass: int) -> None:
    """Compiles what is compiled, by a pass of each length; warns as :func:`first_pass`."""
    ids = blocks.tokens[:1].expand(per_pass, -1).to(distillation.student.device)
    for length in blocks.window_lengths:
        first_pass(distillation, ids, length)


def first_pass(distillation: Distillation, ids: Tensor, length: int) -> None:
    """A pass without a step over ``ids`` in windows of ``length``. Where layers do not compile, it and all that follow
    run as without compilation.

    Warns:
        UserWarning: a layer does not compile, and why.
    """
    try:
        run_pass(distillation, ids, length)
        return
    except (RuntimeError, OSError) as error:
        if not distillation.compiled or is_out_of_memory(error):
            raise
        why = str(error).strip().partition("\n")[0]
    # Behind the handler, whose error holds the frames that hold the tensors.
    distillation.compiled = False
    warnings.warn(f"decoder layers were not compiled, and training is slower: {why:.300}", stacklevel=3)
    distillation.zero_grad()
    run_pass(distillation, ids, length)


def is_out_of_memory(error: BaseException) -> bool:
    """True for errors of a GPU without enough memory; some libraries raise them as other types."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "ALLOC_FAILED" in said


def run_pass(distillation: Distillation, ids: Tensor, length: int) -> None:
    """A forward and backward pass over ids [blocks, size] in windows of ``length``; its gradients are dropped."""
    gradients(distillation, ids, length)
    distillation.zero_grad()


def gradients(distillation: Distillation, ids: Tensor, length: int) -> None:
    """Accumulates the gradients of a pass over ids [blocks, size] in windows of ``length``."""
    distillation.train()(ids, [length] * len(ids))["loss"].backward()
