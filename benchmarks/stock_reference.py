"""An export for engines in torch, rounded as an engine's MLA rounds.

DeepSeek's classes in an engine round more often than the converted model: the latent once more in its norm, and while
decoding the query in the latent's space and the attention's output there, where the expanded form rounds keys and
values. So their tokens are held against this too, not only against the model's own bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from mha2mla.checkpoints import read_json


@dataclass(frozen=True)
class StockModel:
    """DeepSeek-V3's forward pass as vLLM's and SGLang's: no biases, the config's eps in every norm.

    Norms, rotation and softmax are in float32 (float64 for float64 tensors).

    Args:
        config: the export's config.json.
        tensors: by name, in one dtype.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str = "cpu") -> StockModel:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= {name: each.to(device, dtype) for name, each in load_file(file).items()}
        return cls(read_json(folder, "config.json"), tensors)

    @torch.no_grad()
    def logits(self, ids: Tensor, keep: int, *, absorbed: bool = False) -> Tensor:
        """The last ``keep`` logits [B, keep, vocabulary] of ids [B, N].

        Args:
            absorbed: all queries attend to latents, as an engine decodes; else to expanded keys and values, as it
                prefills.
        """
        x = self.tensors["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{at}input_layernorm"), f"{at}self_attn.", absorbed)
            h = self._norm(x, f"{at}post_attention_layernorm")
            gate, up = (self._map(h, f"{at}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._map(silu(gate) * up, f"{at}mlp.down_proj")
        return self._map(self._norm(x[:, -keep:], "model.norm"), "lm_head")

    def _map(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = _wide(x)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled.to(x.dtype) * self.tensors[f"{name}.weight"]

    def _attention(self, x: Tensor, at: str, absorbed: bool) -> Tensor:
        names = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        heads, nope, rope, value, rank = (self.config[name] for name in names)
        query = self._map(x, f"{at}q_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_pe = query.split((nope, rope), -1)
        c, k_pe = self._map(x, f"{at}kv_a_proj_with_mqa")[:, None].split((rank, rope), -1)
        c = self._norm(c, f"{at}kv_a_layernorm")  # [B, 1, N, rank]
        k_up, v_up = self.tensors[f"{at}kv_b_proj.weight"].unflatten(0, (heads, -1)).split((nope, value), 1)
        q_nope, keys, values = (q_nope @ k_up, c, c) if absorbed else (q_nope, c @ k_up.mT, c @ v_up.mT)
        scores = _wide(q_nope) @ _wide(keys).mT + _wide(self._rotated(q_pe)) @ _wide(self._rotated(k_pe)).mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = (scores / math.sqrt(nope + rope)).masked_fill(hidden, -torch.inf)
        # As in FlashAttention: weights are rounded for the product with values, not for their sum.
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out = _wide(weights.to(x.dtype)) @ _wide(values) / weights.sum(-1, keepdim=True)
        out = out.to(x.dtype) @ v_up.mT if absorbed else out.to(x.dtype)
        return self._map(out.transpose(1, 2).flatten(2), f"{at}o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        """x [..., N, d_R], pairs (2 j, 2 j + 1), rotated by places 0 to N - 1."""
        width, theta = x.shape[-1], self.config["rope_parameters"]["rope_theta"]
        pairs, places = (torch.arange(n, dtype=torch.float64, device=x.device) for n in (width // 2, x.shape[-2]))
        angle = places[:, None] * theta ** (-2 * pairs / width)
        even, odd = _wide(x)[..., ::2], _wide(x)[..., 1::2]
        cos, sin = angle.cos().to(even.dtype), angle.sin().to(even.dtype)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
