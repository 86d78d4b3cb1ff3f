"""The walk over the layers of a source: its activations and the converted model's, one layer's weights at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig

from mha2mla.conversion.calibration.blocks import SPILL_BYTES, ActivationStore, TokenBlocks
from mha2mla.conversion.calibration.statistics import PAIRS, LayerStatistics, StatisticsCollector
from mha2mla.conversion.families import FamilyAdapter, SourceSpec
from mha2mla.conversion.fit.reconstruction import (
    Forward,
    Reconstruction,
    ReconstructionError,
    ReconstructionProblem,
    reconstruct,
)
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION, tf32_on_cuda
from mha2mla.conversion.latent.basis import LatentBasis, layer_statistics
from mha2mla.conversion.latent.rules import SvdJoint
from mha2mla.conversion.layer import PreparedLayer, converted_biases, finish_layer, prepare_layer
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.rope import ByFrequency
from mha2mla.conversion.source.streaming import BATCH_TOKENS, StreamedModel, first_output, inputs_observed
from mha2mla.conversion.stages import Fit
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.attention import MLAAttention
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.configuration_mha2mla import PER_LAYER
from mha2mla.modeling.stored_tensors import is_finite, widest

SAMPLE_TOKENS = 32768  # tokens of a layer's inputs that closed-form fits look at
FIRST_SAMPLE_TOKENS = 8192  # the same where gradient steps follow, and where ranks are compared
_CUDA_BATCH_TOKENS = 16384  # that a layer sees at a time where launches cost more than the work
# Share of earlier layers' loss that a layer makes good: the rest is noise to a fit.
_CORRECTION = 0.5
_BASIS_TOKENS = 8192  # of a layer's inputs, that the basis of its codes is computed from while it is fitted
_STATISTICS_TOKENS = 32768  # tokens of the converted stream; a fit needs more text than its initial moments


def converted_config(
    source_config: PreTrainedConfig, spec: SourceSpec, geometries: tuple[MLAGeometry, ...], recipe: Recipe
) -> MHA2MLAConfig:
    """The config of the model that ``recipe`` makes of a source; without dtype, architectures and a record of it.

    Args:
        geometries: of each layer; they differ in what the config holds by layer.
    """
    geometry, alike = geometries[0], len(set(geometries)) == 1
    by_layer = [converted_biases(spec, each, centered=recipe.latent.centered) for each in geometries]
    q_bias, kv_bias, o_bias = map(any, zip(*by_layer, strict=True))
    factors = [table.attention_factor for table in spec.tables]
    return MHA2MLAConfig(
        source_config=source_config.to_dict(),
        **{
            name: getattr(geometry, name) if alike else [getattr(each, name) for each in geometries]
            for name in PER_LAYER
        },
        v_head_dim=geometry.v_head_dim,
        num_up_projection_heads=geometry.num_up_projection_heads,
        rope_from_latent=geometry.rope_from_latent,
        qk_norm=spec.qk_norm,
        attention_q_bias=q_bias,
        attention_kv_bias=kv_bias,
        attention_o_bias=o_bias,
        softmax_scale=spec.softmax_scale,
        rope_attention_scaling=factors[0] if len(set(factors)) == 1 else factors,
        # Said outright: some configs name a window that their architecture does not look at.
        layer_types=["full_attention" if window is None else "sliding_attention" for window in spec.sliding_windows],
    )


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer of the result, and how it went.

    Attributes:
        tensors: by their name below ``self_attn.``, in the dtypes that are stored.
        seconds: statistics, conversion, reconstruction and the streams.
        loss_before, loss_after: of the reconstruction, relative squared errors on held-out windows; None without one.
        note: how the reconstruction ran; empty without one.
        fallback: what stands in for the recipe's own fit, and why; empty where nothing had to.
    """

    layer: int
    tensors: dict[str, torch.Tensor]
    seconds: float = 0.0
    loss_before: float | None = None
    loss_after: float | None = None
    note: str = ""
    fallback: str = ""

    def record(self) -> dict[str, Any]:
        """Record beside the tensors, as JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("layer", "tensors")}


@dataclass(frozen=True)
class LayerSteps:
    """The steps that convert one layer. A walk runs those of another object if it is given one.

    Attributes:
        prepare: closed forms before a rank is chosen (:func:`prepare_layer`).
        finish: closed forms at a rank (:func:`finish_layer`).
        reconstruct: gradient steps (:func:`~mha2mla.conversion.fit.reconstruction.reconstruct`).
    """

    prepare: Callable[..., PreparedLayer] = prepare_layer
    finish: Callable[..., dict[str, torch.Tensor]] = finish_layer
    reconstruct: Callable[..., Reconstruction] = reconstruct


@dataclass(frozen=True)
class LayerWalk:
    """The walk: iterating over it converts layer after layer.

    Without gradient steps, statistics are the source's own, from one stream of activations. With them, a second stream
    passes the converted layers (their stored, rounded tensors): statistics are taken of it, and each layer is fitted on
    it to what the source computes.

    Attributes:
        model: the source, streamed; device and dtype of the computation are its.
        adapter, spec, geometries, recipe: what is converted, each layer to what shape, and how.
        windows: calibration tokens; None when the recipe needs none.
        folder: where activations go when they exceed ``spill_bytes``.
        weights_dtype: of the result; None for the source's own. ``inv_freq`` and ``o_proj.bias`` are float32 always.
        spill_bytes: a stream of activations that is larger lives in a file.
        done: layers of an earlier, interrupted walk, as they were yielded: the streams pass them, nothing is computed
            anew and they are not yielded again. The rest comes out as it would have.
        steps: of one layer. One that fails, or whose result is not finite, is left out for that layer.
    """

    model: StreamedModel
    adapter: FamilyAdapter
    spec: SourceSpec
    geometries: tuple[MLAGeometry, ...]
    recipe: Recipe
    windows: TokenBlocks | None
    folder: Path
    weights_dtype: torch.dtype | None = None
    spill_bytes: int = SPILL_BYTES
    done: Mapping[int, Mapping[str, torch.Tensor]] | None = None
    steps: LayerSteps = LayerSteps()

    def __iter__(self) -> Iterator[ConvertedLayer]:
        """Converts the layers in order.

        Raises:
            CheckpointError: a tensor of the source is absent or not finite.
            ReconstructionError: no rule gives a layer that is finite.
        """
        if self.windows is None:
            for layer in self._missing():
                started = time.perf_counter()
                tensors, fallback = self.convert(layer, None)
                seconds = time.perf_counter() - started
                yield ConvertedLayer(layer, self.stored(layer, tensors), seconds, fallback=fallback)
                self.model.source.release()
        elif self.recipe.fit.steps and not all(each.is_full_rank for each in self.geometries):
            yield from _ConvertedWalk(self).layers()
        else:
            yield from self._walk_source()

    def _walk_source(self) -> Iterator[ConvertedLayer]:
        missing = self._missing()
        with self.stores(1) as (store,):
            self.model.embed(store)
            for layer in range(self.spec.num_layers):
                started = time.perf_counter()
                module, window = self.model.layer(layer), self.first_window(store)
                collector = self.collector(layer) if layer in missing else None
                observe = None if collector is None else collector.add
                self.model.run_layer(module, layer, store, tokens=BATCH_TOKENS, observe=observe)
                if collector is not None:
                    runs = partial(self.runs, layer, module, window)
                    tensors, fallback = self.convert(layer, collector.finish(), runs=runs)
                    seconds = time.perf_counter() - started
                    yield ConvertedLayer(layer, self.stored(layer, tensors), seconds, fallback=fallback)
                self.model.source.release()

    def _missing(self) -> list[int]:
        return [layer for layer in range(self.spec.num_layers) if layer not in (self.done or {})]

    def stores(self, count: int) -> AbstractContextManager[list[ActivationStore]]:
        """:meth:`StreamedModel.stores` of the walk's windows."""
        return self.model.stores(self.windows, count, folder=self.folder, spill_bytes=self.spill_bytes)

    def collector(self, layer: int, sample_tokens: int | None = None, pairs: int = PAIRS) -> StatisticsCollector:
        """Collector of a layer's statistics. Closed-form fits get ``sample_tokens`` of its inputs, by default more
        without gradient steps, and ``pairs`` of a query and a key."""
        # Activations may be narrow, what is learnt from them is not.
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        weights = self.adapter.attention_weights(
            self.model.source, self.spec, layer, device=self.model.device, dtype=dtype
        )
        geometry = self.geometries[layer]
        sampled = sample_tokens or (FIRST_SAMPLE_TOKENS if self.recipe.fit.steps else SAMPLE_TOKENS)
        return StatisticsCollector(
            self.spec.of_layer(layer),
            weights,
            window=self.spec.sliding_windows[layer],
            **self.recipe.measured(geometry),
            sample_tokens=sampled // len(self.windows.window_lengths) if self.recipe.needs_sample(geometry) else 0,
            pairs=pairs,
        )

    def convert(
        self,
        layer: int,
        statistics: LayerStatistics | None,
        *,
        runs: Callable[[Mapping[str, torch.Tensor]], bool] | None = None,
        prepared: dict[str, PreparedLayer] | None = None,
    ) -> tuple[dict[str, torch.Tensor], str]:
        """Closed-form tensors of a layer, and a note where the recipe's rules failed: what replaced them, and why.

        Fallbacks for rules that fail or give a value that is not finite: the same without refits, then the plainest
        rules, which look at weights alone.

        Args:
            runs: whether the layer's output is finite with such tensors.
            prepared: what does not depend on the rank, for walks of other ranks; filled here.

        Raises:
            ReconstructionError: nothing is finite.
        """
        spec, geometry = self.spec.of_layer(layer), self.geometries[layer]
        prepared = {} if prepared is None else prepared
        rules = self.recipe.layer_rules(geometry)
        no_refits = replace(rules, turn_queries=False, refit_queries=False, refit_output=False)
        plainest = replace(no_refits, rope=ByFrequency(-1), low_rank=SvdJoint())
        problems: list[str] = []
        for name, chosen, known in (
            ("the recipe's rules", rules, statistics),
            ("the recipe's rules without refits", no_refits, statistics),
            ("rope.selection high and latent.rule svd-joint", plainest, None),
        ):
            try:
                if name not in prepared:
                    weights = self.adapter.attention_weights(
                        self.model.source, self.spec, layer, device=self.model.device, dtype=torch.float64
                    )
                    prepared[name] = self.steps.prepare(spec, geometry, chosen, weights, known)
                tensors = self.steps.finish(spec, geometry, chosen, prepared[name])
                if self._config.attention_o_bias:  # other layers', where this one is full rank
                    tensors.setdefault("o_proj.bias", tensors["o_proj.weight"].new_zeros(spec.hidden_size))
            except torch.linalg.LinAlgError as error:
                problems.append(_reason(error))
                continue
            if unfit := self._not_finite(layer, tensors):
                problems.append(f"{unfit} was not finite")
            elif runs is not None and not runs(tensors):
                problems.append("the layer's output was not finite")
            else:
                return tensors, f"converted by {name}, since {problems[0]}" if problems else ""
        raise ReconstructionError(f"layer {layer}: no rule gives a finite layer: {'; '.join(problems)}")

    def reconstruct(
        self, layer: int, problem: ReconstructionProblem, tensors: Mapping[str, torch.Tensor], fit: Fit
    ) -> tuple[Reconstruction | None, str]:
        """Layer after gradient steps; or None, and why its closed form stays."""
        try:
            found = self.steps.reconstruct(problem, tensors, fit, seed=self.recipe.calibration.seed, layer=layer)
        except (ReconstructionError, torch.linalg.LinAlgError) as error:
            return None, f"left without gradient steps, since {_reason(error).removeprefix(f'layer {layer}: ')}"
        if unfit := self._not_finite(layer, found.tensors):
            return None, f"left without gradient steps, since {unfit} was not finite after them"
        return found, ""

    def first_window(self, store: ActivationStore) -> torch.Tensor:
        """[1, length, hidden] of the shortest windows, to try a layer on."""
        return store.read(slice(0, 1), self.model.device)[:1]

    @torch.inference_mode()
    def runs(self, layer: int, module: nn.Module, inputs: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if the decoder layer ``module`` has a finite output with ``tensors`` as its attention."""
        made = block_forward(self, layer, module)(computed(tensors, self.model), inputs)
        return is_finite(made)

    def _not_finite(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Name of a tensor that is not finite as it is stored, or nothing."""
        stored = self.stored(layer, tensors)
        return next((name for name, tensor in stored.items() if not is_finite(tensor)), "")

    def empty_attention(self, layer: int, *, with_codes: bool = False) -> nn.Module:
        """The converted attention of layer ``layer`` without memory; its gradients repeat to the bit."""
        config = self._config
        if with_codes:
            config = deepcopy(config)
            config.latent_bits = self.geometries[layer].latent_bits
        replaced = deepcopy(self.model.skeleton.model.layers[layer].self_attn)
        with torch.inference_mode(False), torch.device("meta"):
            return MLAAttention(config, layer, replaced).eval().requires_grad_(False)

    @cached_property
    def _config(self) -> MHA2MLAConfig:
        """Config of the result, for attention that is computed here."""
        config = converted_config(self.model.config, self.spec, self.geometries, self.recipe)
        config._attn_implementation = REPEATABLE_ATTENTION
        config.latent_bits = 16  # the basis of codes is computed when all layers are there
        return config

    def stored(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the dtypes of the checkpoint: one that was given, or those of the source that lose nothing."""
        if self.weights_dtype is not None:
            return stored(tensors, dict.fromkeys(tensors, self.weights_dtype))
        names, source = self.adapter.attention_names(self.spec, layer), self.model.source
        weights, biases, norms = (
            widest([source.header(name).torch_dtype for field, name in names.items() if field.endswith(kinds)])
            for kinds in (("weight",), ("weight", "bias"), ("weight", "norm"))
        )
        dtypes = {name: norms if "norm" in name else biases if name.endswith("bias") else weights for name in tensors}
        return stored(tensors, dtypes)


def stored(tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """A converted layer's tensors as the checkpoint has them: of ``dtypes`` by name, but float32 where that would
    lose."""
    full = dict.fromkeys(("inv_freq", "o_proj.bias"), torch.float32)  # one addition for the source's two: in float32
    # Contiguous, as they come back from disk: strides choose kernels, and so the last bits of what follows.
    return {name: tensor.to(full.get(name, dtypes[name])).contiguous() for name, tensor in tensors.items()}


class _Seen(Exception):
    """An attention has been given its input; the rest of its layer need not run."""


class _ConvertedWalk:
    """The walk with a stream that passes the converted layers, and one of the source's, which is a layer ahead. A layer
    is fitted to what lies half way between what the source's layer makes of the one and what it made of the other."""

    def __init__(self, sequence: LayerWalk) -> None:
        self.sequence, self.model, self.recipe = sequence, sequence.model, sequence.recipe
        self.num_layers = sequence.spec.num_layers
        self.tokens = _CUDA_BATCH_TOKENS if self.model.device.type == "cuda" else BATCH_TOKENS

    def layers(self) -> Iterator[ConvertedLayer]:
        sequence, done = self.sequence, self.sequence.done or {}
        with sequence.stores(3) as (self.stream, self.source, self.targets):
            for store in (self.stream, self.source):
                self.model.embed(store)
            for layer in range(self.num_layers):
                started = time.perf_counter()
                with torch.inference_mode(False):
                    module = self.model.layer(layer)
                self._run(module, layer, self.source)
                if layer in done:
                    made = None
                    tensors = {name: tensor.to(self.model.device) for name, tensor in done[layer].items()}
                else:
                    made = self._convert(module, layer)
                    tensors = made.tensors
                module.self_attn = sequence.empty_attention(layer)
                module.self_attn.load_state_dict(computed(tensors, self.model), assign=True, strict=True)
                self._run(module, layer, self.stream)
                self.model.source.release()
                if made is not None:
                    yield replace(made, seconds=time.perf_counter() - started)

    def _convert(self, module: nn.Module, layer: int) -> ConvertedLayer:
        collector = self.sequence.collector(layer)
        self._observe(module, layer, collector.add)
        runs = partial(self.sequence.runs, layer, module, self.sequence.first_window(self.stream))
        tensors, fallback = self.sequence.convert(layer, collector.finish(), runs=runs)
        geometry = self.sequence.geometries[layer]
        closed_form = ConvertedLayer(layer, self.sequence.stored(layer, tensors), fallback=fallback)
        if geometry.is_full_rank:
            return closed_form
        with torch.inference_mode(False):
            weights, forward = self._blend(module, layer), block_forward(self.sequence, layer, module)
            if geometry.has_codes:
                tensors = self._basis(layer, forward, weights, tensors).fold(tensors)
                forward = block_forward(self.sequence, layer, module, with_codes=True)
            problem = ReconstructionProblem(self.stream, self.targets, weights, forward, self.model.device)
            found, reason = self.sequence.reconstruct(layer, problem, tensors, self.recipe.fit)
        fallback = "; ".join(filter(None, (fallback, reason)))
        if found is None:
            return replace(closed_form, fallback=fallback)
        found.tensors.pop("latent_centers", None)  # the basis of the result is computed when all layers are there
        stored = self.sequence.stored(layer, found.tensors)
        return ConvertedLayer(layer, stored, 0.0, found.loss_before, found.loss_after, found.note, fallback)

    def _basis(
        self, layer: int, forward: Forward, weights: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> LatentBasis:
        """Basis that codes of the layer have while it is fitted: the recipe's, by the layer's own errors."""
        stream, device, tensors = self.stream, self.model.device, computed(tensors, self.model)
        batches = (
            (stream.gather(part, device, length), weights[part].view(-1, length).to(device))
            for length, blocks in stream.blocks.spread(_BASIS_TOKENS).items()
            for part in blocks.split(max(1, self.tokens // stream.blocks.size))
        )
        has_rope_cache, seed = self.sequence.geometries[layer].has_rope_cache, self.recipe.calibration.seed
        statistics = layer_statistics(partial(forward, tensors), batches, layer, has_rope_cache, seed)
        return self.recipe.basis_rule.basis(statistics)

    def _run(self, module: nn.Module, layer: int, stream: ActivationStore) -> None:
        with tf32_on_cuda(self.model.device):
            self.model.run_layer(module, layer, stream, tokens=self.tokens)

    @torch.inference_mode()
    def _blend(self, module: nn.Module, layer: int) -> torch.Tensor:
        """Writes targets between the source layer's outputs for the converted stream and for its own; returns weights.

        A token's weight is one over the energy of the source's output plus that of the error earlier layers left.
        Without the second, one token whose massive activation the converted stream lacks or adds (1,800 times the
        token's own energy in Qwen2.5-0.5B) is nearly the whole loss of every later layer, where nothing mends it.
        """
        energy = torch.empty(self.stream.blocks.tokens.shape, device=self.model.device)
        for part in self.stream.blocks.batches(self.tokens):
            hidden = self.stream.read(part, self.model.device)
            with tf32_on_cuda(self.model.device):
                hidden = self.model.forward_layer(module, layer, hidden)
            expected = self.source.read(part, self.model.device)
            squares = expected.float().square() + (hidden - expected).float().square()
            energy[part] = squares.mean(-1).view(energy[part].shape)
            self.targets.write(part, hidden.lerp(expected, _CORRECTION))
        return _weights(energy)

    @torch.inference_mode()
    def _observe(self, module: nn.Module, layer: int, receive: Callable[[torch.Tensor], None]) -> None:
        """Hands ``receive`` what the attention of layer ``layer`` is given in a part of the converted stream."""

        def receive_and_stop(hidden: torch.Tensor) -> None:
            receive(hidden)
            raise _Seen

        with inputs_observed(module, receive_and_stop):
            for length, blocks in self.stream.blocks.spread(_STATISTICS_TOKENS).items():
                for part in blocks.split(max(1, self.tokens // self.stream.blocks.size)):
                    with suppress(_Seen):
                        self.model.forward_layer(module, layer, self.stream.gather(part, self.model.device, length))


def block_forward(sequence: LayerWalk, layer: int, module: nn.Module, *, with_codes: bool = False) -> Forward:
    """The decoder layer ``module`` with the converted attention in its place, as a function of that attention's tensors
    and of windows of the lengths that ``sequence`` has; ``with_codes``: over latents as their codes give them back."""
    model, block = sequence.model, module.__class__.__new__(module.__class__)
    modules = {**module._modules, "self_attn": sequence.empty_attention(layer, with_codes=with_codes)}
    block.__dict__ = {**module.__dict__, "_modules": modules}  # shares all else with ``module``
    # Made once: masks and positions serve every batch.
    arguments = {
        length: model.layer_arguments(
            layer, torch.empty(1, length, model.hidden_size, dtype=model.dtype, device=model.device)
        )
        for length in sequence.windows.window_lengths
    }

    def forward(tensors: Mapping[str, torch.Tensor], inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        named = {f"self_attn.{name}": tensor for name, tensor in tensors.items()}
        return first_output(functional_call(block, named, (inputs,), {**arguments[inputs.shape[1]], **others}))

    return forward


@torch.inference_mode()
def token_weights(store: ActivationStore, tokens: int, device: torch.device) -> torch.Tensor:
    """[blocks, size] one over the mean square of every token, on the CPU; ``tokens`` at a time on ``device``."""
    energy = torch.empty(store.blocks.tokens.shape, device=device)
    for part in store.blocks.batches(tokens):
        energy[part] = store.read(part, device).float().square().mean(-1).view(energy[part].shape)
    return _weights(energy)


def _weights(energy: torch.Tensor) -> torch.Tensor:
    """One over ``energy``, on the CPU; zero below a millionth of the median, where a relative error says nothing."""
    return torch.where(energy > 1e-6 * energy.median(), energy.reciprocal(), 0).cpu()


def computed(tensors: Mapping[str, torch.Tensor], model: StreamedModel) -> dict[str, torch.Tensor]:
    """A converted layer's tensors on the device and in the dtype that ``model`` computes in; frequencies, and centers
    of codes, in float32."""
    return {
        name: tensor.to(model.device, torch.float32 if name in ("inv_freq", "latent_centers") else model.dtype)
        for name, tensor in tensors.items()
    }


def _reason(error: Exception) -> str:
    """First line of a message, with no capital and no stop."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:200]
