"""A converted checkpoint out of vLLM's layers: its linears, norms, activations and embeddings around our attention."""

# No postponed annotations: vLLM looks at those of forward().
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.families import FAMILIES, Family
from mha2mla.serving.paged_step import codes_without_kernel
from mha2mla.serving.plugin import attention_name, checkpoint_names, expert_parts, placement, source_free
from mha2mla.serving.vllm_attention import MLAParallelAttention

# Formats whose loaders fill parameters without load_weights.
LOADED_OTHERWISE = ("dummy", "sharded_state", "runai_streamer_sharded")


def family_of(config: MHA2MLAConfig) -> Family:
    """Raises ValueError, by name, for a source that vLLM's layers are not put together for here."""
    model_type = config.source_config["model_type"]
    served = {name: family for name, family in FAMILIES.items() if family.served_by_vllm}
    if model_type not in served:
        raise ValueError(
            f"the source's model_type is {model_type!r}; expected one that is served by vLLM: {', '.join(served)}"
        )
    return served[model_type]


def norm_class(family: Family) -> type[nn.Module]:
    """vLLM's class of all norms of a family."""
    return GemmaRMSNorm if family.norm_offset else RMSNorm


class GatedMLP(nn.Module):
    """Gate and up in one product, then down."""

    def __init__(self, hidden: int, width: int, activation: str, bias: bool, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [width] * 2, bias=bias, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(width, hidden, bias=bias, prefix=f"{prefix}.down_proj")
        self.act_fn = get_act_and_mul_fn(activation)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)[0]))[0]


class ExpertMLP(nn.Module):
    """The experts that a softmax over a gate chooses for a token; beside them, where the family has it, one for all."""

    def __init__(self, source: PreTrainedConfig, activation: str, prefix: str) -> None:
        super().__init__()
        hidden, experts = source.hidden_size, _number_of_experts(source)
        self.gate = ReplicatedLinear(hidden, experts, bias=False, prefix=f"{prefix}.gate")
        self.experts = FusedMoE(
            num_experts=experts,
            top_k=source.num_experts_per_tok,
            hidden_size=hidden,
            intermediate_size=getattr(source, "moe_intermediate_size", None) or source.intermediate_size,
            renormalize=getattr(source, "norm_topk_prob", True),  # Mixtral's config has no such key
            activation=activation,
            prefix=f"{prefix}.experts",
        )
        shared = getattr(source, "shared_expert_intermediate_size", 0)
        self.shared_expert = None
        if shared:
            self.shared_expert = GatedMLP(hidden, shared, activation, False, f"{prefix}.shared_expert")
            self.shared_expert_gate = ReplicatedLinear(hidden, 1, bias=False, prefix=f"{prefix}.shared_expert_gate")

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.gate(hidden_states)[0]
        if self.shared_expert is None:
            return self.experts(hidden_states, logits)
        # First, since experts may write over what they read.
        shared = self.shared_expert_gate(hidden_states)[0].sigmoid() * self.shared_expert(hidden_states)
        return shared + self.experts(hidden_states, logits)


def _number_of_experts(source: PreTrainedConfig) -> int:
    return getattr(source, "num_experts", None) or getattr(source, "num_local_experts", 0)


def _is_dense(source: PreTrainedConfig, layer_idx: int) -> bool:
    """True for a layer with one MLP, in a family with experts or without."""
    listed = layer_idx in (getattr(source, "mlp_only_layers", None) or ())
    return not _number_of_experts(source) or listed or (layer_idx + 1) % getattr(source, "decoder_sparse_step", 1) > 0


class DecoderLayer(nn.Module):
    """Norms where the family has them; the residual goes along with those in front of a block."""

    def __init__(self, config: MHA2MLAConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        source, family = config.build_source_config(), family_of(config)
        self.self_attn = MLAParallelAttention(config, layer_idx, norm_class(family), vllm_config, f"{prefix}.self_attn")
        activation = getattr(source, "hidden_activation", None) or source.hidden_act
        if _is_dense(source, layer_idx):
            bias = bool(getattr(source, "mlp_bias", False))
            self.mlp = GatedMLP(config.hidden_size, source.intermediate_size, activation, bias, f"{prefix}.mlp")
        else:
            self.mlp = ExpertMLP(source, activation, f"{prefix}.mlp")
        self.norms = family.norms
        for name in filter(None, family.norms):
            setattr(self, name, norm_class(family)(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        hidden_states, residual = self._before(before_attention, hidden_states, residual)
        hidden_states = self._after(after_attention, self.self_attn(hidden_states))
        hidden_states, residual = self._before(before_mlp, hidden_states, residual)
        return self._after(after_mlp, self.mlp(hidden_states)), residual

    def _before(self, name: str | None, branch: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """A block's input, and the residual stream with ``branch`` in it."""
        if name is None:
            residual = branch if residual is None else branch + residual
            return residual, residual
        if residual is None:
            return getattr(self, name)(branch), branch
        return getattr(self, name)(branch, residual)

    def _after(self, name: str | None, branch: Tensor) -> Tensor:
        return branch if name is None else getattr(self, name)(branch)


@support_torch_compile
class VLLMModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        family = family_of(config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, vllm_config, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.norm = norm_class(family)(config.hidden_size, eps=config.rms_norm_eps)
        self.embedding_scale = None
        if family.scaled_embeddings:  # rounded by the source
            self.embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=vllm_config.model_config.dtype))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded = self.embed_tokens(input_ids)
        return embedded if self.embedding_scale is None else embedded * self.embedding_scale

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class VLLMForCausalLM(nn.Module):
    """The model that vLLM builds for ``MHA2MLAForCausalLM``.

    Raises:
        ValueError: a source, cache dtype, quantisation or number of ranks that is not served, by name.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        if vllm_config.quant_config is not None:
            raise ValueError(
                f"quantization is {vllm_config.model_config.quantization!r}; expected none: quantised weights of"
                " converted checkpoints are not served"
            )
        ranks, drafted = vllm_config.parallel_config.tensor_parallel_size, vllm_config.num_speculative_tokens
        if (layer := codes_without_kernel(config, vllm_config.model_config.dtype, ranks, drafted)) is not None:
            coded, geometry = config.cache_bytes_per_token(2), config.cached_geometry(layer)
            config.latent_bits = 16
            warnings.warn(
                f"no kernel decodes codes of layer {layer}, {geometry}: vLLM's cache holds latents in the model's"
                f" dtype, {config.cache_bytes_per_token(2)} bytes a token in 16 bits instead of {coded}",
                stacklevel=2,
            )
        self.config = config
        self.model = VLLMModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        # The first call of load_weights brings all tensors, those that update a model a part.
        self._expects_all = vllm_config.load_config.load_format not in LOADED_OTHERWISE

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Puts a checkpoint's tensors, or a rank's part of them, into vLLM's layers.

        Returns:
            Names of the tensors here that were loaded.

        Raises:
            ValueError: the checkpoint has a tensor that there is no place for, or lacks one.
        """
        targets = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        modules = dict(self.named_modules())
        loaded, found = set(), set()
        for name, tensor in weights:
            if self.config.tie_word_embeddings and name.startswith("lm_head."):
                continue
            if name.endswith(".latent_centers") and name not in targets:  # this cache holds latents of 16 bits
                continue
            if (inner := attention_name(name)) is not None:
                tensor = modules[name.removesuffix(f".{inner}")].shard.part(inner, tensor)
            experts = expert_parts(name, tensor)
            target, place = placement(name) if not experts else (experts[0][0], None)
            if target not in targets:
                raise ValueError(f"the checkpoint has a tensor {name}; expected one of this model's")
            loaded.add(target)
            found.add(target if experts else source_free(name))
            load = getattr(targets[target], "weight_loader", default_weight_loader)
            if experts:
                for _, matrix, expert, part in experts:
                    load(targets[target], part, target, shard_id=matrix, expert_id=expert)
                continue
            if place is None:
                load(targets[target], tensor)
            else:
                load(targets[target], tensor, place)
        if self._expects_all:
            # vLLM looks at parameters alone, and not at those of linears.
            wanted = [*dict(self.named_parameters()), *(n for n, _ in self.named_buffers() if ".self_attn." in n)]
            absent = sorted({part for target in wanted for part in checkpoint_names(target)} - found)
            if absent:
                count = f"({len(absent)} absent in all)"
                raise ValueError(f"the checkpoint lacks {absent[0]} {count}; expected a tensor for each of vLLM's")
            self._expects_all = False
        return loaded
