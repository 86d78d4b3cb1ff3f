"""From a TileLang function to a callable, the same way for every op."""

from __future__ import annotations

from collections.abc import Callable

import tilelang

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_warp_specialized": True}
# For kernels that guard their own indices: TileLang's guards beside them cost a third of the registers.
SMALL_PASS_CONFIGS = PASS_CONFIGS | {"tl.disable_safe_memory_legalize": True}
# For those whose numbers are torch's: fast math rounds quotients and exponentials otherwise, and its cos and sin are
# wrong at large angles, which are positions times radians.
EXACT_PASS_CONFIGS = {"tl.disable_warp_specialized": True, "tl.disable_safe_memory_legalize": True}

# For bodies that leave it to TileLang which warps load and which compute: TMA and barriers come with that pass.
SPECIALISED_PASS_CONFIGS = {"tl.enable_fast_math": True}

UNTOLD_WRITES = {"tl.disable_buffer_init_check": True}  # a warning for each such kernel else


def target_of(capability: int) -> dict[str, str]:
    """TileLang's target for a compute capability."""
    return {"kind": "cuda", "arch": f"sm_{capability}a" if capability in (90, 100, 103, 120) else f"sm_{capability}"}


def check_arguments(function) -> None:
    """That no two tensors among a TileLang function's arguments have one name.

    The host code finds shapes by name: calls would be refused, or one tensor checked against another's shape. A loop
    over arguments in a body, as ``for x in (k_cache, v_cache)``, renames them.

    Raises:
        ValueError: two do.
    """
    names = [buffer.name for buffer in function.buffer_map.values()]
    if len(set(names)) < len(names):
        name = function.attrs["global_symbol"]
        raise ValueError(f"arguments of {name} are named {', '.join(names)}; expected distinct names")


def compile_for(function, capability: int, pass_configs: dict = PASS_CONFIGS) -> Callable[..., None]:
    """The compiled function's entry: TileLang's own wrapper around it checks and copies arguments for 3 µs a call.

    Raises:
        ValueError: as :func:`check_arguments`.
    """
    check_arguments(function)
    kernel = tilelang.compile(function, target=target_of(capability), pass_configs=pass_configs)
    module = kernel.adapter.get_exportable_executable()
    return (module.jit() if hasattr(module, "jit") else module).main
