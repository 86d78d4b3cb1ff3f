"""Decode steps of ``generate``, recorded once and replayed: CUDA graphs, which spare the host its work per kernel.

A recording holds at every length: it runs over a static cache that shares the pages of the call's own dynamic one
(:meth:`LatentCache.sharing_pages`), so lengths come from the device; tokens, positions and the mask are copied into
buffers that it reads. All else that a step looks at on the host is in the key under which it is kept, or in the
``fingerprint`` that is compared once per ``generate``. Where pages move, what was recorded over them goes.

A step is launched as soon as its token is chosen, beside the stream on which transformers' loop waits to hear whether
that token was the last, so that the device has work while the host prepares the step (:class:`LaunchesAhead`).
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from transformers import PreTrainedConfig, PreTrainedModel, StoppingCriteria

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH, compile_ahead
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.modeling_mha2mla import is_padding_mask, is_recorded

# Rotary embeddings of these types look at positions on the host, in every step.
HOST_ROPE = ("dynamic", "longrope")


class Recorder(Protocol):
    """Protocol of a recorder: :class:`CudaGraphs`, or a replay of the same operations in tests without a GPU."""

    device_type: str

    def explain(self, cache: LatentCache) -> str | None:
        """Why steps over this cache cannot be recorded, or None."""

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Result of ``step``, and a function that repeats its device work in place, with the host's values
        of now. ``step`` may be run for that, each time with an ``undo`` behind it."""

    def launch(self, replay: Callable[[], None], device: torch.device) -> None:
        """Replays behind all work of now and beside all later work, up to :meth:`wait`."""

    def wait(self, device: torch.device) -> None:
        """Later work comes behind what was launched; the host does not wait."""


@functools.cache
def _lane(device: torch.device) -> tuple[torch.cuda.Stream, threading.RLock]:
    """The stream of a device on which all recordings are made and replayed, and the right to use it. cuBLAS keeps a
    workspace for every stream: recordings of one that ran at once would write into each other's, and what a thread
    launches while another one records would be recorded."""
    return torch.cuda.Stream(device), threading.RLock()


class CudaGraphs:
    """Records CUDA graphs, all in one memory pool: they must not be replayed at the same time."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None
        self._done: torch.cuda.Event | None = None  # behind the last launch

    def explain(self, cache: LatentCache) -> str | None:
        """References read tensors on the host."""
        slow = [layer.backend.name for layer in cache.layers if not layer.backend.compiled]
        return f"{slow[0]!r} is no kernel" if slow else None

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Records a CUDA graph; waits for the device, once."""
        (stream, lane), current = _lane(device), torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        with lane, torch.cuda.stream(stream):
            stream.wait_stream(current)
            step()
            undo()
            generator = torch.cuda.default_generators[device.index or 0]
            state = generator.clone_state()
            try:
                # thread_local: what other threads do meanwhile is no error of this one.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    result = step()
            except BaseException:
                # A capture that fails leaves the generator to wait for its end, and every later sample would fail.
                generator.graphsafe_set_state(state)
                raise
        current.wait_stream(stream)
        self._pool = graph.pool()
        return result, graph.replay

    def launch(self, replay: Callable[[], None], device: torch.device) -> None:
        (stream, lane), current = _lane(device), torch.cuda.current_stream(device)
        with lane, torch.cuda.stream(stream):
            stream.wait_stream(current)
            replay()
            self._done = stream.record_event()

    def wait(self, device: torch.device) -> None:
        if self._done is not None:
            torch.cuda.current_stream(device).wait_event(self._done)


def fingerprint(model: PreTrainedModel) -> tuple:
    """Changes when a recorded step would be stale: weights were moved or written, or torch was told to multiply
    otherwise."""
    held = [held for module in model.modules() for held in (module._parameters, module._buffers) if held]
    weights = [each for tensors in held for each in tensors.values() if each is not None]
    settings = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    return (*settings, *[(each.data_ptr(), 0 if each.is_inference() else each._version) for each in weights])


def explain_capture(model: PreTrainedModel, device_type: str) -> str | None:
    """Why steps of ``model`` are not recorded on a device of that type, or None: host code runs in them that a replay
    would leave out, or what they compute can change unseen."""
    parameters, below = list(model.parameters()), [module for module in model.modules() if module is not model]
    quantizer = getattr(model, "hf_quantizer", None)
    reasons = {
        "the model is in training mode": model.training,
        f"weights are not on one {device_type} device": {each.device for each in parameters} != {parameters[0].device}
        or parameters[0].device.type != device_type,
        # Quantised, sharded, …
        "weights are no plain tensors": any(type(each) is not nn.Parameter for each in parameters),
        "its quantisation cannot be compiled": quantizer is not None and not quantizer.is_compileable,
        "the model is compiled": model._compiled_call_impl is not None,
        "autocast is on": torch.is_autocast_enabled(device_type),
        "adapters are not merged, and may be swapped": any(
            hasattr(type(module), "adapter_layer_names") for module in below
        ),
        "modules have hooks": _has_hooks(below),
        "RoPE looks at positions on the host": has_host_rope(model.model.config),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_host_rope(config: PreTrainedConfig) -> bool:
    """True if the source's tables of RoPE depend on the largest position of a step."""
    rope = getattr(config, "rope_parameters", None) or {}  # or by type of layer
    rope_types = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    return not rope_types.isdisjoint(HOST_ROPE)


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    """True where other code runs between modules: accelerate's that moves weights, for instance."""
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return True
    for module in modules:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # transformers leaves hooks behind that record hidden states for a call that asks for them, and do nothing else.
        if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks):
            return True
        if "_hf_hook" in vars(module):
            return True
    return False


# Caches are as long as the call may become, up to so many tokens behind the prompt; beyond, they grow by doubling.
_ROOM_FOR_ANSWER = 4096
# Capacities are multiples of it, so that prompts of other lengths find pages, and recordings, to use again.
_CAPACITY_STEP = 1024
_LONG_PROMPT = 256  # tokens; longer prompts launch the same kernels
# Arguments of ``forward`` that a step may have to be launched before it is asked for.
_STEP_ARGUMENTS = ("past_key_values", "attention_mask", "position_ids", "logits_to_keep", "use_cache")


@dataclass(frozen=True)
class _Buffers:
    """Inputs of a recorded step: ``tokens`` and ``positions`` [B, S], ``mask`` [B, capacity]."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None

    @classmethod
    def over(cls, pages: LatentCache, input_ids: Tensor, attention_mask: Tensor | None) -> _Buffers:
        # Not inference tensors, which nothing outside inference_mode could write to.
        with torch.inference_mode(False):
            tokens, positions = (torch.zeros_like(input_ids) for _ in range(2))
            rows = (input_ids.shape[0], pages.capacity)
            return cls(tokens, positions, None if attention_mask is None else attention_mask.new_zeros(rows))

    def load(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> None:
        self.tokens.copy_(input_ids)
        self.positions.copy_(position_ids)
        if attention_mask is not None:
            # The mask of a longer sequence before may lie behind: that is beyond the length that the device counts.
            self.mask[:, : attention_mask.shape[1]].copy_(attention_mask)


class _Graph(NamedTuple):
    buffers: _Buffers
    logits: Tensor
    replay: Callable[[], None]


class _Launched(NamedTuple):
    """A step that runs before it is asked for: behind the last token of ``sequence`` [B, T], with ``inputs`` (token,
    position, mask) from ``arguments``, over ``pages`` whose device has counted it and whose host has not."""

    graph: _Graph
    pages: LatentCache
    sequence: Tensor
    arguments: dict[str, Any]
    inputs: tuple

    def ran_with(self, *asked: Any) -> bool:
        """True for the very inputs and the ``logits_to_keep`` that ``forward`` is asked with."""
        return all(map(is_, asked, (*self.inputs, self.arguments.get("logits_to_keep", 0))))


class DecodeGraphs:
    """Recorded decode steps over the pages of one cache, by shapes and settings.

    A shape is recorded when it comes the second time: what comes once is not worth it, and what a first call compiles
    is compiled by then. Copies and pickles of a cache have none.

    Args:
        store: of the model, which may keep pages and recordings for a later ``generate``: ``is_kept``.

    Attributes:
        ahead: what launches steps of the ``generate`` that runs, or None.
    """

    def __init__(self, store: GraphStore, is_kept: bool) -> None:
        self._store = weakref.ref(store)  # the store has this: no cycle, so that memory goes with the last who wants it
        self._is_kept, self._recorder = is_kept, store.new_recorder()
        self._owner: Callable[[], LatentCache | None] = lambda: None
        self._pages: LatentCache | None = None
        self._weights: tuple = ()
        self._parameters: list[Callable[[], Tensor | None]] = []  # not kept alive by a cache that is still in use
        self._addresses: list[int] = []
        self._seen: set[tuple] = set()
        self._graphs: dict[tuple, _Graph | None] = {}
        self._launched: _Launched | None = None
        self.ahead: LaunchesAhead | None = None

    def __reduce__(self) -> tuple:
        return type(None), ()

    def __len__(self) -> int:
        return sum(step is not None for step in self._graphs.values())

    def logits(
        self,
        model: PreTrainedModel,
        cache: LatentCache,
        input_ids: Tensor,
        attention_mask: Any,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor,
    ) -> Tensor | None:
        """Logits of a step over ``cache``, which holds its tokens afterwards; None, and nothing done, if the step is
        not recorded: it is the first of its kind, or one that cannot be.

        Args:
            model: whose ``forward`` is asked, with the other arguments.
        """
        launched, inputs = self._launched, (input_ids, position_ids, attention_mask)
        if launched is not None and launched.ran_with(*inputs, logits_to_keep):
            self._launched = None
            self._recorder.wait(input_ids.device)
            return self._logits_of(launched.graph, cache, input_ids.shape[1])
        self.settle()
        if not self._fits(cache, *inputs, logits_to_keep):
            return None
        key = self._key(model, cache, *inputs, logits_to_keep)
        if self._is_stale(cache, key):
            self._pages, self._graphs, self._seen = cache.sharing_pages(static=True), {}, set()
            self._owner, self._weights = weakref.ref(cache), fingerprint(model)
            self._parameters = [weakref.ref(parameter) for parameter in model.parameters()]
            self._addresses = self._where_weights_are()
        if key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._graphs:
            self._pages.padding_is_left = cache.padding_is_left
            self._graphs[key] = self._recorded(model.forward, inputs, logits_to_keep)
        if (graph := self._graphs[key]) is None:
            return None
        graph.buffers.load(*inputs)
        self._recorder.launch(graph.replay, input_ids.device)
        self._recorder.wait(input_ids.device)
        return self._logits_of(graph, cache, input_ids.shape[1])

    def _logits_of(self, graph: _Graph, cache: LatentCache, query_length: int) -> Tensor | None:
        """What a replay gives, once the host has counted its tokens; None, and the tokens gone, where weights were
        moved."""
        for layer in cache.layers:
            layer.count(query_length)
        if self._where_weights_are() != self._addresses:  # asked while the device works; moved since the step before
            cache.crop(-query_length)
            self._pages = None
            return None
        return graph.logits.clone()

    @contextmanager
    def launching_ahead(self, model: PreTrainedModel, max_length: int | None) -> Iterator[LaunchesAhead]:
        """Gives what launches steps of one ``generate``; at the end nothing is left of it."""
        self.ahead = LaunchesAhead(model, self, max_length)
        try:
            yield self.ahead
        finally:
            self.ahead = None
            self.settle()

    def launch(self, model: PreTrainedModel, sequence: Tensor, arguments: dict[str, Any]) -> None:
        """Starts the step behind the last token of ``sequence`` [B, T], for which ``forward`` gets ``arguments``, if it
        is recorded and they are all that a step may have."""
        if any(arguments[name] is not None for name in arguments.keys() - set(_STEP_ARGUMENTS)):
            return
        cache, position_ids = arguments["past_key_values"], arguments.get("position_ids")
        if position_ids is None or sequence.device != position_ids.device:
            return
        inputs = (sequence[:, -1:], position_ids[:, -1:], arguments.get("attention_mask"))
        step = (*inputs, arguments.get("logits_to_keep", 0))
        if not self._fits(cache, *step):
            return
        key = self._key(model, cache, *step)
        if (graph := self._graphs.get(key)) is None or self._is_stale(cache, key):
            return
        graph.buffers.load(*inputs)
        self._recorder.launch(graph.replay, sequence.device)
        self._launched = _Launched(graph, self._pages, sequence, arguments, inputs)

    def arguments_of_launched(self, sequence: Tensor, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of ``forward`` for the step that runs already, or None if none runs behind ``sequence`` with these
        ``arguments``."""
        launched = self._launched
        if launched is None or sequence is not launched.sequence:
            return None
        if any(arguments.get(name) is not launched.arguments.get(name) for name in _STEP_ARGUMENTS):
            return None
        names = ("input_ids", "position_ids", "attention_mask")
        return {**launched.arguments, **dict(zip(names, launched.inputs, strict=True)), "mla_captured": self}

    def settle(self) -> None:
        """Takes a step back that was launched and not asked for."""
        launched, self._launched = self._launched, None
        if launched is not None:
            tokens = launched.inputs[0]
            self._recorder.wait(tokens.device)
            launched.pages.crop(-tokens.shape[1])
            self._recorder.launch(lambda: None, tokens.device)  # whoever gets the pages next waits for this

    @staticmethod
    def _key(
        model: PreTrainedModel,
        cache: LatentCache,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Any,
        logits_to_keep: int | Tensor,
    ) -> tuple:
        """All that the host looks at in a step, by which its recording is kept."""
        source = model.model.config
        return (
            (input_ids.shape, logits_to_keep, attention_mask is not None, cache.padding_is_left),
            (model.config.attention_backend, source.num_hidden_layers),
            getattr(source, "_experts_implementation", None),  # generate changes it for some of its steps
        )

    def _is_stale(self, cache: LatentCache, key: tuple) -> bool:
        """True where pages or weights lie elsewhere by now. Also between the steps of a call: the first ones may put
        weights into one storage (``decoder.py``). Before a replay the first and the last weight stand for all, which
        are looked at behind it."""
        if self._pages is None or self._pages.layers[0].cache_seqlens is not cache.layers[0].cache_seqlens:
            return True
        every = max(1, len(self._parameters) - 1) if key in self._graphs else 1
        return self._where_weights_are(every) != self._addresses[::every]

    def _where_weights_are(self, every: int = 1) -> list[int]:
        weights = [weight() for weight in self._parameters[::every]]
        return [0 if weight is None else weight.data_ptr() for weight in weights]

    def _fits(
        self,
        cache: LatentCache,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Any,
        logits_to_keep: int | Tensor,
    ) -> bool:
        """True for a decode step that fits the pages, and whose mask the absorbed form obeys."""
        store = self._store()
        if store is None or store.failure is not None or torch.is_grad_enabled() or is_recorded(input_ids.device):
            return False
        batch, query_length = input_ids.shape
        if cache.is_empty or cache.is_compileable or batch != cache.layers[0].batch_size:
            return False
        tokens = cache.get_seq_length() + query_length
        if query_length > MAX_DECODE_QUERY_LENGTH or tokens > cache.capacity or not isinstance(logits_to_keep, int):
            return False
        if position_ids is None or position_ids.shape not in ((batch, query_length), (1, query_length)):
            return False
        fits = is_padding_mask(attention_mask) and tokens <= attention_mask.shape[1] <= cache.capacity
        return attention_mask is None or (fits and cache.padding_is_left)

    def _recorded(self, forward: Callable[..., Any], inputs: tuple, logits_to_keep: int) -> _Graph | None:
        """The step, recorded over what it is now called with; None where it cannot be. Tokens and lengths stay."""
        input_ids, _, attention_mask = inputs
        query_length, pages = input_ids.shape[1], self._pages
        if self._recorder.explain(pages) is not None or not all(layer.attends(query_length) for layer in pages.layers):
            return None
        try:
            buffers = _Buffers.over(pages, input_ids, attention_mask)
            buffers.load(*inputs)
            arguments = (buffers.tokens, buffers.mask, buffers.positions, pages)
            logits, replay = self._recorder.record(
                lambda: forward(*arguments, use_cache=True, logits_to_keep=logits_to_keep).logits,
                lambda: pages.crop(-query_length),
                input_ids.device,
            )
        except Exception as error:  # a capture raises anything: it depends on what it met
            self._store().fail(error)
            return None
        if self._is_kept:
            self._store().keep(self, pages.nbytes)
        return _Graph(buffers, logits, replay)

    def new_cache(self, rows: int, room: int, weights: tuple, config: MHA2MLAConfig) -> LatentCache | None:
        """An empty cache over the pages, if the one before is unused and fits."""
        pages = self._pages
        if pages is None or self._owner() is not None or weights != self._weights:
            return None
        first = pages.layers[0]
        if first.batch_size != rows or pages.capacity < room or first.backend_name != config.attention_backend:
            return None
        if pages.constants != config.attention_constants():
            return None
        self._recorder.wait(first.device)
        cache = pages.sharing_pages(static=False)
        cache.reset()
        cache.captured, self._owner = self, weakref.ref(cache)
        return cache


class LaunchesAhead(StoppingCriteria):
    """Ends nothing. Starts the step behind every token that ``generate`` has chosen, before it waits to hear whether it
    was the last; of sequences of ``max_length`` tokens it is."""

    def __init__(self, model: PreTrainedModel, graphs: DecodeGraphs, max_length: int | None) -> None:
        self._model, self._graphs, self._max_length = model, graphs, max_length
        self._arguments: dict[str, Any] | None = None

    def expect(self, arguments: dict[str, Any]) -> None:
        """Notes what ``forward`` will be called with behind the token that is chosen next."""
        self._arguments = arguments

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        arguments, self._arguments = self._arguments, None
        if arguments is not None and (self._max_length is None or input_ids.shape[1] < self._max_length):
            self._graphs.launch(self._model, input_ids, arguments)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GraphStore:
    """A model's decode graphs, kept between calls of ``generate``. Copies and pickles of a model start anew.

    Args:
        new_recorder: gives what records the steps over a cache.

    Attributes:
        failure: why recording failed; nothing is recorded any more until :meth:`release`.
    """

    def __init__(self, new_recorder: type[Recorder] = CudaGraphs) -> None:
        self.new_recorder = new_recorder
        self.failure: str | None = None
        self._kept: DecodeGraphs | None = None
        self._most_bytes = 0
        self._claim = threading.Lock()  # of what is kept: calls in two threads must not get the same pages

    def __reduce__(self) -> tuple:
        return type(self), (self.new_recorder,)

    def release(self) -> None:
        """Frees pages and graphs kept for later calls, and forgets a failure; a living cache keeps its own."""
        self._kept = self.failure = None

    def fail(self, error: Exception) -> None:
        """Warns, and runs later steps without capture."""
        self.failure = f"{type(error).__name__}: {error}"
        self._kept = None
        warnings.warn(f"generate runs without captured decode steps: {self.failure}", stacklevel=2)

    def keep(self, steps: DecodeGraphs, nbytes: int) -> None:
        """For a later ``generate``, if pages of ``nbytes`` take no more memory than the model does."""
        if nbytes <= self._most_bytes:
            self._kept = steps
        elif self._kept is steps:  # its pages have grown
            self._kept = None

    def new_cache(
        self, model: PreTrainedModel, config: MHA2MLAConfig, rows: int, prompt: int, longest: int
    ) -> LatentCache:
        """The cache of a ``generate`` call: over pages that are kept, if they do.

        Args:
            prompt, longest: tokens per sequence at the beginning, and at most.
        """
        room = -(-min(longest, prompt + _ROOM_FOR_ANSWER) // _CAPACITY_STEP) * _CAPACITY_STEP
        keys = (rows, room, fingerprint(model), config)
        with self._claim:
            kept = self._kept  # which another call may give up
            cache = None if kept is None else kept.new_cache(*keys)
        if cache is None:
            self._kept = None  # before new pages are allocated
            self._most_bytes = sum(parameter.nbytes for parameter in model.parameters())
            compile_steps(model, config, rows, prompt)
            cache = LatentCache(config, room=room)
            cache.captured = DecodeGraphs(self, is_kept=True)
        return cache

    def steps_for(self, model: PreTrainedModel, cache: LatentCache) -> DecodeGraphs:
        """Graphs of a cache that the caller brings; new ones where the weights changed."""
        captured = cache.captured
        is_own = captured is not None and captured._store() is self
        if is_own and (captured._pages is None or captured._weights == fingerprint(model)):
            return captured
        return DecodeGraphs(self, is_kept=False)


def compile_steps(model: PreTrainedModel, config: MHA2MLAConfig, rows: int, prompt: int) -> int:
    """Compiles the kernels of ``generate`` ahead, where TileLang's cache lacks them, those of decode steps while the
    prompt runs; returns how many it lacked."""
    prompt = min(_LONG_PROMPT, 1 << max(0, prompt - 1).bit_length())
    cache = LatentCache(config)  # with pages of its own

    @torch.no_grad()
    def forward(tokens: int) -> None:
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device=model.device)
        model.forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    call = ("generate", config.to_json_string(use_diff=False), model.dtype, rows, prompt)
    return compile_ahead(model.device, call, functools.partial(forward, prompt), functools.partial(forward, 1))
