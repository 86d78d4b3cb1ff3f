"""Loading of models and tokenizers for every evaluation: folder, hub id, or a loaded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mha2mla.checkpoints import CheckpointError, damage_named, find_checkpoint
from mha2mla.conversion.fit.repeatable import UNGROUPED_SDPA
from mha2mla.conversion.source.opening import check_model_folder, read_tokenizer
from mha2mla.environment import compute_device, named_dtype
from mha2mla.modeling.stored_tensors import check_finite


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint, converted or not, ready to generate::

        model, tokenizer = mha2mla.load("path/to/llama-mla")

    Args:
        checkpoint: folder or hub id.
        device: default CUDA where there is one.
        dtype: of the weights, such as ``"bfloat16"``; default what the checkpoint has.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it is incomplete or damaged, or has no usable tokenizer.
        ValueError: ``device`` is none of this machine, or ``dtype`` none of weights.
    """
    model = load_model(checkpoint, "checkpoint", device=device, dtype=dtype)
    return model, load_tokenizer(checkpoint, "checkpoint")


def load_model(
    model: Any, name: str, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> torch.nn.Module:
    """A causal language model, ready to evaluate.

    Args:
        model: folder or hub id; or a function that makes a model, or a loaded one, which are taken as they are.
        name: what the caller calls it, for error messages.
        dtype: of the weights; default what the checkpoint has.

    Raises:
        FileNotFoundError: ``model`` is neither a folder with a ``config.json`` nor on the hub.
        CheckpointError: it is incomplete or damaged, or a file lies outside its folder; naming file, field or tensor.
        ValueError: ``device`` is none of this machine, or ``dtype`` none of weights.
    """
    if callable(model):
        return (model if isinstance(model, torch.nn.Module) else model()).eval()
    asked = "auto" if dtype is None else named_dtype(dtype)
    device, found = compute_device(device), _find_model(model, name)
    with damage_named(f"{name} {found!r} cannot be loaded"):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            found, dtype=asked, trust_remote_code=False, output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
            raise CheckpointError(f"tensor {missing[0]} is absent from {found} ({len(missing)} absent in all)")
    loaded = loaded.to(device).eval()
    grouped = loaded.config.model_type != "mha2mla" and loaded.config._attn_implementation == "sdpa"
    if grouped and loaded.dtype == torch.float32 and loaded.device.type == "cuda":
        loaded.set_attn_implementation(UNGROUPED_SDPA)
    check_finite(loaded)
    return loaded


def load_config(checkpoint: str | os.PathLike[str], name: str) -> PreTrainedConfig:
    """The config of a checkpoint; arguments and errors as for :func:`load_model`."""
    found = _find_model(checkpoint, name)
    with damage_named(f"{name} {found!r} has no usable config"):
        return AutoConfig.from_pretrained(found, trust_remote_code=False)


def kernels_dtype(checkpoint: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 for a float32 checkpoint on a CUDA device, else None."""
    if device.type != "cuda":
        return None
    config = load_config(checkpoint, "model").get_text_config()
    return torch.bfloat16 if config.dtype == torch.float32 else None


def _find_model(checkpoint: str | os.PathLike[str], name: str) -> str:
    """Folder or hub id of a checkpoint; of a folder, what can be refused before transformers opens its files."""
    found = find_checkpoint(checkpoint, name)
    if Path(found).is_dir():
        check_model_folder(Path(found))
    return found


def load_tokenizer(model: Any, name: str) -> Any:
    """The tokenizer that lies beside a checkpoint; arguments and errors as for :func:`load_model`.

    Raises:
        CheckpointError: there is none, it is damaged, or it needs code of its own.
    """
    if isinstance(model, torch.nn.Module):
        raise ValueError(f"tokenizer is None; expected one, since {name} is a loaded model and not a folder")
    return read_tokenizer(find_checkpoint(model, name), name)
