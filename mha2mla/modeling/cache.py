"""The paged cache of the absorbed form: per layer the latent c, the rotated k_pe where it is cached, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH
from mha2mla.modeling.batch import UniformBatch
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.latent_layer import LatentLayer
from mha2mla.modeling.modeling_mha2mla import first_shown, host_may_look, is_padding_mask, is_recorded
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.step import AttentionStep, StepPlanner

REFUSED_MASK = (
    "attention_mask hides tokens between visible ones, and the absorbed form cannot; expected left padding at most "
    "(tokenizer.padding_side = 'left'), or attention_backend 'mla_expanded'"
)


class VisibleTokens(NamedTuple):
    """Cached and new tokens that a 2-D mask shows.

    The absorbed form attends, in every sequence, to one run of tokens: from a first one up to the query. So it can obey
    a mask [B, T] if in every sequence the tokens that it shows lie side by side: padding in front of them, padding
    behind them (queries that are padding themselves mean nothing), but no hole. The expanded form obeys every mask.

    Where the host may look at the mask, it looks, and a step over a mask with a hole runs the expanded form. It may
    look on a CPU, and once a call where several tokens come together. A single token on an accelerator, a captured CUDA
    graph and a compiled step are not worth a synchronisation: after a look that found zeros behind ones they run the
    expanded form, else the absorbed one, and the device asserts that there is no hole.

    Attributes:
        starts: [B] int32, the first token shown; 0 where none is.
        counts: [B], how many are shown.
        stops: [B], behind the last one shown; 0 where none is.
        length: int or [], tokens that are cached or new.
    """

    starts: Tensor
    counts: Tensor
    stops: Tensor
    length: int | Tensor


def are_side_by_side(shown: VisibleTokens) -> Tensor:
    """[] bool, no sequence has hidden tokens between shown ones."""
    return (shown.stops - shown.starts == shown.counts).all()


def are_to_the_end(shown: VisibleTokens) -> Tensor:
    """[] bool, nor behind them: zeros, then ones."""
    return ((shown.starts + shown.counts == shown.length) | (shown.counts == 0)).all()


def visible_tokens(attention_mask: Tensor, length: int | Tensor) -> VisibleTokens:
    """Tokens that ``attention_mask`` [B, T] shows of the first ``length`` (int or []) tokens, on its device."""
    token = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    shown = attention_mask.to(torch.bool)
    if isinstance(length, Tensor) or length < attention_mask.shape[1]:
        length = length.to(token.device) if isinstance(length, Tensor) else length
        shown = shown & (token <= length)
    return VisibleTokens(first_shown(shown).int(), shown.sum(dim=-1), (shown * token).amax(dim=-1), length)


def check_mask(attention_mask: Tensor, batch: int, query_length: int, cache: Cache | None) -> Tensor:
    """``attention_mask`` as [B, T], T at least the tokens that are cached and new; without a cache these alone.

    Args:
        attention_mask: [B or 1, T].

    Raises:
        ValueError: another number of sequences, or of tokens. (How many a static cache holds is known to its device
            alone, which asserts it.)
    """
    if attention_mask.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask.shape is {tuple(attention_mask.shape)}; expected {batch} sequences")
    tokens = query_length
    if cache is not None:
        cached = cache.get_seq_length()
        if isinstance(cached, Tensor):
            if attention_mask.shape[1] < cache.capacity:
                torch._assert_async(
                    cached + query_length <= attention_mask.shape[1],
                    f"attention_mask has {attention_mask.shape[1]} tokens; expected as many as are cached and new",
                )
        else:
            tokens += cached
    if attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask.shape is {tuple(attention_mask.shape)}; expected at least {tokens} tokens, those that are "
            "cached and new"
        )
    if cache is None:  # transformers cuts longer masks for a cache alone
        attention_mask = attention_mask[:, :tokens]
    return attention_mask.expand(batch, -1)


class LatentCache(Cache):
    """Cache of a converted model for transformers: pages of c and stored k_pe per layer, served by attention backends.

    Every verb, a model's step included, is done in all layers or in none: after an error (out of memory included) the
    cache holds the tokens that it held before.

    Args:
        config: of the model; what its ``attention_backend`` names serves. Its ``attention_window`` and
            ``num_sink_tokens`` stay those of the cache. All tokens stay cached; what no query sees is not read.
        max_cache_len: tokens per sequence, padding included, of a static cache (CUDA graphs, ``torch.compile``); None
            for a dynamic one, which doubles its pages when they are full.
        page_size: tokens per page, a power of two >= 16.
        room: tokens per sequence that a dynamic cache has pages for from the first one on.

    Attributes:
        padding_is_left: whether the last attention mask that the host looked at was zeros, then ones
            (:class:`VisibleTokens`). Steps whose mask the host does not look at go by it.
        hides_nothing: whether the last step had no attention mask, or one that the host looked at and that shows all.
        captured: recorded decode steps over the pages, which ``generate`` replays (``captured.py``); None: none are.
        planner: keeps plans of the decode op for the pages ``planned_for``: batch size, pages per sequence, dtype and
            device.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self, config: MHA2MLAConfig, max_cache_len: int | None = None, page_size: int = PAGE_SIZE, room: int = 0
    ) -> None:
        if not isinstance(config, MHA2MLAConfig):
            raise ValueError(f"config is a {type(config).__name__}; expected a converted model's MHA2MLAConfig")
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}; expected a power of two >= 16")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len}; expected None or a positive number of tokens")
        self.page_size, self.made_by = page_size, config
        self.padding_is_left, self.hides_nothing = True, False
        self.captured: Any = None
        self.planner, self.planned_for = StepPlanner(), None
        # Under a window of the user's a mask of the expanded form would be as large as queries times keys.
        given = (page_size, max_cache_len, room, config.attention_backend, config.attention_window is not None)
        super().__init__(layers=[LatentLayer(constants, *given) for constants in config.attention_constants()])

    def sharing_pages(self, *, static: bool) -> LatentCache:
        """Another cache over the same pages, lengths on the device and plans: a static one, for a cache that holds
        tokens; or a dynamic one, to be :meth:`reset`, since the host does not know how many these are."""
        twin = copy.copy(self)
        twin.captured, twin.layers = None, [layer.sharing_pages(static) for layer in self.layers]
        return twin

    @property
    def is_empty(self) -> bool:
        """No token was cached since creation or the last reset."""
        return self.layers[0].is_empty

    @property
    def constants(self) -> tuple[AttentionConstants, ...]:
        """Per layer, what its attention is told: windows and sinks among it."""
        return tuple([layer.constants for layer in self.layers])

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the pages of every layer hold; the last grows last."""
        return self.layers[-1].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all pages: ``batch * capacity * config.cache_bytes_per_token(itemsize)``."""
        return sum(layer.nbytes for layer in self.layers)

    def open(self, batch: int, new_tokens: int, kinds: Sequence[tuple[torch.dtype, torch.device]]) -> None:
        """Makes room for ``new_tokens`` more in each of ``batch`` sequences, so that pages do not move meanwhile.

        Args:
            kinds: per layer, dtype and device of its pages where it has none yet.

        Raises:
            ValueError: another batch size than that of the cached tokens, or more than an empty static cache holds.
        """
        # Layers share the places of new tokens, so their sequences are equally long, also where an earlier call ran out
        # of memory between two layers.
        max_pages = max([layer.pages_for(new_tokens) for layer in self.layers])
        like = None
        for layer, (dtype, device) in zip(self.layers, kinds, strict=True):
            layer.open(batch, new_tokens, dtype, device, max_pages, like)
            like = layer

    @contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """Restores the cache's tokens after an error inside. For appending: an error before
        :meth:`advance` has changed nothing anyway, unless the cache is empty and its layers are only just made."""
        made, was_empty = [layer.is_initialized for layer in self.layers], self.is_empty
        padding_is_left = self.padding_is_left
        try:
            yield
        except BaseException:
            for layer, was_made in zip(self.layers, made, strict=True):
                if not was_made:
                    layer.forget_pages()
                elif was_empty and not layer.is_empty:
                    layer.is_empty, layer._length = True, 0
                    layer.cache_seqlens.zero_()
            self.padding_is_left = padding_is_left
            raise

    def check_model(self, decoder_layers: Sequence[nn.Module], config: MHA2MLAConfig) -> None:
        """Compares the cache with a model's layers and config, but for bits, kept rotary keys, window and sinks.

        Raises:
            ValueError: the cache was made by another model's config.
        """
        own = [
            (layer.self_attn.geometry, config.softmax_scale, config.layer_rope_scaling(index))
            for index, layer in enumerate(decoder_layers)
        ]
        made = [(each.geometry, each.softmax_scale, each.attention_scaling) for each in self.constants]
        if len(made) != len(own):
            raise ValueError(f"past_key_values has {len(made)} layers; expected {len(own)}, as the model")
        for index, (mine, other) in enumerate(zip(own, made, strict=True)):
            if mine[1:] != other[1:] or not mine[0].is_cached_as(other[0]):
                raise ValueError(
                    "past_key_values was made by another model's config: geometry, softmax_scale and attention_scaling"
                    f" of layer {index} are {', '.join(map(str, other))}; expected {', '.join(map(str, mine))}"
                )

    def serve_by(self, name: str | None) -> None:
        """Serves cached and new tokens by the backend called ``name`` (``config.attention_backend``).

        Raises:
            ValueError: it refuses a layer, or its cache is made of other tensors than what is cached.
        """
        if name == self.layers[0].backend_name:
            return
        layers = [layer for layer in self.layers if layer.is_initialized]
        for layer, chosen in [(layer, layer.choose(name, layer.dtype, layer.device)) for layer in layers]:
            layer.serve_by(chosen)
        for layer in self.layers:
            layer.backend_name = name
        self.planner = StepPlanner()

    def step(
        self,
        decoder_layers: Sequence[nn.Module],
        attention_mask: Any,
        position_ids: Tensor | None,
        shape: tuple[int, int],
        output_attentions: bool,
    ) -> AttentionStep | None:
        """A step that appends new tokens to all sequences; None: layers append one by one, and keep gradients.

        Depends on shapes, on what the host knows of the cache, and on the mask's values where the host may look at them
        (:class:`VisibleTokens`).

        Args:
            decoder_layers: of the model; the weights of their ``self_attn`` say where layers run.
            attention_mask: [B, T] with T >= cached + S, or what the source's model takes.
            position_ids: [B or 1, S].
            shape: new tokens, [B, S].
        """
        batch, query_length = shape
        padded = is_padding_mask(attention_mask)
        shown, starts, obeys = None, None, attention_mask is None
        self.hides_nothing = obeys
        if padded:
            obeys = self.padding_is_left and query_length <= MAX_DECODE_QUERY_LENGTH
            if host_may_look(attention_mask, query_length):
                shown = visible_tokens(attention_mask, self.get_seq_length() + query_length)
                all_shown = (shown.counts == shown.length).all()
                found = torch.stack((are_side_by_side(shown), are_to_the_end(shown), all_shown))
                side_by_side, to_the_end, all_shown, *starts = torch.cat((found, shown.starts)).tolist()
                self.padding_is_left, self.hides_nothing = bool(to_the_end), bool(all_shown)
                # A prompt's last logits are looked at, also those of padding.
                obeys = bool(to_the_end if self.is_empty else side_by_side)
        if query_length > MAX_DECODE_QUERY_LENGTH and is_recorded(position_ids.device):
            obeys = False  # their plans are the host's work, from lengths that a replay does not have
        # A plan is for pages that do not grow under it.
        if (self.is_empty and torch.is_grad_enabled()) or not self._open_for(decoder_layers, batch, query_length):
            return None
        obeys = obeys and not output_attentions
        attends = tuple([obeys and layer.attends(query_length) for layer in self.layers])
        if padded and shown is None and True in attends:
            shown = visible_tokens(attention_mask, self.get_seq_length() + query_length)
            torch._assert_async(are_side_by_side(shown), REFUSED_MASK)
        first_visible = shown.starts if shown is not None and True in attends else None
        on_device: dict[torch.device, UniformBatch] = {}
        for layer in self.layers:  # all cache the same tokens
            if layer.device not in on_device:
                on_device[layer.device] = layer.append_to(position_ids, first_visible)
        batches = tuple([on_device[layer.device] for layer in self.layers])
        if query_length > MAX_DECODE_QUERY_LENGTH and True in attends:
            cached = self.layers[0].get_seq_length()
            lengths = torch.tensor([[query_length] * batch, [cached] * batch, starts or [0] * batch], dtype=torch.int32)
            batches = tuple([batch._replace(lengths=lengths) for batch in batches])
        if not torch.compiler.is_compiling():
            first = self.layers[0]
            pages = (first.batch_size, first.max_pages, first.dtype, first.device)
            if self.planned_for != pages:
                # The pages have moved, so no CUDA graph that was captured over them is of use any more.
                self.planned_for, self.planner = pages, StepPlanner()
        return self.planner.step(self.layers, batches, query_length, attends)

    def _open_for(self, decoder_layers: Sequence[nn.Module], batch: int, query_length: int) -> bool:
        """Makes room in all layers; False where an empty cache cannot know where its layers will run (offloading)."""
        first = self.layers[0]
        # Of all layers, also where an earlier call ran out of memory between two of them.
        fits = first.is_compileable or first._length + query_length <= self.capacity
        if fits and not first.is_empty and batch == first.batch_size:
            return True  # all layers hold the same tokens
        kinds = []
        for layer, decoder_layer in zip(self.layers, decoder_layers, strict=True):
            weight = decoder_layer.self_attn.v_b_proj
            if layer.is_initialized:
                kinds.append((layer.dtype, layer.device))
            elif weight.device.type == "meta":
                return False
            else:
                autocast = torch.is_autocast_enabled(weight.device.type)
                dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
                kinds.append((dtype, weight.device))
        self.open(batch, query_length, kinds)
        return True

    def next_positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """[1, S] int64, positions of ``new_tokens`` more tokens; padding counts."""
        return (torch.arange(new_tokens, device=device) + self.get_seq_length()).unsqueeze(0)

    def advance(self, new_tokens: int) -> None:
        """Counts ``new_tokens`` per sequence, which all layers have written to their slots; negative to remove."""
        # The device first: counting on the host cannot fail.
        for lengths in self._lengths():
            torch._foreach_add_(lengths, new_tokens)
        for layer in self.layers:
            layer.count(new_tokens)

    def _lengths(self) -> list[list[Tensor]]:
        """``cache_seqlens`` of all layers that have pages, by device."""
        on_device: dict[torch.device, list[Tensor]] = {}
        for layer in self.layers:
            if layer.is_initialized:
                on_device.setdefault(layer.device, []).append(layer.cache_seqlens)
        return list(on_device.values())

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates all layers. ``num_heads`` and ``head_dim`` are not looked at: the config has the widths."""
        with self.unchanged_by_errors():
            for layer in self.layers:
                if not layer.is_initialized:
                    layer.open(batch_size, 0, dtype, device)

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles."""
        self._settle()
        return self.__dict__

    def _settle(self) -> None:
        """Takes back a step that runs ahead of the tokens held, if there is one."""
        if self.captured is not None:
            self.captured.settle()

    def reset(self) -> None:
        """Forgets all tokens and keeps the pages."""
        self._settle()
        for lengths in self._lengths():
            torch._foreach_zero_(lengths)
        for layer in self.layers:
            layer.is_empty, layer._length = True, 0
        self.padding_is_left = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last ``-tokens_to_remove`` tokens of every sequence.

        Raises:
            ValueError: a positive number, or more tokens than there are. (How many a static cache holds is known to its
                device alone; on a GPU the device asserts it, in its stream.)
        """
        self._settle()
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor, which no step may have to wait for
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected 0 or minus the number of tokens to remove"
            )
        if tokens_to_remove == 0 or self.is_empty:
            return
        for length in {layer.device: layer.get_seq_length() for layer in self.layers}.values():
            if isinstance(length, int) or length.device.type == "cpu":
                if length + tokens_to_remove < 0:
                    raise ValueError(f"tokens_to_remove is {tokens_to_remove}; the cache holds {int(length)} tokens")
            else:
                torch._assert_async(length + tokens_to_remove >= 0, f"tokens_to_remove is {tokens_to_remove}: too many")
        self.advance(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of sequence ``beam_idx[b]`` [B]; addresses stay.

        Raises:
            ValueError: ``beam_idx`` has another shape.
        """
        self._settle()
        if self.is_empty:
            return
        if beam_idx.shape != (self.batch_size,):
            raise ValueError(f"beam_idx.shape is {tuple(beam_idx.shape)}; expected {(self.batch_size,)}, [B]")
        # Layers change in place, one after another, so all memory that this takes is taken before the first does.
        used = [tokens for layer in self.layers for tokens in layer.used()]
        scratch: dict[tuple, Tensor] = {}
        indices: dict[torch.device, Tensor] = {}
        for tokens in used:
            kind = (tokens.device, tokens.dtype)
            if kind not in scratch or scratch[kind].numel() < tokens.numel():
                scratch[kind] = tokens.new_empty(tokens.numel())
            if tokens.device not in indices:
                indices[tokens.device] = beam_idx.to(tokens.device)
        for tokens in used:
            copy = scratch[tokens.device, tokens.dtype][: tokens.numel()].view(tokens.shape)
            torch.index_select(tokens, 0, indices[tokens.device], out=copy)
            tokens.copy_(copy)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, side by side."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences ``indices``, in that order; repetitions allowed. [N] integers, or [B] booleans."""
        self._settle()
        if not self.is_initialized:
            return
        for layer, pages in [(layer, layer.selected(indices)) for layer in self.layers]:
            layer._set(pages)
