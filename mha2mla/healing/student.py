"""The two models of a healing: what of the student is trained, and what of it is the teacher's own memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION, UNMASKED_REPEATABLE, UNMASKED_SDPA
from mha2mla.eval.loading import load_model
from mha2mla.healing.settings import Settings
from mha2mla.modeling.config import visible_tokens

ATTENTION = ".self_attn."
# Maps to and from the latent: what a source has not.
_LATENT = ("kv_a_proj", "k_a_proj", "v_a_proj", "k_b_proj", "v_b_proj", "k_rope_proj", "q_b_proj")
_NOISE = frozenset({"attention_dropout", "residual_dropout", "jitter_noise"})  # attributes of layers and of routers
_LORA_ALPHA = 2  # scale of an adapter
_WIDE = 2048  # hidden states from which activations are recomputed where memory is not tried


@dataclass
class Models:
    """Teacher and student on one device.

    Attributes:
        student: converted model; its trained parameters are float32 and require gradients, its other ones do not.
        teacher: source model.
        adapted: the student under PEFT's wrapper; None without adapters.
        shared: names of the student's parameters that are the teacher's own memory.
        recomputes: the backward pass recomputes activations.
    """

    student: nn.Module
    teacher: nn.Module
    adapted: Any
    shared: frozenset[str]
    recomputes: bool

    def recompute(self) -> None:
        """Makes the backward pass recompute activations."""
        self.student.gradient_checkpointing_enable({"use_reentrant": False})
        self.recomputes = True

    def trained(self) -> dict[str, Tensor]:
        """Trained weights by their names in the checkpoint, float32; adapters are merged, and no longer there.

        Under FSDP every process has to call it: each gets the full weights.
        """
        if self.adapted is None:
            return {name: whole(each) for name, each in self.student.named_parameters() if each.requires_grad}
        names = {name for name, _ in _adapted(self.student)}
        self.adapted.merge_and_unload()
        self.adapted = None
        return {name: whole(each) for name, each in self.student.named_parameters() if name in names}


def whole(weight: Tensor) -> Tensor:
    """All of a weight of which FSDP may have left this process a part."""
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def sharded_as(weight: Tensor, full: Tensor) -> Tensor:
    """``full``, which every process has, in parts where ``weight`` is."""
    if not isinstance(weight, DTensor):
        return full
    return distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)


def is_sharded() -> bool:
    """True if the launcher asks for FSDP.

    Raises:
        ValueError: it asks for version 1, for weights in the main process alone, for wrappers that rename weights, or
            for 16 bits, in which FSDP would round the loss and add up gradients.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return False
    for name, default, expected in (
        ("FSDP_VERSION", "1", "2"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false", "false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "false", "false"),
        ("ACCELERATE_MIXED_PRECISION", "no", "no"),
    ):
        value = os.environ.get(name, default)
        if value.lower() != expected:
            flag = f"accelerate launch --{name.removeprefix('ACCELERATE_').lower()} {expected}"
            raise ValueError(f"{name} is {value!r}; expected {expected} ({flag})")
    return True


def load_models(source: Path, converted: Path, device: torch.device, settings: Settings) -> Models:
    """Both models, ready to train: float32 on a CPU, on CUDA the trained weights alone.

    Frozen parameters that equal the source's are the source's tensors: there is no second copy. Under FSDP, which
    shards the student's, they are copies.

    Raises:
        CheckpointError: a checkpoint is incomplete or damaged.
        ImportError: adapters are asked for and PEFT is not installed.
    """
    dtype = torch.float32 if device.type == "cpu" else None
    teacher = load_model(source, "source", device=device, dtype=dtype).requires_grad_(False)
    student = load_model(converted, "converted", device="cpu", dtype=dtype)
    return prepare_models(teacher, student, device, settings)


def prepare_models(teacher: nn.Module, student: nn.Module, device: torch.device, settings: Settings) -> Models:
    """Prepares models in memory like :func:`load_models`: changes both in place and moves the student to ``device``.

    Raises:
        ImportError: adapters are asked for and PEFT is not installed.
    """
    # Not load_model's choices, which are for float32: this is autocast.
    longest = settings.long_length
    see_all = all(min(visible_tokens(model.config, longest)) == longest for model in (teacher, student))
    teacher.set_attn_implementation(UNMASKED_SDPA if see_all else "sdpa")
    student.requires_grad_(False).set_attn_implementation(UNMASKED_REPEATABLE if see_all else REPEATABLE_ATTENTION)
    for module in student.modules():  # the teacher has no such noise; the written config keeps the source's values
        for name in ("p",) if isinstance(module, nn.Dropout) else _NOISE & vars(module).keys():
            setattr(module, name, 0.0)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(settings.train == "all" or (settings.train == "attention" and ATTENTION in name))
    shared = frozenset() if is_sharded() else _share(student, teacher)
    adapted = _adapt(student, settings) if settings.train == "lora" else None
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for _, parameter in _adapted(student):  # merging in bfloat16 would round twice
        parameter.data = parameter.data.float()
    student.to(device)
    models = Models(student, teacher, adapted, shared, False)
    is_tried = device.type == "cuda" and not is_sharded()  # memory.py
    is_wide = student.config.hidden_size >= _WIDE and not is_tried
    if settings.checkpointing == "always" or (settings.checkpointing == "auto" and is_wide):
        models.recompute()
    return models


def parameter_groups(student: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Trained parameters of each learning rate, for an optimizer."""
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            is_latent = ATTENTION in name and any(f".{part}" in name for part in _LATENT)
            rate = settings.latent_rate if is_latent and settings.latent_rate is not None else settings.rate
            groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


def _share(student: nn.Module, teacher: nn.Module) -> frozenset[str]:
    """Puts the teacher's parameters in the place of the student's frozen ones that equal them."""
    own = dict(teacher.named_parameters(remove_duplicate=False))
    found = []
    for prefix, module in student.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}"
            other = own.get(full)
            if parameter.requires_grad or other is None or ATTENTION in full:
                continue
            if other.dtype == parameter.dtype and torch.equal(other.cpu(), parameter.cpu()):
                setattr(module, name, other)
                found.append(full)
    return frozenset(found)


def _adapt(student: nn.Module, settings: Settings) -> Any:
    """PEFT's wrapper of ``student``, whose attention projections then have adapters; maps by head have none."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("train is 'lora', which needs peft: pip install -e '.[heal]' in the clone") from error
    linear = [name for name, part in student.named_modules() if ATTENTION in name and isinstance(part, nn.Linear)]
    torch.manual_seed(settings.seed)
    rank = settings.lora_rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers has renamed
        return get_peft_model(student, LoraConfig(r=rank, lora_alpha=_LORA_ALPHA * rank, target_modules=linear))


def _adapted(student: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights under adapters, by their names in the checkpoint."""
    for name, parameter in student.named_parameters():
        if ".base_layer.weight" in name:
            yield name.replace(".base_layer.", "."), parameter
