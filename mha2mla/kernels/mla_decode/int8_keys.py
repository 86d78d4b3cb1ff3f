"""MLA decode for Hopper over 16-bit latents and rotary keys in int8: the keys are made as ``latent_ws`` makes them.

Where ``latent_ws`` multiplies W_KR by a tile, its warpgroups add codes, times the scale of their token, to the rotated
bias: ``k_pe[t] = scale[t] codes[t] + m R(t) b_KR``, rounded once. So a bias of any size costs the codes no digits, and
nothing of it is stored. ``int8_keys_cluster``: the CTAs of ``swap_ab_cluster`` make 64 columns each.
"""

import tilelang.language as T

from mha2mla.kernels.mla_decode import latent_ws, swap_ab_cluster, swap_ab_ws
from mha2mla.kernels.mla_decode.latent_ws import SUMS, KeyMaker
from mha2mla.kernels.mla_decode.selection import KEY_TILE, DecodeShape, RopeBlocks
from mha2mla.kernels.mla_decode.static import MLATypes
from mha2mla.kernels.mla_decode.swap_ab_ws import make_streaming
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice


class KeyCodes(latent_ws.CodeRing):
    """Properties of a CTA beside those of ``latent_ws``, whose warpgroups that make keys read no latents."""

    steps, code_dtype, coded = 0, T.int8, ("rope_cache", "rope_scale")
    latent_readers = property(lambda k: k.consumers)
    swizzled = ("k_ring", "codes")
    pieces = (0,)  # first columns of a tile's pieces

    def allocate(self) -> dict:
        stages = self.choice.code_stages
        return super().allocate() | {
            "codes_full": T.alloc_barrier([1] * stages),
            "codes_free": T.alloc_barrier([self.rope_writers * self.key_warpgroups] * stages),
        }


class Static(KeyCodes, latent_ws.Static):
    pass


class ClusterStatic(KeyCodes, swap_ab_cluster.LatentStatic):
    rope = property(lambda k: RopeBlocks(1, k.tiling.rows, KEY_TILE, 1, KEY_TILE))

    def first_key_column(self, half):
        return half * KEY_TILE


def widened(code):
    """An int8 number as float32: added to the bits of 1.5 * 2^23, whose last digit is one. I2F has a quarter of the
    rate."""
    return T.reinterpret(T.cast(code, T.int32) + 0x4B400000, T.float32) - T.float32(1.5 * 2**23)


@T.macro
def add_codes(k, c, memory, at, own):
    for e in T.unroll(SUMS):
        token = e // 4 * 8 + 2 * c.q + e % 2
        c.sums[e] += (
            widened(memory.codes[at, token, own + e // 2 % 2 * k.pairs])
            * memory.given[at, token // k.page_rows, token % k.page_rows]
        )


@T.macro
def make_keys(k, half, work, memory, call, thread):
    """One warpgroup: its 64 columns of the keys of all tiles of this CTA."""
    T.set_max_nreg(k.choice.registers[1], k.key_grows)
    c = KeyMaker(k, thread, half)
    own = T.min(c.pair, k.pairs - 1)
    latent_ws.load_bias(k, c, call, own)
    code_stages = k.choice.code_stages
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            u = n * k.chunks + c.v
            latent_ws.begin_sums(k, c)
            latent_ws.find_first_turns(c, work, call, work.first_token(i))
            latent_ws.rotate(c)
            T.barrier_wait(memory.codes_full[n % code_stages], (n // code_stages) & 1)
            add_codes(k, c, memory, n % code_stages, own)
            T.fence_proxy_async()  # an mbarrier does not order loads under way before writes by TMA
            T.barrier_arrive(memory.codes_free[n % code_stages])
            latent_ws.hand_over(k, c, memory, u)
        device.end_fragment(work)


def make_int8_keys_ws(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_int8_keys_ws`` for sm_90; :class:`MLATypes` has its arguments."""
    k, types = Static(shape, choice), MLATypes(shape, key_codes=True)
    return make_streaming(k, types, swap_ab_ws.consume, make_keys, stream_keys=latent_ws.stream_codes)


def make_int8_keys_cluster(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_int8_keys_cluster`` for sm_90; :class:`MLATypes` has its arguments."""
    k, types = ClusterStatic(shape, choice), MLATypes(shape, key_codes=True)
    return make_streaming(k, types, swap_ab_cluster.consume, make_keys, stream_keys=latent_ws.stream_codes)
