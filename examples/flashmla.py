"""FlashMLA's decode signature over `mla_decode`, to copy into an engine that calls FlashMLA today.

Same arguments, shapes and natural-log lse as flash_mla_interface.py; any head count, width and page size from 16 on.
Two differences: a query that sees no key has lse -inf (FlashMLA: +inf); metadata is refreshed when lengths change, and
by every call in inference mode, where tensors have no version, and in a CUDA graph, whose replays have other lengths.
"""

import torch

from mha2mla.kernels import mla_decode, plan_mla_decode


class Metadata:  # the plan of a decode step, shared by its layers; made by the first call
    plan = lengths = None


def get_mla_metadata(*_, **__):
    return Metadata(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    """q [B, S_q, H, d_c + d_r], k_cache [P, page, 1, d_c + d_r] -> out [B, S_q, H, d_c], lse [B, H, S_q]."""
    latent, rope = k_cache[:, :, 0, :head_dim_v], k_cache[..., head_dim_v:]
    q_latent, q_pe = q[..., :head_dim_v], q[..., head_dim_v:]
    captured, step = q.is_cuda and torch.cuda.is_current_stream_capturing(), tile_scheduler_metadata
    version = None if captured or cache_seqlens.is_inference() else cache_seqlens._version
    if step.plan is None:
        step.plan = plan_mla_decode(
            q_latent, rope, block_table, cache_seqlens, qk_rope_head_dim=rope.shape[3], causal=causal
        )
    elif version is None or step.lengths[0] is not cache_seqlens or step.lengths[1] != version:
        step.plan.refresh(cache_seqlens)
    step.lengths = (cache_seqlens, version)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return mla_decode(
        q_latent, q_pe, latent, rope, block_table, cache_seqlens, softmax_scale=scale, causal=causal, plan=step.plan,
        return_lse=True,
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, cache = torch.randn(2, 1, 16, 576).to(device, dtype), torch.randn(4, 64, 1, 576).to(device, dtype)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    lengths, (metadata, _) = torch.tensor([70, 128], dtype=torch.int32, device=device), get_mla_metadata()
    for taken in (0, 9):  # the second step has other lengths, and the same metadata
        lengths -= taken
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata)
        for b, n in enumerate(lengths.tolist()):
            keys = cache[table[b].long(), :, 0].flatten(0, 1)[:n].double()
            score = q[b, 0].double() @ keys.T * 576**-0.5
            torch.testing.assert_close(out[b, 0].double(), score.softmax(-1) @ keys[:, :512], rtol=0.02, atol=0.02)
            torch.testing.assert_close(lse[b, :, 0].double(), score.logsumexp(-1), rtol=1e-3, atol=1e-3)
    print("two steps of two sequences: outputs and log-sum-exps are those of float64")
