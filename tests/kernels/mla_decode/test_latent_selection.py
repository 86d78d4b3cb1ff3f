"""Kernels chosen for a cache of the latent alone."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import explain_mla_decode
from mha2mla.kernels.mla_decode.api import FP8 as STORED_FP8
from mha2mla.kernels.mla_decode.api import INT8_KEYS, LATENT, LATENT_FP8, MLA
from mha2mla.kernels.mla_decode.selection import (
    DecodeShape,
    list_kernels,
    refusal,
    select_kernel,
)
from mha2mla.kernels.split_kv.choice import SEQLENS_Q
from mha2mla.kernels.split_kv.op import PagedOp

select, refuse = (partial(function, has_rope_cache=False) for function in (select_kernel, refusal))


def shape(heads: int, d_c: int, d_r: int, page: int = 64, seqlen_q: int = 1, dtype: str = "bfloat16") -> DecodeShape:
    return DecodeShape(heads, 1, d_c, d_r, page, seqlen_q, dtype)


WIDE = ((32, 1024, 32), (64, 1024, 64), (32, 512, 128), (9, 640, 96))  # for two CTAs that share columns


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("d_r", [8, 24, 64, 96, 128])
def test_every_width_and_head_count_has_a_kernel(d_r, capability):
    for heads in (1, 9, 32, 64, 128):
        for d_c in (8, 72, 200, 384, 512, *((640, 1000, 1024) if capability == 90 else ())):
            for seqlen_q in SEQLENS_Q:
                choice = select(shape(heads, d_c, d_r, 16, seqlen_q), capability)
                assert choice.tiling.rows >= 16
                assert capability == 90 or choice.kernel == "latent_portable"


NARROW = ((32, 512, 64), (16, 72, 32), (16, 72, 96), (9, 192, 96), (64, 256, 64), (16, 384, 128))
FP8 = [
    shape(32, 512, 64),
    shape(9, 192, 128, 16, dtype="float16"),
    shape(28, 320, 128),
    shape(64, 256, 96, 16, 2),
    shape(16, 80, 32),
]
KEY_CODES = [*FP8, shape(40, 512, 128), shape(28, 1024, 64), shape(16, 72, 16), shape(1, 8, 16)]


@pytest.mark.parametrize(
    ("shapes", "how", "streamers"),
    [
        ([shape(*sizes) for sizes in (*NARROW, *WIDE)], {"has_rope_cache": False}, 1),
        (FP8, {"has_rope_cache": False, "codes": True}, 2),
        (KEY_CODES, {"key_codes": True}, 1),
    ],
    ids=["bfloat16", "e4m3", "int8 keys"],
)
def test_registers_of_every_choice_fit_a_multiprocessor(shapes, how, streamers):
    for each, choice in [(asked, choice) for asked in shapes for choice in list_kernels(asked, 90, **how)]:
        if "portable" in choice.kernel:
            continue
        computing, making, streaming = choice.registers
        makers = choice.threads // 128 - choice.warpgroups - streamers
        assert makers == (1 if "int8" in choice.kernel and choice.cluster_size > 1 else -(-each.qk_rope_head_dim // 64))
        held = choice.warpgroups * computing + makers * making + streamers * streaming
        assert 128 * held * choice.ctas_per_sm <= 65536, choice.reason
        launched = 65536 // (choice.ctas_per_sm * choice.threads) // 8 * 8
        assert streaming <= launched <= computing, "setmaxnreg gives to these and takes from that one"
        assert streamers == 1 or launched <= making, choice.reason


def test_several_tokens_of_few_heads_share_one_making_of_keys():
    """Threads that make keys leave registers to those that compute 64 rows: two tiles would each make all keys."""
    for heads, seqlen_q, d_c in ((9, 4, 192), (14, 4, 176), (64, 1, 192), (9, 4, 128)):
        choice = select(shape(heads, d_c, 128, seqlen_q=seqlen_q), 90)
        assert (choice.kernel, choice.tiling.num_tiles, choice.tiling.rows) == ("latent_ws", 1, 64)
        launched = 65536 // choice.threads // 8 * 8
        assert choice.registers[1] < launched if d_c > 128 else choice.registers[1] == launched, choice.reason
    assert select(shape(9, 192, 128), 90).registers[1] == 128


@pytest.mark.parametrize(
    ("heads", "d_c", "d_r", "kernel"),
    [
        (32, 512, 64, "latent_ws"),  # W_KR in 128 registers of each thread of one warpgroup
        (16, 72, 32, "latent_ws"),
        (9, 192, 96, "latent_ws"),
        (64, 512, 64, "latent_ws"),
        (32, 512, 96, "latent_cluster"),  # 2 x 128 registers beside 128 of output do not fit; halves of them do
        (32, 576, 64, "latent_cluster"),
        (16, 384, 128, "latent_ws"),
        (64, 1024, 64, "latent_cluster"),
        (32, 1024, 96, "latent_portable"),  # nor do 2 x 128 beside half of the output
    ],
)
def test_the_rule(heads, d_c, d_r, kernel):
    assert select(shape(heads, d_c, d_r), 90).kernel == kernel


def test_two_ctas_on_a_multiprocessor_where_their_registers_fit():
    """104 against 117 µs of one at H=16, 192 + 64."""
    resident = {d_c: select(shape(16, d_c, 64), 90).ctas_per_sm for d_c in (72, 120, 192, 256)}
    assert resident == {72: 2, 120: 2, 192: 2, 256: 1}
    assert select(shape(16, 192, 64, page=16), 90).ctas_per_sm == 1, "four addresses spill"
    assert select(shape(9, 192, 128), 90).ctas_per_sm == 1, "two warpgroups that make keys leave none"


def test_refusals_name_the_argument():
    assert refuse(shape(32, 512, 136)).startswith("qk_rope_head_dim is 136; ")
    assert refuse(shape(32, 1032, 64)).startswith("kv_lora_rank is 1032; ")
    assert refuse(shape(32, 500, 64)).startswith("kv_lora_rank is 500; ")
    assert refuse(shape(32, 512, 64, page=24)).startswith("page_size is 24; ")
    with pytest.raises(ValueError, match="shared memory a block; sm_89 has 101376"):
        select(shape(32, 1024, 64), 89)
    with pytest.raises(ValueError, match="more registers than a thread has"):
        select(shape(32, 1024, 128), 80)
    geometry = MLAGeometry(32, 1, 512, 64, rope_from_latent=True)
    assert explain_mla_decode(geometry, 64, torch.bfloat16, "cuda:0") is None
    assert explain_mla_decode(geometry, 64, torch.bfloat16, "cuda:0", latent_dtype=torch.float8_e4m3fn) is None
    with pytest.raises(ValueError, match="latent_dtype is torch.uint8"):
        explain_mla_decode(geometry, 64, torch.bfloat16, "cuda:0", latent_dtype=torch.uint8)
    assert refuse(shape(9, 120, 64), codes=True).startswith("kv_lora_rank is 120; rows of e4m3 numbers")
    assert refuse(shape(32, 528, 64), codes=True).startswith("kv_lora_rank is 528; ")
    with pytest.raises(ValueError, match="e4m3 latents need 9.0"):
        select(shape(32, 512, 64), 89, codes=True)


@pytest.mark.parametrize(("d_r", "page", "seqlen_q", "most"), [(64, 16, 8, 512), (128, 64, 1, 320), (128, 16, 8, 256)])
def test_e4m3_latents_of_every_width_up_to_the_limit_have_a_kernel(d_r, page, seqlen_q, most):
    for heads in (1, 9, 32, 128):
        for d_c in range(16, most + 1, 16):
            assert select(shape(heads, d_c, d_r, page, seqlen_q), 90, codes=True).kernel == "latent_fp8"
    with pytest.raises(ValueError, match="kv_lora_rank is 528|more registers than a thread has"):
        wider = shape(32, most + 16, d_r, page, seqlen_q)
        if why := refuse(wider, codes=True):
            raise ValueError(why)
        select(wider, 90, codes=True)


@pytest.mark.parametrize(
    ("latent", "stored"),
    [(LATENT, MLA), (LATENT_FP8, STORED_FP8), (LATENT, INT8_KEYS)],
    ids=["bfloat16", "e4m3", "int8 keys"],
)
def test_stored_keys_have_kernels_where_computed_do(latent, stored):
    """So whether a cache keeps its rotary keys needs no look at the GPU."""

    def is_served(op: PagedOp, asked: DecodeShape, capability: int) -> bool:
        try:
            return op.refusal(asked) is None and bool(op.select(asked, capability))
        except ValueError:
            return False

    served = 0
    for *sizes, capability in product((1, 40, 128), range(64, 1025, 64), (8, 64, 128), (16, 64), (86, 90)):
        if stored is INT8_KEYS and sizes[2] % 16:
            continue
        if is_served(latent, shape(*sizes), capability):
            assert is_served(stored, shape(*sizes), capability), (sizes, capability)
            served += 1
    assert served > 50
