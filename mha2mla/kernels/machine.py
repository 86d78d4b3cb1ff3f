"""The language of kernel bodies: memory by name, one body for GPUs and TileLang's C target; and their compilation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm.script.ir_builder import IRBuilder


@dataclass(frozen=True)
class Machine:
    """Allocation and loops of a kernel body. ``on_cpu``: TileLang's C target, where all memory is one thread's own."""

    on_cpu: bool = False

    alloc_shared = property(lambda m: T.alloc_local if m.on_cpu else T.alloc_shared)
    alloc_fragment = property(lambda m: T.alloc_local if m.on_cpu else T.alloc_fragment)
    parallel = property(lambda m: T.grid if m.on_cpu else T.Parallel)
    thread = property(lambda m: 0 if m.on_cpu else T.get_thread_binding())

    def rounds(self, count: int):
        """Iterations of a short loop, unrolled. On the C target each has its own scope: in one scope its ``max`` reads
        an element once, whatever is written to it in between."""
        return T.unroll(count) if self.on_cpu else list(range(count))

    def strided(self, name: str, shape: list, dtype: str):
        """Type of a tensor with dense rows and run-time strides, which the CPU target's wrapper does not pass."""
        if self.on_cpu:
            return T.Tensor(shape, dtype)
        return T.StridedTensor(shape, [*(T.dynamic(f"{name}_{i}") for i in range(len(shape) - 1)), 1], dtype)


GPU = Machine()
WARPGROUP = 128  # threads
BARRIER = 8  # named barriers below 8 belong to the compiler
BY_ROW = T.GemmWarpPolicy.FullRow
SWIZZLE_128, ROW_GROUP = 1, 1024 >> 4  # of a wgmma descriptor: layout, and 8 rows of 128 bytes


class Buffers(SimpleNamespace):
    """Buffers of a kernel, and lists of such, which the generated code calls as they are called here."""

    def __init__(self, **buffers: Any):
        super().__init__(**buffers)
        for name, held in buffers.items():
            for buffer in held if isinstance(held, list) else [held]:
                IRBuilder.name(name, buffer)


PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_warp_specialized": True}
# For kernels that guard their own indices: TileLang's guards beside them cost a third of the registers.
SMALL_PASS_CONFIGS = PASS_CONFIGS | {"tl.disable_safe_memory_legalize": True}
# For those whose numbers are torch's: fast math rounds quotients and exponentials otherwise, and its cos and sin are
# wrong at large angles, which are positions times radians.
EXACT_PASS_CONFIGS = {"tl.disable_warp_specialized": True, "tl.disable_safe_memory_legalize": True}

# For bodies that leave it to TileLang which warps load and which compute: TMA and barriers come with that pass.
SPECIALISED_PASS_CONFIGS = {"tl.enable_fast_math": True}

OPAQUE_SMEM_WRITES = {"tl.disable_buffer_init_check": True}  # a warning for each such kernel else


def make_function(name: str, arguments: dict[str, Any], body: Callable[[SimpleNamespace], None]):
    """A TileLang function, as ``T.prim_func`` makes one, for a signature that kernels share.

    Args:
        name: of the function.
        arguments: type of each argument by its name, in order.
        body: a macro of one object, which has the arguments as attributes.
    """
    builder = Builder()
    with builder.prim_func(name):
        body(SimpleNamespace(**{argument: builder.arg(argument, kind) for argument, kind in arguments.items()}))
    return builder.get()


def target_of(capability: int) -> dict[str, str]:
    """TileLang's target for a compute capability."""
    return {"kind": "cuda", "arch": f"sm_{capability}a" if capability in (90, 100, 103, 120) else f"sm_{capability}"}


def check_arguments(function) -> None:
    """Checks that no two tensor arguments of a TileLang function have one name.

    The host code finds shapes by name: calls would be refused, or one tensor checked against another's shape. A loop
    over arguments in a body, as ``for x in (k_cache, v_cache)``, renames them.

    Raises:
        ValueError: two do.
    """
    names = [buffer.name for buffer in function.buffer_map.values()]
    if len(set(names)) < len(names):
        name = function.attrs["global_symbol"]
        raise ValueError(f"arguments of {name} are named {', '.join(names)}; expected distinct names")


@dataclass(frozen=True)
class Kernel:
    """A TileLang function that was not compiled yet. A call compiles it first, but inside :func:`listing`.

    Attributes:
        digest: of all that decides what is compiled.
        name: of the function.
        size: characters of its text; long ones take long.
        recipe: what compiles it, picklable: "module:function", arguments and keywords. TileLang's functions lose the
            layouts of shared memory when they are pickled.
        build: compiles it into TileLang's disk cache, here.
        compiled: the same, or finds it there, and loads it.
    """

    digest: str
    name: str = field(compare=False)
    size: int = field(compare=False)
    recipe: tuple[str, tuple, dict] = field(compare=False)
    build: Callable[[], Any] = field(compare=False, repr=False)
    compiled: Callable[[], Callable[..., None]] = field(compare=False, repr=False)

    def __call__(self, *arguments: Any) -> None:
        if _LISTED.get() is None:
            self.compiled()(*arguments)


_LISTED: ContextVar[list[Kernel] | None] = ContextVar("_LISTED", default=None)
_RECIPE: ContextVar[tuple[str, tuple, dict] | None] = ContextVar("_RECIPE", default=None)
_KEPT: list[Any] = []  # caches of what is compiled
_MADE: dict[Any, Any] = {}  # what a listing made, by its recipe, until it is launched


@contextmanager
def listing() -> Iterator[list[Kernel]]:
    """Inside, kernels are listed in place of compiled, and launches do nothing: their outputs are not filled.

    All kernels are listed, those that ran before too, which must not read what others did not fill. A first launch
    afterwards compiles, or loads, the function that was listed: making one again takes some 60 ms.
    """
    kernels: list[Kernel] = []
    _forget_compiled()
    token = _LISTED.set(kernels)
    try:
        yield kernels
    finally:
        _LISTED.reset(token)
        _forget_compiled()


def _forget_compiled() -> None:
    for kept in _KEPT:
        kept.cache_clear()


def note(digest: str) -> Path:
    """File beside TileLang's kernels that exists once what has this digest is among them."""
    return Path(tilelang.env.TILELANG_CACHE_DIR) / "mha2mla" / digest


def write_note(digest: str) -> None:
    with suppress(OSError):  # a folder that is not ours to write to holds no kernels of ours either
        note(digest).parent.mkdir(parents=True, exist_ok=True)
        note(digest).touch()


_LOADED: dict[str, Callable[..., None]] = {}  # by digest; never unloaded: a CUDA graph may have it
AWAITED: dict[str, Callable[[], None]] = {}  # by digest: returns once other processes have compiled it


def compile_for(function, capability: int, pass_configs: dict = PASS_CONFIGS) -> Callable[..., None]:
    """The compiled function's entry, from TileLang's disk cache where it is there: TileLang's own wrapper around it
    checks and copies arguments for 3 µs a call.

    Raises:
        ValueError: as :func:`check_arguments`.
    """
    check_arguments(function)
    target = target_of(capability)
    text = function.script(show_meta=True)
    parts = (tilelang.__version__, text, target, sorted(pass_configs.items()))
    digest = sha256(repr(parts).encode()).hexdigest()

    def build() -> Any:
        kernel = tilelang.compile(function, target=target, pass_configs=pass_configs)
        write_note(digest)
        return kernel

    def compiled() -> Callable[..., None]:
        if digest not in _LOADED:
            if (wait := AWAITED.get(digest)) is not None:
                wait()
            module = build().adapter.get_exportable_executable()
            _LOADED[digest] = (module.jit() if hasattr(module, "jit") else module).main
        return _LOADED[digest]

    listed, recipe = _LISTED.get(), _RECIPE.get()
    if listed is None or recipe is None:
        return compiled()
    listed.append(Kernel(digest, str(function.attrs["global_symbol"]), len(text), recipe, build, compiled))
    return listed[-1]


def _loaded(made: Any) -> Any:
    """The kernels of a listing, compiled, in the form that the function returns outside of listings."""
    if isinstance(made, Kernel):
        return made.compiled()
    return tuple(map(_loaded, made)) if type(made) is tuple else made


def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`functools.cache` of a function that compiles kernels, known by the module and name that it has."""

    @wraps(function)
    def compile_noted(*arguments: Any, **static: Any) -> Any:
        name = f"{function.__module__}:{function.__qualname__}"
        call = name, arguments, tuple(sorted(static.items()))
        if _LISTED.get() is None and call in _MADE:
            loaded = _loaded(_MADE[call])
            _MADE.pop(call, None)
            return loaded
        token = _RECIPE.set((name, arguments, static))
        try:
            made = function(*arguments, **static)
        finally:
            _RECIPE.reset(token)
        if _LISTED.get() is not None:
            _MADE[call] = made
        return made

    _KEPT.append(cache(compile_noted))
    return _KEPT[-1]


def compiler(make: Callable[..., Any], pass_configs: dict) -> Callable[..., Callable[..., None]]:
    """Cached compilation of what ``make`` makes: takes a compute capability, and by name the arguments of ``make``.

    Of ``make_name`` it is to be ``compile_name`` in the same module.
    """

    def compile_made(capability: int, **static: Any) -> Callable[..., None]:
        return compile_for(make(**static), capability, pass_configs)

    compile_made.__module__ = make.__module__
    compile_made.__qualname__ = make.__name__.replace("make_", "compile_", 1)
    return compiled_once(compile_made)
