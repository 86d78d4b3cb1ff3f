"""The decode op on a GPU: errors over a matrix of shapes, then speeds beside FlashAttention-3 on the MHA model.

    python benchmarks/decode.py check --json runs/decode-check.json
    python benchmarks/decode.py speed --json runs/decode-speed.json

A speed is printed only after the same inputs passed the correctness check. FlashAttention-3 is taken from the folder
that MHA2MLA_PEERS names (compiled ops of the vLLM wheel), else from the package flash_attn_interface, else it is
"missing: why".
"""

from __future__ import annotations

import lzma
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mha2mla.eval.environment import collect_environment, describe_environment
from mha2mla.eval.latency import time_callable
from mha2mla.eval.report import print_table, write_json
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import mla_decode, plan_mla_decode
from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel
from tests.kernels.problems import Problem, errors, exact, torch_at

# heads -> kv heads of a model with so many heads (SmolLM2, Qwen2, Gemma, Llama and their kin)
KV_HEADS = {9: 3, 14: 2, 16: 4, 24: 8, 32: 8, 40: 8, 64: 8, 128: 16}
LENGTHS = {
    "1": (1,) * 3,
    "63": (63,) * 3,
    "64": (64,) * 3,
    "65": (65,) * 3,
    "4096": (4096,) * 3,
    "mixed": (0, 1, 300, 5000, 64),
}
LATENT = {9: 192, 14: 128, 16: 512, 24: 320, 32: 512, 40: 448, 64: 512, 128: 512}


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def compile_shape(job: tuple[DecodeShape, int]) -> None:
    """Puts a shape's kernels into TileLang's disk cache; run in a process of its own."""
    from mha2mla.kernels.mla_decode.launch import compile_mla_decode

    compile_mla_decode(*job)


def compile_all(shapes: list[DecodeShape]) -> None:
    """Compiles in parallel; the kernels come from the disk cache afterwards."""
    jobs = [(shape, capability()) for shape in dict.fromkeys(shapes)]
    with ProcessPoolExecutor(max_workers=min(len(jobs), max(1, (os.cpu_count() or 2) - 2))) as pool:
        list(tqdm(pool.map(compile_shape, jobs), total=len(jobs), desc="compiling"))


def matrix() -> list[tuple[str, Problem]]:
    """heads x rope heads (1, kv heads, all) x page (16, 64) x lengths."""
    problems = []
    for heads, kv_heads in KV_HEADS.items():
        for groups in dict.fromkeys((1, kv_heads, heads)):
            rope = 64 if groups == 1 else 16
            for page in (16, 64):
                for label, lengths in LENGTHS.items():
                    problems.append((label, Problem(heads, groups, LATENT[heads], rope, lengths, page_size=page)))
    return problems


def check(json: str | None = None) -> bool:
    """Prints every shape's error against float64, beside torch's at bfloat16; returns whether all are within twice."""
    problems = matrix()
    compile_all([problem.shape() for _, problem in problems])
    from mha2mla.kernels.mla_decode.launch import compile_mla_decode

    rows = []
    for label, problem in tqdm(problems, desc="checking"):
        inputs = problem.inputs(torch.bfloat16, "cuda")
        out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
        expected, expected_lse = exact(inputs)
        relative, largest = errors(out, expected)
        torch_relative, torch_largest = errors(torch_at(inputs, torch.bfloat16), expected)
        finite = expected_lse > -torch.inf
        same = torch.equal(torch.isfinite(lse), finite) and not bool(torch.isnan(out).any())
        repeat = mla_decode(**inputs, backend="tilelang")
        rows.append(
            {
                "H": problem.heads,
                "G": problem.num_rope_heads,
                "d_c": problem.kv_lora_rank,
                "d_r": problem.qk_rope_head_dim,
                "page": problem.page_size,
                "length": label,
                "error": relative,
                "torch": torch_relative,
                "largest": largest,
                "torch_largest": torch_largest,
                "lse_error": float((lse - expected_lse)[finite].abs().max()) if bool(finite.any()) else 0.0,
                "ok": same
                and relative <= 2 * torch_relative
                and largest <= 2 * torch_largest
                and torch.equal(repeat, out),
            }
        )  # fmt: skip
    geometries = {problem.shape() for _, problem in problems}
    compilations = compile_mla_decode.cache_info().misses
    summary = []
    for shape in dict.fromkeys(problem.shape() for _, problem in problems):
        mine = [
            row
            for row in rows
            if (row["H"], row["G"], row["d_c"], row["page"])
            == (shape.heads, shape.num_rope_heads, shape.kv_lora_rank, shape.page_size)
        ]
        worst = max(mine, key=lambda row: row["error"] / max(row["torch"], 1e-12))
        choice = select_kernel(shape, capability())
        summary.append(
            {
                "H": shape.heads,
                "G": shape.num_rope_heads,
                "d_c": shape.kv_lora_rank,
                "d_r": shape.qk_rope_head_dim,
                "page": shape.page_size,
                **{row["length"]: row["error"] for row in mine},
                "torch_worst": worst["torch"],
                "lse": max(row["lse_error"] for row in mine),
                "ok": all(row["ok"] for row in mine),
                "kernel": choice.kernel,
            }
        )
    environment = collect_environment()
    print_table(summary, title="error against float64 (bfloat16)", caption=describe_environment(environment))
    print(
        f"{compilations} compilations for {len(geometries)} geometries, {len(rows)} calls;"
        f" wrong: {sum(not row['ok'] for row in rows)}"
    )
    if json:
        write_json(json, kind="decode-check", rows=rows, environment=environment, compilations=compilations)
    return all(row["ok"] for row in rows) and compilations == len(geometries)


def flash_attention_3(
    heads: int, head_dim: int, batch: int, length: int, page: int = 64
) -> Callable[[], torch.Tensor] | str:
    """MHA decode of the source model by FlashAttention-3 over a paged cache, or why there is none."""
    cache = [
        torch.randn(batch * length // page, page, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    q = torch.randn(batch, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * length // page, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    peers = os.environ.get("MHA2MLA_PEERS")
    if peers:
        packed = Path(peers) / "_vllm_fa3_C.abi3.so.xz"
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            library = Path(tempfile.gettempdir()) / "_vllm_fa3_C.abi3.so"
            library.write_bytes(lzma.decompress(packed.read_bytes()))
            torch.ops.load_library(str(library))
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")

        def call():
            return torch.ops._vllm_fa3_C.fwd(
                q[:, 0], cache[0], cache[1], None, None, None, None, starts, None, None, None, lengths, 1, length,
                table, None, None, None, None, None, None, None, None, head_dim**-0.5, True, -1, -1, 0.0, True,
                None, 0, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip
    else:
        try:
            from flash_attn_interface import flash_attn_with_kvcache
        except ImportError as error:
            return f"missing: {error}"

        def call():
            return flash_attn_with_kvcache(
                q, *cache, cache_seqlens=lengths, page_table=table, softmax_scale=head_dim**-0.5, causal=True
            )[:, 0]

    try:
        out = call()
        k, v = (c[table.long()].flatten(1, 2).float() for c in (x[:, :, :1] for x in cache))  # one head is enough
        score = torch.einsum("bd,btd->bt", q[:, 0, 0].float(), k[:, :, 0]) * head_dim**-0.5
        expected = torch.einsum("bt,btd->bd", score.softmax(-1), v[:, :, 0])
        error = float((out[:, 0].float() - expected).norm() / expected.norm())
        if not error < 1e-2:
            return f"missing: wrong result (relative error {error:.1e})"
    except Exception as error:
        return f"missing: {type(error).__name__}: {str(error).splitlines()[0]}"
    return call


SPEEDS = [  # heads, rope heads, d_c, d_r, page, batch, length, MHA head width of the source or None
    (32, 32, 512, 16, 64, 64, 2048, 128),
    (32, 32, 512, 16, 64, 16, 16384, 128),
    (32, 32, 512, 16, 64, 8, 4096, 128),
    (32, 32, 512, 16, 64, 1, 32768, 128),
    (32, 32, 512, 16, 16, 64, 2048, None),
    (32, 8, 512, 16, 64, 64, 4096, None),
    (32, 1, 512, 64, 64, 64, 4096, None),
    (16, 1, 512, 64, 64, 64, 4096, None),
    (9, 3, 256, 16, 64, 64, 4096, None),
    (14, 2, 128, 16, 64, 64, 8192, None),
    (40, 40, 448, 16, 64, 64, 2048, None),
    (64, 1, 512, 64, 64, 64, 4096, None),
    (128, 1, 512, 64, 64, 16, 8192, None),
]


def speed(json: str | None = None, only: int | None = None) -> bool:
    """Times the op (split kernel and combine, plan reused) with cold L2 and from a CUDA graph; checks first."""
    chosen = SPEEDS[:only]
    compile_all([DecodeShape(h, g, c, r, page, 1, "bfloat16") for h, g, c, r, page, *_ in chosen])
    rows = []
    for heads, groups, d_c, d_r, page, batch, length, head_dim in tqdm(chosen, desc="timing"):
        problem = Problem(heads, groups, d_c, d_r, (length,) * batch, page_size=page, slack=0)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        plan = plan_mla_decode(inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], d_r)
        out = torch.empty_like(inputs["q_latent"])

        def call(inputs=inputs, plan=plan, out=out):
            return mla_decode(**inputs, plan=plan, out=out, backend="tilelang")

        call()
        sample = {
            name: value[:2] if name in ("q_latent", "q_pe", "block_table", "cache_seqlens") else value
            for name, value in inputs.items()
        }
        expected, _ = exact(sample)
        relative, _ = errors(out[:2], expected)
        torch_relative, _ = errors(torch_at(sample, torch.bfloat16), expected)
        geometry = MLAGeometry(heads, groups, d_c, d_r)
        size = batch * length * geometry.cache_bytes_per_token(2)
        row = {"H": heads, "G": groups, "d_c": d_c, "d_r": d_r, "page": page, "B": batch,
               "length": length, "MB": size / 1e6,
               "splits": plan.num_splits, "error": relative, "torch": torch_relative}  # fmt: skip
        if relative > 2 * torch_relative:
            rows.append(row | {"us": None, "status": "wrong"})
            continue
        timing = time_callable(call, "cuda")
        row |= {
            "us_p20": timing.p20, "us": timing.p50, "us_p80": timing.p80, "us_graph_warm": timing.graph,
            "TB/s": size / timing.p50 / 1e6,
            "TFLOP/s": batch * length * geometry.decode_flops_per_token() / timing.p50 / 1e6,
        }  # fmt: skip
        if head_dim is not None:
            peer = flash_attention_3(heads, head_dim, batch, length)
            row["FA3_MHA_us"] = peer if isinstance(peer, str) else time_callable(peer, "cuda").p50
        rows.append(row)
        del inputs, plan, out, sample
        torch.cuda.empty_cache()
    environment = collect_environment()
    print_table(rows, title="mla_decode, bfloat16, median of cold-L2 runs", caption=describe_environment(environment))
    if json:
        write_json(json, kind="decode-speed", rows=rows, environment=environment)
    return all(row.get("us") is not None for row in rows)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    sys.exit(0 if auto_cli([check, speed]) else 1)
