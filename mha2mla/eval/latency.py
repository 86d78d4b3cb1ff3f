"""Latency of a converted model beside its source: attention op, decode steps, prompts and ``generate``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from operator import mul
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, StaticCache

from mha2mla.checkpoints import check_converted, check_numbers
from mha2mla.conversion.calibration.texts import end_tokens
from mha2mla.environment import compute_device, usual_dtype
from mha2mla.eval.generation import GREEDY
from mha2mla.eval.loading import load_model
from mha2mla.eval.measurement import (
    NOT_CHECKED,
    WRONG,
    LatencyRows,
    add_speed_ups,
    in_float64,
    measured,
    unless_out_of_memory,
)
from mha2mla.eval.op_latency import BASELINES, attention_latency, check_op
from mha2mla.modeling import LatentCache
from mha2mla.modeling.backends import OF_OPS
from mha2mla.modeling.config import (
    cache_bytes,
    cached_tokens,
    expert_share,
    layer_token_bytes,
    touched_experts,
    visible_tokens,
)
from mha2mla.terminal import progress_bar
from mha2mla.testing.numeric_check import ERROR_FACTOR, Judgement, verdict
from mha2mla.testing.timing import copy_rate

# Absorbed and expanded form are equal in exact arithmetic and round differently: how differently depends on the
# conditioning of the latent's basis. Between the two forms, an error this many times larger is still rounding.
ACROSS_FORMS_FACTOR = 8.0
# Nine tenths of the square of a bfloat16 model's errors lie in one direction of its logits, so a position's error is
# little more than the size of one normal number, and two right ones may be a factor of five apart. Errors and their
# yardstick are root mean squares over this many positions, which agree within a tenth or two.
CHECKED_STEPS = 16
LONG_ENOUGH = 1.5  # seconds of ``generate`` after which no further run begins: long runs differ little

Level = Literal["op", "step", "prefill", "e2e"]
Model = nn.Module | Callable[[], nn.Module]
_OPS = {"step": "decode step", "prefill": "prefill", "e2e": "generate"}
_Right = tuple[Tensor, Tensor]  # logits [sequences, positions, vocabulary] at the model's dtype and in float64


def model_latency(
    source: Any,
    converted: Any,
    *,
    levels: Sequence[Level] = ("op", "step"),
    batch_sizes: Sequence[int] | None = None,
    seqlens: Sequence[int] = (512, 2048),
    new_tokens: int = 64,
    check: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
    rotary_key_cache: str | None = None,
    min_run_time: float = 0.5,
    progress: bool = False,
    save: Callable[[list[dict[str, Any]]], None] | None = None,
) -> LatencyRows:
    """Latency of a converted checkpoint beside its source, by level; one model is in memory at a time.

    Args:
        source, converted: folder, hub id, a loaded causal language model, or a function that makes one.
        levels: ``"op"``, attention of one layer over filled caches; ``"step"``, a whole decode step; ``"prefill"``, a
            prompt; ``"e2e"``, ``generate``.
        new_tokens: of ``generate``.
        check: without it nothing is compared with float64, and every row says so.
        dtype: what to compute in; default bfloat16 on CUDA, float32 on a CPU. Loaded models keep theirs.
        layer: whose geometry the attention op has.
        backend: of the decode op, in all measurements; ``None`` lets it choose.
        rotary_key_cache: of the converted model, in all measurements; ``None``: what its config says.
        batch_sizes: sequences per call; default 1, 8 and on CUDA 64 and 256 too, of which those are taken that fit
            beside the converted model's weights at the longest of ``seqlens``.
        seqlens, page_size, min_run_time: as in :func:`attention_latency` and :func:`model_rows`.
        progress: show a bar, on standard error.
        save: called with all rows so far after each.

    Returns:
        Rows. ``speed_up`` is the source's time over the row's (of the op, the fastest of the source's that is here);
        ``limit_us`` the time to read once the visible part of the cache, and the weights for a step, at the rate of a
        large copy on this device, measured beside them, and ``of_limit`` that over the row's time: in a CUDA graph
        where it has one. What does not fit into memory is a row whose status says so.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: an argument out of range, or ``converted`` is no converted model, or one too large for the device.
    """
    if not levels or not set(levels) <= set(get_args(Level)):
        raise ValueError(f"levels is {list(levels)}; expected one or several of {', '.join(get_args(Level))}")
    check_numbers(seqlens, "seqlens", 2)
    if batch_sizes is not None:
        check_numbers(batch_sizes, "batch_sizes", 1)
    if new_tokens < 2:
        raise ValueError(f"new_tokens is {new_tokens}; expected 2 or more")
    check_op(page_size, min_run_time)
    device = compute_device(device)
    dtype = dtype or usual_dtype(device)

    def make_converted() -> nn.Module:
        model = load_model(converted, "converted", device=device, dtype=dtype)
        model.config.attention_backend = OF_OPS[backend]
        if rotary_key_cache is not None:
            model.config.rotary_key_cache = rotary_key_cache
        return model

    with _config_kept(converted, "attention_backend", "rotary_key_cache"):
        found = unless_out_of_memory(lambda: {"model": make_converted()})
        if "status" in found:
            raise ValueError(f"converted does not fit into the memory of {device}: {found['status']}")
        model = found.pop("model")
        config, device, dtype = model.config, model.device, model.dtype
        check_converted(config.model_type, "converted")
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(f"layer is {layer}; expected 0 to {config.num_hidden_layers - 1}")
        batch_sizes = batch_sizes or fitting_batches(model, max(seqlens))
        del model
        models = {
            "source": partial(load_model, source, "source", device=device, dtype=dtype),
            "converted": make_converted,
        }
        parts: list[Iterator[dict[str, Any]]] = []
        if "op" in levels:
            op = partial(
                attention_latency, config.cached_geometry(layer), check=check, dtype=dtype, device=device,
                page_size=page_size, softmax_scale=config.softmax_scale, backend=backend, min_run_time=min_run_time,
            )  # fmt: skip
            shapes = product(batch_sizes, seqlens)
            parts.append(row for batch, seqlen in shapes for row in op(batch_sizes=(batch,), seqlens=(seqlen,)))
        whole = [level for level in levels if level != "op"]
        options = {"new_tokens": new_tokens, "check": check, "min_run_time": min_run_time}
        if whole:
            parts.append(model_rows(models, levels=whole, batch_sizes=batch_sizes, seqlens=seqlens, **options))
        rate = copy_rate(device, min_run_time)
        rows = LatencyRows()
        per_shape = (len(BASELINES) + 1) * levels.count("op") + len(models) * len(whole)
        total = per_shape * len(batch_sizes) * len(seqlens)
        for row in progress_bar(chain(*parts), show=progress, total=total, desc="latency", unit="row"):
            rows.append(row)
            add_speed_ups(rows, rate)
            if save is not None:
                save(rows)
        return rows


@contextmanager
def _config_kept(model: Any, *names: str) -> Iterator[None]:
    """Puts fields of a loaded model's config back when it ends; models that are loaded later are nobody else's."""
    fields = vars(model.config) if isinstance(model, nn.Module) else {}
    before = {name: fields[name] for name in names if name in fields}
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(model.config, name, before[name])
            elif name in fields:
                delattr(model.config, name)


def fitting_batches(model: nn.Module, seqlen: int) -> list[int]:
    """Batches among 1, 8, 64 and 256 sequences of ``seqlen`` tokens that fit nine tenths of the GPU's memory beside the
    model's weights; on a CPU 1 and 8."""
    if model.device.type != "cuda":
        return [1, 8]
    total = torch.cuda.get_device_properties(model.device).total_memory
    room = 0.9 * total - sum(each.nbytes for each in model.parameters())
    each = cache_bytes(model.config, seqlen, model.dtype.itemsize)
    return [batch for batch in (1, 8, 64, 256) if batch == 1 or batch * each <= room]


def decode_step_latency(models: Mapping[str, Model], **options: Any) -> list[dict[str, Any]]:
    """One whole decode step of each model: the rows of :func:`model_rows` at its level ``"step"``."""
    return list(model_rows(models, levels=("step",), **options))


@torch.inference_mode()
def model_rows(
    models: Mapping[str, Model],
    *,
    levels: Sequence[Literal["step", "prefill", "e2e"]],
    batch_sizes: Sequence[int] = (1,),
    seqlens: Sequence[int] = (512,),
    new_tokens: int = 64,
    check: bool = True,
    min_run_time: float = 0.5,
    prefill_chunk: int = 1024,
    runs: int = 3,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Rows of each model: decode steps, prompts, and ``generate``: greedy, whatever the generation
    configs prefer, and otherwise with its default arguments.

    ``"step"``: ``seqlen`` tokens are cached, the new one among them. Each model fills a cache of fixed size with the
    same random tokens, then makes the same step again and again, the cache being put back by one token after each.
    First the logits of the last 16 tokens, each by a step of its own, are checked against the same model in float64
    without a cache (norms and angles in float32, as transformers has them). The yardstick is its cacheless logits at
    its own dtype; for a converted model, whose step is another form of the same sum, those with a wider factor, and the
    same steps with the decode op's torch reference. ``"prefill"``: the last token's logits are asked for, into a new
    cache; the same tokens' logits are checked, by one forward pass. ``"e2e"``: medians over ``runs``, or over as many
    as begin within :data:`LONG_ENOUGH`, after one call that warms up. Each token of the first sequence must be
    float64's most likely one after those before it, or as likely but for rounding, where the yardstick is how far the
    model's own dtype moves its cacheless logits.

    Args:
        models: name → causal language model, or what makes one and lets go of it afterwards; all on one device.
        batch_sizes, seqlens: every pair of them is measured.
        new_tokens: tokens that ``generate`` makes after each prompt; no text ends before.
        check: without it caches hold random numbers, nothing is compared, and every row's status says so.
        min_run_time: seconds of measurement per row of a step or prompt.
        prefill_chunk: tokens per sequence that are prefilled at a time before a step.

    Yields:
        Rows with the keys of :data:`~mha2mla.eval.measurement.COLUMNS`, and ``weight_bytes`` and ``read_bytes``, what a
        step reads of the weights and of the cache: of a layer with a sliding window no more than that.
        ``ms_per_token`` of a step is its median (a step yields ``batch`` tokens at once); of ``generate``, what a call
        of ``new_tokens`` takes longer than one of one token (``first_token_ms``), by the tokens between; absent, with
        all that follows from it, where noise makes it take no longer.
        ``tokens_per_s`` counts all sequences. On CUDA ``peak_bytes`` is what ``generate`` allocated at most, and
        ``largest_batch`` how many such sequences the device's memory would hold, estimated from it. A row that needs
        too much memory says so in its status.
    """
    checked = sorted({0} | {batch - 1 for batch in batch_sizes})  # the first and the last sequence of every batch
    for name, make in models.items():
        found = unless_out_of_memory(_make, make)
        model = found.pop("model", None)
        rights: dict[int, _Right] | str | None = None
        for level, batch, seqlen in product(levels, batch_sizes, seqlens):
            row = {"op": _OPS[level], "implementation": name, "batch": batch, "seqlen": seqlen}
            if model is None:
                yield row | {"status": f"{found['status']}, for weights"}
                continue
            generator = torch.Generator().manual_seed(seed)
            shape = (max(batch_sizes), max(seqlens))
            ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(model.device)
            row |= {"dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type}
            row |= {"weight_bytes": weight_bytes(model, batch)}
            prompts = ids[:batch, :seqlen]
            if level == "e2e":
                rights = None  # whose memory the estimate of the largest batch would count
                row |= {"new_tokens": new_tokens}
                yield row | unless_out_of_memory(_generate_row, model, prompts, new_tokens, check, runs)
                if hasattr(model, "release_captured"):
                    model.release_captured()
                continue
            if check and rights is None:
                rights = _rights(model, ids[checked], seqlens)
            if isinstance(rights, str):
                yield row | {"status": rights}
                continue
            here = [index for index, sequence in enumerate(checked) if sequence in (0, batch - 1)]
            right = None if rights is None else tuple(logits[here] for logits in rights[seqlen])
            run = partial(_step_row, chunk=prefill_chunk) if level == "step" else _prefill_row
            yield row | unless_out_of_memory(run, model, prompts, right, min_run_time)
        del model


def _make(make: Model) -> dict[str, Any]:
    return {"model": make if isinstance(make, nn.Module) else make()}


def weight_bytes(model: nn.Module, batch: int = 1) -> int:
    """Bytes of weights that a step of ``batch`` sequences reads: all but the embeddings, of which it reads a row a
    token, where these are not the logits' weights too, and of routed experts those that a token goes to, were routing
    uniform."""
    embeddings = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embeddings
    experts = sum(each.nbytes for name, each in model.named_parameters() if ".experts." in name)
    idle = int((1 - touched_experts(expert_share(model.config), batch)) * experts)
    return sum(each.nbytes for each in model.parameters()) - (0 if tied else embeddings.nbytes) - idle


def _prompt_factor(model: nn.Module) -> float:
    """Times that a prompt's logits may be as far from float64 as cacheless ones: a converted model may compute them in
    another form."""
    return ACROSS_FORMS_FACTOR if model.config.model_type == "mha2mla" else ERROR_FACTOR


def _cache_sizes(
    config: PreTrainedConfig, batch: int, length: int, token_bytes: Sequence[int], *, static: bool = False
) -> dict[str, int]:
    """Bytes of ``batch`` sequences of ``length`` tokens, all layers: held by the cache, and read by a decode step.

    Args:
        token_bytes: per layer.
        static: the cache is transformers' ``StaticCache``, or ours of fixed size.
    """
    cached, read = cached_tokens(config, length, static=static), visible_tokens(config, length)
    held = {"cache_bytes": cached, "read_bytes": read}
    return {name: batch * sum(map(mul, tokens, token_bytes)) for name, tokens in held.items()}


def _num_checked(seqlen: int) -> int:
    """Number of a text's last tokens that are checked."""
    return min(CHECKED_STEPS, seqlen - 1)


def _rights(model: nn.Module, ids: Tensor, seqlens: Sequence[int]) -> dict[int, _Right] | str:
    """Length → logits of its last positions without a cache; or why there are none."""
    # Attention is causal: the logits after a prefix do not depend on what follows, so one pass serves all lengths.
    counts = [_num_checked(seqlen) for seqlen in seqlens]
    spans = [torch.arange(end - count, end) for end, count in zip(seqlens, counts, strict=True)]
    positions = torch.cat(spans).to(ids.device)

    def logits() -> tuple[Tensor, ...]:  # one text at a time
        texts = (model(input_ids=text[None], use_cache=False, logits_to_keep=positions).logits for text in ids)
        return torch.cat(list(texts)).split(counts, 1)

    def both() -> dict[str, Any]:
        yardsticks = logits()
        with in_float64(model):
            return {"rights": dict(zip(seqlens, zip(yardsticks, logits(), strict=True), strict=True))}

    found = unless_out_of_memory(both)
    if "status" in found:
        return f"{found['status']}, in the check against float64; --no-check times it all the same"
    return found["rights"]


def _step_row(model: nn.Module, ids: Tensor, right: _Right | None, min_run_time: float, chunk: int) -> dict[str, Any]:
    """Times one batch and length; ``right`` is None where nothing is checked."""
    batch, seqlen = ids.shape
    if right is None:
        step = _DecodeStep.filled(model, ids, chunk)
    else:
        step = _DecodeStep.prefilled(model, ids, chunk, left=_num_checked(seqlen))
    row = _cache_sizes(model.config, batch, seqlen, step.layer_token_bytes, static=True)
    check = None if right is None else _check_step(step, ids, sorted({0, batch - 1}), *right)
    row |= measured(step, check, row["read_bytes"], ids.device, min_run_time)
    return row | ({"ms_per_token": row["us_p50"] / 1e3} if "us_p50" in row else {})


def _prefill_row(model: nn.Module, ids: Tensor, right: _Right | None, min_run_time: float) -> dict[str, Any]:
    """Times one batch of prompts into a new cache, as ``generate`` begins with them."""

    def call(kept: int = 1) -> Tensor:
        return model(input_ids=ids, use_cache=True, logits_to_keep=kept).logits

    check = None
    if right is not None:
        logits = call(_num_checked(ids.shape[1]))[sorted({0, len(ids) - 1})]
        check = _judge_logits(logits, *right, _prompt_factor(model))
    row = measured(call, check, None, ids.device, min_run_time, graph=False)
    return row | ({"tokens_per_s": ids.numel() / row["us_p50"] * 1e6} if "us_p50" in row else {})


@dataclass(frozen=True)
class _DecodeStep:
    """A model, its filled cache and the next token: calling it makes the step, and leaves the cache as it was."""

    model: nn.Module
    cache: Any
    token: Tensor
    position: Tensor

    @classmethod
    def prefilled(
        cls, model: nn.Module, ids: Tensor, chunk: int, length: int | None = None, left: int = 1
    ) -> _DecodeStep:
        """Caches all but the last ``left`` of ``ids [B, T]``, in a cache of ``length`` tokens; the last is the step's
        token, before which :meth:`last_logits` must cache those between."""
        batch, seqlen = ids.shape
        cache = _fixed_cache(model, length or seqlen)
        for start in range(0, seqlen - left, chunk):
            part = slice(start, min(start + chunk, seqlen - left))
            positions = torch.arange(part.start, part.stop, device=ids.device).expand(batch, -1)
            options = {"past_key_values": cache, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
            model(input_ids=ids[:, part], **options)
        return cls(model, cache, ids[:, -1:].clone(), torch.full((batch, 1), seqlen - 1, device=ids.device))

    @classmethod
    def filled(cls, model: nn.Module, ids: Tensor, chunk: int) -> _DecodeStep:
        """A cache of the same length that holds random numbers after its first token."""
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
        """Logits [sequences, count, vocabulary], a step each, of the last ``count`` of ``ids [B, T]`` over a cache of
        the tokens before; the cache is then as the step needs it."""
        first = ids.shape[1] - count
        positions = [torch.full_like(self.position, first + index) for index in range(count)]
        steps = (self._logits(ids[:, first + index, None], position) for index, position in enumerate(positions))
        out = torch.stack([logits[sequences] for logits in steps], 1)
        self.move(-1)
        return out

    def move(self, tokens: int) -> None:
        """Lets the cache hold ``tokens`` more tokens, which lie there already, or fewer."""
        for layer in self.cache.layers:
            layer.cumulative_length.add_(tokens)
            if hasattr(layer, "cumulative_length_int"):  # transformers' sliding layers count on the host as well
                layer.cumulative_length_int += tokens

    def _logits(self, token: Tensor, position: Tensor) -> Tensor:
        options = {"past_key_values": self.cache, "position_ids": position, "use_cache": True}
        return self.model(input_ids=token, **options).logits[:, 0]


def _check_step(step: _DecodeStep, ids: Tensor, sequences: list[int], yardstick: Tensor, exact: Tensor) -> Judgement:
    """Judges logits [sequences, count, vocabulary] of the last steps of ``ids [B, T]``, for some of its sequences."""
    count = exact.shape[1]
    out = step.last_logits(ids, count, sequences)
    config = step.model.config
    other_form = _judge_logits(out, yardstick, exact)
    if config.model_type != "mha2mla":
        return other_form
    across_forms = _judge_logits(out, yardstick, exact, ACROSS_FORMS_FACTOR)
    if not across_forms.ok:
        return across_forms
    codes = "latent_scale" in step.cache.layers[0].tensors  # another backend must read what this one cached
    with _config_kept(step.model, "attention_backend"):
        config.attention_backend = "mla_fp8_reference" if codes else "mla_reference"
        step.move(1 - count)
        same_form = _judge_logits(out, step.last_logits(ids, count, sequences), exact)
    # The reference keeps its softmax weights in float32, a kernel in the model's dtype like torch's own attention: in
    # 16 bits the expanded form is the fairer yardstick, in 32 bits the reference.
    return max(same_form, other_form, key=lambda check: check.torch_error)


def _judge_logits(out: Tensor, yardstick: Tensor, exact: Tensor, factor: float = ERROR_FACTOR) -> Judgement:
    return verdict(out, None, exact, None, yardstick, factor=factor)


def _fixed_cache(model: nn.Module, length: int) -> Any:
    """The cache of fixed size that ``generate(cache_implementation="static")`` gives a model."""
    kind = LatentCache if model.config.model_type == "mha2mla" else StaticCache
    return kind(config=model.config, max_cache_len=length)


def _generate_row(model: nn.Module, prompts: Tensor, new_tokens: int, check: bool, runs: int) -> dict[str, Any]:
    batch, seqlen = prompts.shape
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    made = greedy(model, prompts, new_tokens)
    token_bytes = layer_token_bytes(model.config, model.dtype.itemsize)
    row = _cache_sizes(model.config, batch, seqlen + new_tokens - 1, token_bytes)  # the last token is never cached
    if on_gpu:
        weights = sum(each.nbytes for each in model.parameters())
        peak = torch.cuda.max_memory_allocated(model.device)
        room = torch.cuda.get_device_properties(model.device).total_memory - weights
        row |= {"peak_bytes": peak, "largest_batch": int(room * batch // (peak - weights))}
    row["status"] = _generated_status(model, made[:1], seqlen) if check else NOT_CHECKED
    if row["status"].startswith(WRONG):
        return row
    first, all_tokens = (median_seconds(model, prompts, count, runs) for count in (1, new_tokens))
    per_token, row["first_token_ms"] = (all_tokens - first) / (new_tokens - 1), first * 1e3
    if per_token <= 0:
        return row
    return row | {"us_p50": per_token * 1e6, "ms_per_token": per_token * 1e3, "tokens_per_s": batch / per_token}


def greedy(model: nn.Module, prompts: Tensor, new_tokens: int, **options: Any) -> Any:
    """``model.generate`` of exactly ``new_tokens`` after prompts [B, T] without padding."""
    options |= {**GREEDY, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


def median_seconds(model: nn.Module, prompts: Tensor, new_tokens: int, runs: int, **options: Any) -> float:
    """Median wall clock of :func:`greedy`, over ``runs`` or as many as begin within :data:`LONG_ENOUGH`."""
    times: list[float] = []
    while len(times) < runs and sum(times) < LONG_ENOUGH:
        began = time.perf_counter()
        greedy(model, prompts, new_tokens, **options)[0, -1].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _generated_status(model: nn.Module, text: Tensor, prompt: int) -> str:
    """Status of generated ``text [1, T]``, whose first ``prompt`` tokens were given."""
    kept = text.shape[1] - prompt + 1

    def logits() -> Tensor:  # [new tokens, vocabulary]
        return model(input_ids=text, use_cache=False, logits_to_keep=kept).logits[0, :-1]

    narrow = logits()
    with in_float64(model):
        exact = logits()
    for found in (exact, narrow):
        found[:, end_tokens(model)] = -torch.inf  # ``min_new_tokens`` suppresses them
    moved = (narrow.double() - exact).nan_to_num(0.0).abs().amax(-1)
    chosen = exact.gather(1, text[0, prompt:, None])[:, 0]
    behind = exact.amax(-1) - chosen - 2 * _prompt_factor(model) * moved  # two logits, each as far off as that
    if bool((behind <= 0).all()):
        return "ok"
    token = int(behind.argmax())
    return f"{WRONG}token {token} of the continuation is {float(behind[token]):.3g} less likely than float64's choice"
