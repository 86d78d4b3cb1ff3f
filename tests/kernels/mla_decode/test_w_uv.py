"""W_UV in the kernel that merges partials: against float64 and beside the merge and the product that it stands for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mha2mla.kernels import mla_decode
from mha2mla.kernels.mla_decode.api import mla_absorbed, serves_w_uv
from mha2mla.testing.problems import Problem
from tests.gpu import graph_of
from tests.kernels.compiled import gate
from tests.kernels.problems import assert_as_near_as_torch


def test_it_serves_few_rows_of_a_hopper_only():
    problem = Problem(4, 2, 64, 8, (65, 3))
    inputs = problem.inputs(torch.bfloat16)
    v_up = torch.zeros(4, 16, 64, dtype=torch.bfloat16)
    plan = problem.plan(inputs)
    assert not serves_w_uv(inputs["q_latent"], inputs["latent_cache"], v_up, inputs["block_table"], plan)
    assert not serves_w_uv(inputs["q_latent"], inputs["latent_cache"], v_up, inputs["block_table"], None)


def test_compile_gate():
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import SMALL_PASS_CONFIGS
    from mha2mla.kernels.split_kv.combine_w_uv import make_combine_w_uv

    function = make_combine_w_uv(heads=32, maps=8, width=448, outputs=128, dtype="bfloat16")
    report = gate(function, SMALL_PASS_CONFIGS)
    assert report.spill_bytes == 0
    assert report.registers <= 128  # two blocks a multiprocessor


def test_no_block_of_a_cluster_reads_before_it_waits():
    """TileLang launches every cluster as a programmatic dependent: it may begin before the kernel before has ended."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.mla_decode.api import LATENT, MLA
    from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel
    from mha2mla.kernels.split_kv.combine_w_uv import make_combine_w_uv

    wide, latent = DecodeShape(32, 8, 896, 16, 64, 1, "bfloat16"), LATENT.shape(32, 1024, 64, 64, 1, "bfloat16")
    for function, given in (
        (MLA.make_split(wide, select_kernel(wide, 90)), "schedule"),
        (LATENT.make_split(latent, select_kernel(latent, 90, has_rope_cache=False)), "schedule"),
        (make_combine_w_uv(heads=4, maps=2, width=256, outputs=32, dtype="bfloat16"), "splits"),
    ):
        script = function.script()
        body = script[script.index("launch_thread") :]
        assert 'launch_thread("clusterIdx' in script or "cluster_dims" in script, script[:2000]
        assert body.index("pdl_sync") < body.index(f"{given}[")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@torch.no_grad()
@pytest.mark.parametrize(
    ("problem", "maps", "outputs"),
    [
        (Problem(32, 32, 512, 16, (2048,)), 32, 128),
        (Problem(32, 32, 512, 16, (0, 1, 63, 700, 2048, 65, 64, 5000)), 32, 128),
        (Problem(32, 1, 448, 64, (3, 9000)), 8, 128),
        (Problem(32, 1, 512, 64, (700, 1), seqlen_q=4), 32, 64),
        (Problem(9, 3, 192, 64, (300, 0, 4000)), 3, 64),
        (Problem(14, 2, 96, 8, (65, 300), page_size=32), 14, 16),
        (Problem(32, 1, 1024, 64, (0, 2000, 70)), 8, 128),
    ],
    ids=lambda value: (
        f"{value.heads}-{value.kv_lora_rank}-{len(value.lengths)}" if isinstance(value, Problem) else None
    ),
)
def test_right_beside_the_merge_and_the_product(problem, maps, outputs):
    """At most twice the error of the two ops that it replaces; the same bits again; poisoned workspaces."""
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = problem.plan(inputs, "tilelang")
    make = torch.Generator("cuda").manual_seed(maps)
    v_up = torch.randn(maps, outputs, problem.kv_lora_rank, generator=make, device="cuda") * problem.kv_lora_rank**-0.5
    call, v_up = {name: value for name, value in inputs.items() if name != "causal"}, v_up.bfloat16()
    served = serves_w_uv(call["q_latent"], call["latent_cache"], v_up, call["block_table"], plan)
    assert served == (maps < problem.heads)  # else it could, and others are faster
    plan.partial_out.fill_(torch.nan)
    absorbed = partial(mla_absorbed, q_nope=call["q_pe"], k_up=v_up, v_up=v_up, plan=plan, **call)
    values = absorbed()
    latents = mla_decode(**call, plan=plan)
    heads = v_up.repeat_interleave(problem.heads // maps, 0)
    plain = torch.einsum("bshi,hoi->bsho", latents, heads)
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in call.items()}
    wide["latent_cache"], wide["rope_cache"] = (wide[n].nan_to_num() for n in ("latent_cache", "rope_cache"))
    table = wide["block_table"]
    wide["block_table"] = torch.where(table < wide["latent_cache"].shape[0], table, 0)
    exact = torch.einsum("bshi,hoi->bsho", mla_decode(**wide, backend="reference"), heads.double())
    assert not values.isnan().any()
    assert_as_near_as_torch(values, plain, exact)
    assert torch.equal(values, absorbed())
    graph, again = graph_of(absorbed)
    again.zero_()
    graph.replay()
    assert torch.equal(values, again)
