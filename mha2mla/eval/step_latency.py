"""Time of a whole decode step, a token in, logits out, over a filled cache of fixed size; and of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import mul
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mha2mla.eval.float64 import in_float64
from mha2mla.eval.measurement import measured, unless_out_of_memory
from mha2mla.modeling.config import cached_tokens, layer_token_bytes, visible_tokens
from mha2mla.testing.numeric_check import ERROR_FACTOR, Judgement, verdict

# The absorbed and the expanded form are equal in exact arithmetic and round differently: how differently depends on the
# conditioning of the latent's basis. Between the two forms, an error this many times larger is still rounding.
ACROSS_FORMS_FACTOR = 8.0
# Nine tenths of the square of a bfloat16 model's errors lie in one direction of its logits, so a position's error is
# little more than the size of one normal number, and two right ones may be a factor of five apart. Errors and their
# yardstick are taken over as many positions, whose root mean squares agree within a tenth or two.
CHECKED_STEPS = 16

Model = torch.nn.Module | Callable[[], torch.nn.Module]


def decode_step_latency(models: Mapping[str, Model], **options: Any) -> list[dict[str, Any]]:
    """One whole decode step of each model: the rows of :func:`forward_latency` at its level ``"step"``."""
    return list(forward_latency(models, levels=("step",), **options))


@torch.inference_mode()
def forward_latency(
    models: Mapping[str, Model],
    *,
    levels: Sequence[Literal["step", "prefill"]] = ("step",),
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (512,),
    check: bool = True,
    min_run_time: float = 0.5,
    prefill_chunk: int = 1024,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Forward passes of each model: a decode step with ``seqlen`` tokens cached, the new one among them; a prompt of
    ``seqlen`` tokens, of which the last one's logits are asked for.

    For a step each model fills a cache of fixed size with the same random tokens, then makes the same step again and
    again, the cache being put back by one token after each. First the logits of the last 16 tokens, each by a step of
    its own, are checked against the same model in float64 without a cache (norms and angles in float32, as transformers
    has them), a module's weights at a time being wide. The yardstick is its cacheless logits at its own dtype; for a
    converted model, whose step is another form of the same sum, those with a wider factor, and the same steps with the
    decode op's torch reference. Of a prompt the logits of the same tokens are checked, by one forward pass.

    Args:
        models: name → causal language model, or what makes one and lets go of it afterwards; all on one device.
        levels: what is measured.
        batch_sizes, seqlens: every pair of them is measured.
        check: without it caches hold random numbers, nothing is compared, and every row's status says so.
        min_run_time: seconds of measurement per row.
        prefill_chunk: tokens per sequence that are prefilled at a time before a step.
        seed: of the tokens.

    Yields:
        Rows with the keys of :data:`COLUMNS`, and ``ms_per_token`` of a step (median; a step yields ``batch`` tokens at
        once), ``weight_bytes`` and ``read_bytes``, what it reads of the weights and of the cache: of a layer with a
        sliding window no more than that. One that needs too much memory says so in its status.
    """
    longest, largest = max(seqlens), max(batch_sizes)
    # The first and the last sequence of every batch are checked.
    checked = sorted({0} | {batch - 1 for batch in batch_sizes})
    for name, make in models.items():
        model = made_or_why(make)
        if isinstance(model, str):
            for level, batch, seqlen in product(levels, batch_sizes, seqlens):
                row = {"op": _OPS[level], "implementation": name, "batch": batch, "seqlen": seqlen}
                yield row | {"status": model}
            continue
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (largest, longest), generator=generator).to(model.device)
        rights = _rights(model, ids[checked], seqlens) if check else [None] * len(seqlens)
        for level, batch, (column, seqlen) in product(levels, batch_sizes, enumerate(seqlens)):
            row = row_of(_OPS[level], name, model, batch, seqlen)
            if isinstance(rights, str):
                yield row | {"status": rights}
                continue
            here = [index for index, sequence in enumerate(checked) if sequence in (0, batch - 1)]
            right = rights[column] and tuple(logits[here] for logits in rights[column])
            run = partial(_step_row, chunk=prefill_chunk) if level == "step" else _prefill_row
            yield row | unless_out_of_memory(run, model, ids[:batch, :seqlen], right, min_run_time)
        del model


_OPS = {"step": "decode step", "prefill": "prefill"}


def made_or_why(make: Model) -> torch.nn.Module | str:
    """The model; or why there is none, where memory does not suffice for its weights."""
    found = unless_out_of_memory(lambda: {"model": make if isinstance(make, torch.nn.Module) else make()})
    return f"{found['status']}, for weights" if "status" in found else found["model"]


def row_of(op: str, name: str, model: torch.nn.Module, batch: int, seqlen: int) -> dict[str, Any]:
    """What is known of a row before anything is measured."""
    row = {"op": op, "implementation": name, "batch": batch, "seqlen": seqlen}
    row |= {"dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type}
    return row | {"weight_bytes": weight_bytes(model)}


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a step reads: all but the embeddings, of which it reads a row a token, where these are not
    the logits' weights too."""
    embeddings = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embeddings
    return sum(each.nbytes for each in model.parameters()) - (0 if tied else embeddings.nbytes)


def prompt_factor(model: torch.nn.Module) -> float:
    """How many times as far from float64 as its cacheless logits those of a model's prompt may be: a converted model
    may compute them in another form."""
    return ACROSS_FORMS_FACTOR if model.config.model_type == "mha2mla" else ERROR_FACTOR


def cache_sizes(
    config: PreTrainedConfig, batch: int, length: int, token_bytes: Sequence[int], *, static: bool = False
) -> dict[str, int]:
    """Bytes of ``batch`` sequences of ``length`` tokens, all layers: held by the cache, and read by a decode step.

    Args:
        token_bytes: per layer.
        static: the cache is transformers' ``StaticCache``, or ours of fixed size.
    """
    tokens = {
        "cache_bytes": cached_tokens(config, length, static=static),
        "read_bytes": visible_tokens(config, length),
    }
    return {name: batch * sum(map(mul, of_layers, token_bytes)) for name, of_layers in tokens.items()}


Right = tuple[Tensor, Tensor]  # logits [sequences, positions, vocabulary] at the model's dtype and in float64


def _checked(seqlen: int) -> int:
    """Of a text's last tokens, how many are checked."""
    return min(CHECKED_STEPS, seqlen - 1)


def _rights(model: torch.nn.Module, ids: Tensor, seqlens: Sequence[int]) -> list[Right] | str:
    """Of each length the logits of its last positions without a cache; or why there are none."""
    # Attention is causal: the logits after a prefix do not depend on what follows, so one pass serves all lengths.
    counts = [_checked(seqlen) for seqlen in seqlens]
    spans = [torch.arange(end - count, end) for end, count in zip(seqlens, counts, strict=True)]
    positions = torch.cat(spans).to(ids.device)

    def logits() -> dict[str, Any]:
        yardstick = _logits_without_cache(model, ids, positions)
        with in_float64(model):
            exact = _logits_without_cache(model, ids, positions)
        return {"rights": list(zip(yardstick.split(counts, 1), exact.split(counts, 1), strict=True))}

    found = unless_out_of_memory(logits)
    if "status" in found:
        return f"{found['status']}, in the check against float64; --no-check times it all the same"
    return found["rights"]


def _step_row(
    model: torch.nn.Module, ids: Tensor, right: Right | None, min_run_time: float, chunk: int
) -> dict[str, Any]:
    """Of one batch and length; ``right`` is None where nothing is checked."""
    batch, seqlen = ids.shape
    if right is None:
        step = _DecodeStep.filled(model, ids, chunk)
    else:
        step = _DecodeStep.prefilled(model, ids, chunk, left=_checked(seqlen))
    row = cache_sizes(model.config, batch, seqlen, step.layer_token_bytes, static=True)
    check = None if right is None else _check_step(step, ids, sorted({0, batch - 1}), *right)
    row |= measured(step, check, row["read_bytes"], ids.device, min_run_time)
    return row | ({"ms_per_token": row["us_p50"] / 1e3} if "us_p50" in row else {})


def _prefill_row(model: torch.nn.Module, ids: Tensor, right: Right | None, min_run_time: float) -> dict[str, Any]:
    """Of one batch of prompts, as ``generate`` begins with them: into a new cache."""

    def call(kept: int = 1) -> Tensor:
        return model(input_ids=ids, use_cache=True, logits_to_keep=kept).logits

    check = None
    if right is not None:
        check = _judge_logits(call(_checked(ids.shape[1]))[sorted({0, len(ids) - 1})], *right, prompt_factor(model))
    row = measured(call, check, None, ids.device, min_run_time, graph=False)
    return row | ({"tokens_per_s": ids.numel() / row["us_p50"] * 1e6} if "us_p50" in row else {})


def _logits_without_cache(model: torch.nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """[sequences, positions, vocabulary] logits of whole texts, one text at a time."""
    return torch.cat([model(input_ids=text[None], use_cache=False, logits_to_keep=positions).logits for text in ids])


@dataclass(frozen=True)
class _DecodeStep:
    """A model, its filled cache and the next token: calling it makes the step, and leaves the cache as it was."""

    model: torch.nn.Module
    cache: Any
    token: Tensor
    position: Tensor

    @classmethod
    def prefilled(
        cls, model: torch.nn.Module, ids: Tensor, chunk: int, length: int | None = None, left: int = 1
    ) -> _DecodeStep:
        """All but the last ``left`` of ``ids [B, T]`` go into the cache, of ``length`` tokens; the last is the step's
        token, before which :meth:`last_logits` is to bring those between."""
        batch, seqlen = ids.shape
        cache = _fixed_cache(model, length or seqlen)
        for start in range(0, seqlen - left, chunk):
            part = slice(start, min(start + chunk, seqlen - left))
            positions = torch.arange(part.start, part.stop, device=ids.device).expand(batch, -1)
            model(
                input_ids=ids[:, part], past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
            )
        position = torch.full((batch, 1), seqlen - 1, device=ids.device)
        return cls(model, cache, ids[:, -1:].clone(), position)

    @classmethod
    def filled(cls, model: torch.nn.Module, ids: Tensor, chunk: int) -> _DecodeStep:
        """A cache as long, but for its first token of random numbers."""
        batch, seqlen = ids.shape
        step = cls.prefilled(model, ids[:, :2], chunk, length=seqlen)
        for layer in step.cache.layers:
            tensors = layer.tensors.values() if hasattr(layer, "tensors") else (layer.keys, layer.values)
            for tensor in tensors:
                if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    tensor.normal_()
        step.move(seqlen - 2)
        return cls(model, step.cache, ids[:, -1:].clone(), torch.full((batch, 1), seqlen - 1, device=ids.device))

    @property
    def layer_token_bytes(self) -> list[int]:
        """Bytes per token and layer of this cache: latents of eight bits, for instance, and their scales."""
        if self.model.config.model_type != "mha2mla":
            return layer_token_bytes(self.model.config, self.model.dtype.itemsize)
        return [sum(tensor[0, 0].nbytes for tensor in layer.tensors.values()) for layer in self.cache.layers]

    def __call__(self) -> Tensor:
        logits = self._logits(self.token, self.position)
        self.move(-1)
        return logits

    def last_logits(self, ids: Tensor, count: int, sequences: list[int]) -> Tensor:
        """[sequences, count, vocabulary], a step each, of the last ``count`` of ``ids [B, T]`` over a cache of those
        before; the cache is then as the step needs it."""
        first = ids.shape[1] - count
        places = [torch.full_like(self.position, first + index) for index in range(count)]
        out = [self._logits(ids[:, first + index, None], place)[sequences] for index, place in enumerate(places)]
        self.move(-1)
        return torch.stack(out, 1)

    def move(self, tokens: int) -> None:
        """Lets the cache hold so many tokens more, which lie there already, or fewer."""
        for layer in self.cache.layers:
            layer.cumulative_length.add_(tokens)
            if hasattr(layer, "cumulative_length_int"):  # transformers' sliding layers count on the host as well
                layer.cumulative_length_int += tokens

    def _logits(self, token: Tensor, position: Tensor) -> Tensor:
        return self.model(input_ids=token, past_key_values=self.cache, position_ids=position, use_cache=True).logits[
            :, 0
        ]


def _check_step(step: _DecodeStep, ids: Tensor, sequences: list[int], yardstick: Tensor, exact: Tensor) -> Judgement:
    """The logits ``[sequences, count, vocabulary]`` of the last steps of ``ids [B, T]``, for some of its sequences."""
    count = exact.shape[1]
    out = step.last_logits(ids, count, sequences)
    config = step.model.config
    other_form = _judge_logits(out, yardstick, exact)
    if config.model_type != "mha2mla":
        return other_form
    across_forms = _judge_logits(out, yardstick, exact, ACROSS_FORMS_FACTOR)
    if not across_forms.ok:
        return across_forms
    backend = config.attention_backend
    codes = "latent_scale" in step.cache.layers[0].tensors  # another backend must read what this one cached
    config.attention_backend = "mla_fp8_reference" if codes else "mla_reference"
    try:
        step.move(1 - count)
        same_form = _judge_logits(out, step.last_logits(ids, count, sequences), exact)
    finally:
        config.attention_backend = backend
    # The reference keeps its softmax weights in float32, a kernel in the model's dtype like torch's own attention: in
    # 16 bits the expanded form is the fairer yardstick, in 32 bits the reference.
    return max(same_form, other_form, key=lambda check: check.torch_error)


def _judge_logits(out: Tensor, yardstick: Tensor, exact: Tensor, factor: float = ERROR_FACTOR) -> Judgement:
    return verdict(out, None, exact, None, yardstick, factor=factor)


def _fixed_cache(model: torch.nn.Module, length: int) -> Any:
    """The cache of fixed size that ``generate(cache_implementation="static")`` gives a model."""
    if model.config.model_type == "mha2mla":
        from mha2mla.modeling import LatentCache

        return LatentCache(model.config, max_cache_len=length)
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)
