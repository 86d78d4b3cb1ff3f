"""What a rank of tensor parallelism holds of a layer: every tensor there and back, and sizes that are refused."""

import pytest
import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.tensor_parallel import _ENCODERS, HeadShard
from mha2mla.serving.plugin import attention_name, expert_parts, placement
from tests.modeling.models import GEOMETRIES, mla_model

GEOMETRY = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def whole_of(geometry: MLAGeometry, name: str, parts: list[Tensor]) -> Tensor:
    """The checkpoint's tensor again, from the parts of all ranks in their order: the inverse of ``HeadShard.part``."""
    shards = [HeadShard.of(geometry, rank, len(parts)) for rank in range(len(parts))]
    if name in _ENCODERS and not geometry.rope_from_latent:
        rope = [part[geometry.kv_lora_rank :].unflatten(0, (-1, geometry.qk_rope_head_dim)) for part in parts]
        joined = _joined(rope, [shard.rope_heads for shard in shards])
        return torch.cat((parts[0][: geometry.kv_lora_rank], joined.flatten(0, 1)))
    slices = {"q_b_proj": "heads", "inv_freq": "rope_heads", "k_b_proj": "up_heads", "v_b_proj": "up_heads"}
    return _joined(parts, [getattr(shard, slices[name]) for shard in shards]) if name in slices else parts[0]


def _joined(parts: list[Tensor], places: list[slice]) -> Tensor:
    """Parts by their places; of those that several ranks hold, the first."""
    found = {}
    for part, place in zip(parts, places, strict=True):
        for offset, index in enumerate(range(place.start, place.stop)):
            found.setdefault(index, part[offset])
    return torch.stack([found[index] for index in sorted(found)])


@pytest.mark.parametrize("case", GEOMETRIES)
def test_every_tensor_comes_back_from_its_shards(case):
    model, size = mla_model(case), 2
    for name, tensor in model.state_dict().items():
        inner = attention_name(name)
        if inner is None or inner.startswith(("q_proj", "o_proj")):  # vLLM's own layers split these
            continue
        geometry = model.config.layer_geometry(int(name.split(".")[2]))
        try:
            shards = [HeadShard.of(geometry, rank, size) for rank in range(size)]
        except ValueError as error:
            assert "share one of num_rope_heads=3" in str(error)
            assert case == "odd groups"
            continue
        parts = [shard.part(inner, tensor) for shard in shards]
        torch.testing.assert_close(whole_of(shards[0].whole, inner, parts), tensor, rtol=0, atol=0)
        if inner in ("k_b_proj", "v_b_proj"):
            assert {len(part) for part in parts} == {shards[0].geometry.num_up_projection_heads}
        if inner.startswith(("kv_a_proj", "k_a_proj")):
            assert {len(part) for part in parts} == {shards[0].geometry.cache_numel_per_token}


@pytest.mark.parametrize(
    ("heads", "rope", "up", "size", "local"),
    [
        (32, 32, 32, 2, (16, 16, 16)),
        (32, 1, 8, 4, (8, 1, 2)),
        (32, 8, 8, 16, (2, 1, 1)),  # more ranks than groups: each is in two of them
        (32, 8, 32, 1, (32, 8, 32)),
    ],
)
def test_heads_are_split_with_what_they_share(heads, rope, up, size, local):
    whole = MLAGeometry(heads, rope, num_key_value_heads=up, **GEOMETRY)
    shards = [HeadShard.of(whole, rank, size) for rank in range(size)]
    for shard in shards:
        part = shard.geometry
        assert (part.num_attention_heads, part.num_rope_heads, part.num_up_projection_heads) == local
        assert part.kv_lora_rank == whole.kv_lora_rank
        for head in range(heads)[shard.heads]:  # reads the same rotary key and map as in the whole layer
            mine = head - shard.heads.start
            for count, here, groups in (
                (rope, part.num_rope_heads, shard.rope_heads),
                (up, part.num_up_projection_heads, shard.up_heads),
            ):
                assert groups.start + mine * here // part.num_attention_heads == head * count // heads
    assert [head for shard in shards for head in range(heads)[shard.heads]] == list(range(heads))


def test_indivisible_head_counts_are_refused():
    for size in (2, 0, -1):
        with pytest.raises(ValueError, match=f"tensor_parallel_size is {size}; expected a divisor of the 9 query head"):
            HeadShard.of(MLAGeometry(9, 3, **GEOMETRY), 0, size)
    with pytest.raises(ValueError, match="3 query heads; expected a multiple or a divisor of the 2 that share one of"):
        HeadShard.of(MLAGeometry(6, 3, **GEOMETRY), 0, 2)
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        HeadShard.of(MLAGeometry(8, 1, **GEOMETRY), 2, 2)


def test_names_go_to_stacked_layers_and_back():
    names = list(mla_model("per-group").state_dict())
    places = {name: placement(name) for name in names}
    assert places["model.layers.0.mlp.up_proj.weight"] == ("model.layers.0.mlp.gate_up_proj.weight", 1)
    assert places["model.layers.1.self_attn.q_proj.weight"] == ("model.layers.1.self_attn.q_proj.weight", None)
    # As Phi-3 stores it: stacked already.
    assert placement("model.layers.0.mlp.gate_up_proj.weight") == ("model.layers.0.mlp.gate_up_proj.weight", None)
    assert len(set(places.values())) == len(names)
    for target in {target for target, _ in places.values()}:
        mine = sorted(place or 0 for each, place in places.values() if each == target)
        assert mine == [0, 1] if "gate_up" in target else mine == [0]


def test_experts_lie_where_vllm_stacks_them():
    block = "model.layers.3.mlp.experts"
    gate, up, down = torch.rand(2, 5, 4), torch.rand(2, 5, 4), torch.rand(2, 4, 5)
    stacked = expert_parts(f"{block}.gate_up_proj", torch.cat([gate, up], 1)) + expert_parts(f"{block}.down_proj", down)
    one_by_one, mixtrals = [], []
    for expert in range(2):
        for tensor, name, own in ((gate, "gate_proj", "w1"), (up, "up_proj", "w3"), (down, "down_proj", "w2")):
            one_by_one += expert_parts(f"{block}.{expert}.{name}.weight", tensor[expert])
            mixtrals += expert_parts(f"model.layers.3.block_sparse_moe.experts.{expert}.{own}.weight", tensor[expert])
    here = f"{block}.routed_experts"
    expected = {
        (f"{here}.{stack}", matrix, expert): tensor[expert].tolist()
        for tensor, matrix, stack in ((gate, "w1", "w13_weight"), (up, "w3", "w13_weight"), (down, "w2", "w2_weight"))
        for expert in range(2)
    }
    for parts in (stacked, one_by_one, mixtrals):
        assert {tuple(where): tensor.tolist() for *where, tensor in parts} == expected
    assert placement("model.layers.3.block_sparse_moe.gate.weight") == ("model.layers.3.mlp.gate.weight", None)
    shared = "model.layers.3.mlp.shared_expert"
    assert placement(f"{shared}.up_proj.weight") == (f"{shared}.gate_up_proj.weight", 1)
    for other in ("mlp.gate.weight", "mlp.shared_expert.down_proj.weight", "mlp.gate_proj.weight"):
        assert expert_parts(f"model.layers.3.{other}", gate) == []
