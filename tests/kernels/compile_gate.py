"""Compiles a TileLang function for a GPU that is not there and reads what the compiler says of it.

Nothing is launched. ``nvcc`` and ``cuobjdump`` come from the machine or from NVIDIA's pip packages (the ``dev`` extra).
Reports are kept in the cache folder under all that decides them, as TileLang keeps kernels: lowering takes up to half a
minute, nine tenths of it in TVM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from mha2mla.environment import cache_folder

SPILL_LIMIT = 16  # bytes; more costs more than it hides


@dataclass(frozen=True)
class GateReport:
    """Compiler's figures of a kernel: registers a thread, spilled bytes, shared memory bytes a block, instructions; and
    what its source does: temporaries reinterpreted more than once, and shared buffers to which TMA copies a tile that
    may start elsewhere than at a multiple of 128 bytes.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized_wgmma: bool
    instructions: dict[str, int] | None
    reused_words: int = 0
    misaligned_loads: str = ""

    def complaints(self, shared_limit: int) -> list[str]:
        """Reasons to refuse the kernel; empty when it is fit to run. Instruction checks need a disassembler."""
        found = []
        if self.spill_bytes > SPILL_LIMIT:
            found.append(f"{self.spill_bytes} bytes of spills; expected at most {SPILL_LIMIT}")
        if self.shared_bytes > shared_limit:
            found.append(f"{self.shared_bytes} bytes of shared memory; the device has {shared_limit}")
        if self.serialized_wgmma:
            found.append("ptxas serialised wgmma")
        if self.reused_words:  # TileLang names them by their text: behind a write of the word they hold its old bits
            found.append(f"{self.reused_words} temporaries are reinterpreted more than once; expected a word for each")
        if self.misaligned_loads:  # the device stops with a misaligned address
            found.append(f"loads by TMA to {self.misaligned_loads} do not start at multiples of 128 bytes")
        return found


def find_tool(name: str) -> str | None:
    """Path of ``nvcc`` or ``cuobjdump``: on PATH, or in the pip packages' ``nvidia/cu13/bin``; else None."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"
    return shutil.which(name) or shutil.which(name, path=str(packaged))


def compile_only(function, arch: str, pass_configs: dict | None = None) -> list[GateReport]:
    """Lower ``function`` (a TileLang prim_func) for ``arch`` ("sm_90a") and assemble it with nvcc, unless a report of
    the same function by the same tools is kept.

    Returns:
        One report per kernel; ``instructions`` is None where no ``cuobjdump`` is found.

    Raises:
        FileNotFoundError: if there is no nvcc.
        RuntimeError: with nvcc's message, if it refuses the source.
        ValueError: as ``check_arguments``.
    """
    from mha2mla.kernels.machine import check_arguments

    check_arguments(function)
    if find_tool("nvcc") is None:
        raise FileNotFoundError("nvcc is not on PATH and not installed by pip (pip install -e '.[dev]' in the clone)")
    kept = cache_folder() / "compile-gate" / f"{_key(function, arch, pass_configs or {})}.json"
    if kept.is_file():
        return [GateReport(**report) for report in json.loads(kept.read_text())]
    reports = _compile(function, arch, pass_configs or {})
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
        json.dump([asdict(report) for report in reports], file)
    os.replace(file.name, kept)  # another process may be reading
    return reports


def _key(function, arch: str, pass_configs: dict) -> str:
    """Hash of the function's text, target, settings and tools, and of this file, which reads the compiler's output."""
    import tilelang

    tools = [find_tool(tool) for tool in ("nvcc", "cuobjdump")]
    versions = [tool and subprocess.run([tool, "--version"], capture_output=True, text=True).stdout for tool in tools]
    parts = [function.script(show_meta=True), arch, sorted(pass_configs.items()), tilelang.__version__, versions]
    return sha256(json.dumps([*parts, Path(__file__).read_text()]).encode()).hexdigest()


def _compile(function, arch: str, pass_configs: dict) -> list[GateReport]:
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=pass_configs), target:
        artifact = tilelang.lower(function, target=target)
    root = Path(tilelang.__file__).parent
    include = [f"-I{root / part}" for part in ("src", "3rdparty/cutlass/include", "src/tl_templates")]
    fast = ["--use_fast_math"] if pass_configs.get("tl.enable_fast_math") else []
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        source.write_text(artifact.kernel_source)
        command = [
            find_tool("nvcc"), "-std=c++17", "-O3", f"-arch={arch}", "-cubin", "-w", "--expt-relaxed-constexpr",
            "--expt-extended-lambda", "-Xptxas", "-v", *fast, *include, "-o", str(cubin), str(source),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc refused the kernel for {arch}: {done.stderr[-2000:]}")
        counts = _instructions(cubin)
    reports = []
    for name, body in re.findall(
        r"Compiling entry function '([^']+)'.*?\n(.*?)(?=ptxas info\s+: Compiling|\Z)", done.stderr, re.S
    ):
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", body)
        static = re.search(r"(\d+) bytes smem", body)
        reports.append(
            GateReport(
                name=name,
                registers=int(re.search(r"Used (\d+) registers", body).group(1)),
                spill_bytes=max(int(spills.group(1)), int(spills.group(2))) if spills else 0,
                shared_bytes=(int(static.group(1)) if static else 0) + _dynamic_shared(artifact, name),
                serialized_wgmma="wgmma" in done.stderr and "serializ" in done.stderr,
                instructions=counts.get(name) if counts is not None else None,
                reused_words=_count_reused_words(artifact.kernel_source),
                misaligned_loads=_find_misaligned_loads(artifact.kernel_source),
            )
        )
    return reports


def _count_reused_words(source: str) -> int:
    """Temporaries ``v__N`` of CUDA source that ``*(T *)(&(v__N))`` reinterprets more than once."""
    uses = Counter(re.findall(r"\*\(\w+ \*\)\(&\((\w+)\)\)", source))
    return sum(count > 1 for count in uses.values())


_BYTES = {"bfloat16_t": 2, "half_t": 2, "float": 4, "int": 4}  # others: one


def _find_misaligned_loads(source: str) -> str:
    """Buffers to which ``tl::tma_load`` by a descriptor writes at an index with a step that is no multiple of 128
    bytes, or that lie there themselves.

    Raises:
        ValueError: such a load is written in another way than is read here.
    """
    bases = {name: int(at) for name, at in re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)", source)}
    declared = {name: dtype for dtype, name in re.findall(r"__shared__ .*?(\w+) (\w+)\[", source)}
    target = re.compile(r"tl::tma_load(?:<[^>]*>)?\(\w+_desc.*?\(&\((?:\(\(([\w ]+)\*\)(\w+)\)|(\w+))\[(.*?)\]\)\)")
    found, loads = set(), target.findall(source)
    if len(loads) < (written := len(re.findall(r"tl::tma_load\w*(?:<[^>]*>)?\(\w+_desc", source))):
        raise ValueError(f"{written - len(loads)} of {written} loads by TMA do not say where they go")
    for dtype, view, array, index in loads:
        size = _BYTES.get(dtype or declared[array], 1)
        steps = [int(step) * size for step in re.findall(r"\* (\d+)\)", index)]
        if any(step % 128 for step in [bases.get(view, 0), *steps]):
            found.add(view or array)
    return ", ".join(sorted(found))


def _dynamic_shared(artifact, name: str) -> int:
    for variable, function in artifact.device_mod.functions.items():
        if variable.name_hint == name:
            for key, value in function.attrs.items():
                if "dyn" in str(key).lower():
                    return int(value)
    return 0


def _instructions(cubin: Path) -> dict[str, dict[str, int]] | None:
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        return None
    listing = subprocess.run([cuobjdump, "--dump-sass", str(cubin)], capture_output=True, text=True)
    if listing.returncode:
        return None
    operation = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", re.M)
    return {
        name: dict(Counter(operation.findall(body)))
        for name, body in re.findall(r"Function : (\S+)\n(.*?)(?=Function : |\Z)", listing.stdout, re.S)
    }
