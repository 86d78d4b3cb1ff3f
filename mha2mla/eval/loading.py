"""Models and tokenizers by folder, hub id, or as they come: the one way in for every evaluation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from mha2mla.checkpoints import find_checkpoint
from mha2mla.environment import compute_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint, converted or not, ready to generate::

        model, tokenizer = mha2mla.load("path/to/llama-mla")

    Args:
        checkpoint: folder or hub id.
        device: default CUDA where there is one.
        dtype: of the weights; default what the checkpoint has.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: ``device`` is none of this machine.
    """
    model = load_model(checkpoint, "checkpoint", device=device, dtype=dtype)
    return model, load_tokenizer(checkpoint, "checkpoint")


def load_model(
    model: Any, name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """A causal language model, ready to evaluate.

    Args:
        model: folder or hub id; or a function that makes a model, or a loaded one, which are taken as they are.
        name: what the caller calls it, for error messages.
        device: default CUDA where there is one.
        dtype: of the weights; default what the checkpoint has.

    Raises:
        FileNotFoundError: ``model`` is neither a folder with a ``config.json`` nor on the hub.
        ValueError: ``device`` is none of this machine.
    """
    if callable(model):
        return (model if isinstance(model, torch.nn.Module) else model()).eval()
    from transformers import AutoModelForCausalLM

    import mha2mla.modeling  # noqa: F401  registers model_type "mha2mla"

    device = compute_device(device)
    model = find_checkpoint(model, name)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto", trust_remote_code=False)
    return loaded.to(device).eval()


def load_tokenizer(model: Any, name: str) -> Any:
    """The tokenizer that lies beside a checkpoint; arguments and errors as for :func:`load_model`.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if isinstance(model, torch.nn.Module):
        raise ValueError(f"tokenizer is None; expected one, since {name} is a loaded model and not a folder")
    from transformers import AutoTokenizer

    import mha2mla.modeling  # noqa: F401  a converted folder's tokenizer is looked up through its config

    folder = find_checkpoint(model, name)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name} {folder!r} has no usable tokenizer: {error}") from error
