"""Arguments of the append ops, what they leave in caches (complex numbers, float64), and the judgement of one call."""

from __future__ import annotations

import torch

# H, G, d_c, d_r, rows of inv_freq
SHAPES = [(9, 3, 48, 16, 3), (9, 3, 80, 16, 1), (8, 8, 64, 8, 8), (4, 1, 64, 64, 1), (14, 2, 88, 24, 2)]
# Layouts that store no rotary keys, or none at all: no rope heads, no rotary width, and neither.
WITHOUT_KEYS = [(4, 0, 48, 16, 1), (4, 2, 48, 0, 2), (4, 0, 80, 0, 1), (0, 0, 48, 16, 1)]
PAGE, PAGES = 4, 5


def tensors(shape, tokens=11, dtype=torch.float32, device="cpu", combined=False):
    """Arguments of mla_append; slots are distinct, and every third token has none."""
    heads, groups, width, rope, tables = shape
    make = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=make).to(device, dtype)

    if combined:
        buffer = normal(PAGES, PAGE, width + groups * rope)
        caches = buffer[..., :width], buffer[..., width:].unflatten(-1, (groups, rope))
    else:
        caches = normal(PAGES, PAGE, width), normal(PAGES, PAGE, groups, rope)
    slots = torch.randperm(PAGES * PAGE, generator=make)[:tokens].int()
    slots[::3] = torch.tensor([-1, PAGES * PAGE, -7, 2**30])[: len(slots[::3])]
    inv_freq = 10000.0 ** -torch.rand(tables, rope // 2, generator=make)
    inv_freq[:, -1:] = 0
    return {
        "latent": normal(tokens, width),
        "k_pe": normal(tokens, groups, rope),
        "q_pe": normal(tokens, heads, rope),
        "latent_cache": caches[0],
        "rope_cache": caches[1],
        "positions": torch.randint(0, 100_000, (tokens,), generator=make).int().to(device),
        "slots": slots.to(device),
        "inv_freq": inv_freq.to(device),
    }


def rotated(x, positions, inv_freq, scaling, interleaved):
    """RoPE as complex numbers, float64, from float32 angles."""
    angle = (positions.float()[:, None, None] * inv_freq.float()).double()
    factor = torch.where(inv_freq == 0, 1.0, scaling).double()
    turn = torch.polar(factor.expand_as(angle), angle).repeat_interleave(x.shape[1] // len(inv_freq), 1)
    wide = x.double()
    pair = wide.unflatten(-1, (-1, 2)) if interleaved else torch.stack(wide.chunk(2, -1), -1)
    made = torch.view_as_real(torch.view_as_complex(pair.contiguous()) * turn)
    return made.flatten(-2) if interleaved else torch.cat(made.unbind(-1), -1)


def expected_caches(given, scaling, interleaved):
    latent, rope = given["latent_cache"].clone(), given["rope_cache"].clone().double()
    keys = rotated(given["k_pe"], given["positions"], given["inv_freq"], scaling, interleaved)
    for token, slot in enumerate(given["slots"].tolist()):
        if 0 <= slot < PAGES * PAGE:
            latent[slot // PAGE, slot % PAGE] = given["latent"][token]
            rope[slot // PAGE, slot % PAGE] = keys[token]
    return latent, rope


def assert_one_rounding(found, expected, scale):
    """Float32 arithmetic on the pair, then one rounding to the dtype."""
    eps = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float64 else 0
    bound = eps * expected.abs() + 4 * torch.finfo(torch.float32).eps * scale
    assert ((found.double() - expected).abs() <= bound).all()


def assert_right(before, given, out, scaling=1.0, interleaved=False):
    latent, rope = expected_caches(before, scaling, interleaved)
    assert torch.equal(given["latent_cache"], latent)
    largest = max((float(x.abs().max()) for x in (before["k_pe"], before["q_pe"]) if x.numel()), default=0.0)
    scale = 2 * scaling * largest
    assert_one_rounding(given["rope_cache"], rope, scale)
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    slots = before["slots"].cpu()
    untouched[slots[(slots >= 0) & (slots < PAGES * PAGE)].long()] = False
    for name in ("latent_cache", "rope_cache"):
        kept, was = given[name].flatten(0, 1).cpu()[untouched], before[name].flatten(0, 1).cpu()[untouched]
        assert torch.equal(kept, was)
    assert_one_rounding(
        out, rotated(before["q_pe"], before["positions"], before["inv_freq"], scaling, interleaved), scale
    )


def copied(given):
    return {name: tensor.clone() for name, tensor in given.items()}
