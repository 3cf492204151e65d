"""Runs megatron-core's GPTModel over packed nodes with explicit positions: one stage of one tensor-parallel rank.

Attention runs on any device and shares its code with the torch backend (`shared.model`), so that both see the same
masks. Losses are not computed here. Logits exist only where a token is scored, and never for the whole vocabulary at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather_sequence
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region as sum_over_tp
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.megatron.architecture import Architecture
from shared.megatron.experts import experts_spec
from shared.model.attention import Trees, attend_trees
from shared.model.context import Cut, attend_cut
from shared.model.logprobs import Entropy, HeadOutputs, Nodes, Scores, max_logits
from shared.model.picks import PickedIds
from shared.model.tree import MicroBatch, head_blocks
from shared.model.value_head import ValueHead
from shared.ranks.layout import RankPlace


@dataclass(frozen=True)
class Packed:
    """A micro-batch and its arrays on the device; with context parallelism, this rank's part. `layout` is for attention
    only."""

    batch: MicroBatch
    nodes: Nodes
    layout: Trees | Cut
    temperature: float
    entropy: Entropy
    picks: PickedIds | None = None


def transformer_config(model: Architecture, dtype: torch.dtype, place: RankPlace, *, engine: bool) -> TransformerConfig:
    """Return the settings of `model` in megatron-core's terms. `engine` selects Transformer Engine (CUDA only), with
    sequence parallelism if tp > 1.
    """
    layout, experts = place.layout, model.experts
    mixture: dict[str, Any] = {}
    if experts is not None:
        mixture = {
            "num_moe_experts": experts.count,
            "moe_ffn_hidden_size": experts.inner,
            "moe_router_topk": experts.per_token,
            "moe_router_pre_softmax": True,  # required for one expert per token; no effect, as the router is our own
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.ep,
        }
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.key_heads,
        kv_channels=model.head_dim,
        activation_func=F.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=engine and layout.tp > 1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,  # micro-batches are packed, with different numbers of nodes
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - other types forbid the line above
        calculate_per_token_loss=True,  # neither the loss nor the gradient is divided
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # weights are always loaded
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **mixture,
    )
    if not torch.cuda.is_available():
        # The other needs streams. This one needs equally many nodes on all expert-parallel ranks (`Pieces.run`).
        config.moe_token_dispatcher_type = "allgather"  # noqa: S105
    return config


class PackedAttention(nn.Module):
    """`core_attention` of a ModuleSpec. megatron-core passes `attention_mask` through unchanged. Here it is the `Trees`
    or `Cut` of the micro-batch, whose tokens attend only to one another.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        windows: tuple[int | None, ...] = (),
        softmax_scale: float | None = None,
        **_: Any,  # communication settings of other kernels
    ) -> None:
        """`layer_number` counts from 1 across all pipeline stages; `windows` is `Architecture.windows`."""
        super().__init__()
        self._scale = softmax_scale if softmax_scale is not None else float(config.kv_channels or 0) ** -0.5
        self._window = windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Trees | Cut,
        **_: Any,  # mask settings, which are redundant: the positions define the causal mask
    ) -> Tensor:
        """Map `query` [N, 1, H, D] and `key`, `value` [N, 1, G, D] to [N, 1, H * D]."""
        attend: Any = partial(attend_cut, cut=cast(Cut, attention_mask))
        if isinstance(attention_mask, Trees):
            attend = partial(attend_trees, trees=attention_mask)
        q_1HND, k_1GND, v_1GND = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out_1NHD, _none = attend(self, q_1HND, k_1GND, v_1GND, None, scaling=self._scale, sliding_window=self._window)
        return cast(Tensor, out_1NHD.transpose(0, 1).flatten(2))


def layer_spec(model: Architecture, *, engine: bool) -> ModuleSpec:
    """Return a decoder layer whose parameters have the same names with and without Transformer Engine."""
    norm: Any = te.TENorm if engine else WrappedTorchNorm
    column: Any = te.TEColumnParallelLinear if engine else ColumnParallelLinear
    row: Any = te.TERowParallelLinear if engine else RowParallelLinear
    qk_norm: Any = norm if model.qk_norm else IdentityOp
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=ModuleSpec(module=PackedAttention, params={"windows": model.windows}),
        linear_proj=row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=dense if model.experts is None else experts_spec(model.experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def token_logprobs(
    logits_PV: Tensor,
    predictor_C: Tensor,
    token_C: Tensor,
    temperature: float,
    entropy: Entropy,
    *,
    vocab: int,
    group: dist.ProcessGroup,
    picks: PickedIds | None = None,
) -> HeadOutputs:
    """Return the log-probs [C] and, if requested, the entropies [P] and the `picks` of logits / `temperature`.

    `logits_PV` holds this rank's columns of the vocabulary, which tensor-parallel ranks share. The log-probs are those
    of tokens `token_C` at predictors `predictor_C` (int64 [C]). Both results are float32, or float64 if the logits are.
    `vocab` is the number of tokens. The columns after them are padding, equivalent to -inf, and are cut off. Every rank
    of `group` gets the same values, and the gradient that flows back must be the same on each of them.
    """
    columns = logits_PV.shape[1]
    start = group.rank() * columns
    real = max(0, min(columns, vocab - start))
    scaled_PV = logits_PV[:, :real] if logits_PV.dtype == torch.float64 else logits_PV[:, :real].float()
    if temperature != 1.0:
        scaled_PV = scaled_PV / temperature
    with torch.no_grad():
        most_P = scaled_PV.new_full((len(scaled_PV),), -torch.inf)
        if real:
            most_P = scaled_PV.amax(1)
        if group.size() > 1:
            dist.all_reduce(most_P, op=dist.ReduceOp.MAX, group=group)
    shifted_PV = scaled_PV - most_P[:, None]
    exp_PV = shifted_PV.exp()
    total_P = sum_over_tp(exp_PV.sum(1), group=group)

    def logprobs(predictor: Tensor, token: Tensor) -> Tensor:
        mine = (token >= start) & (token < start + real)
        if real:
            chosen = torch.where(mine, shifted_PV[predictor, torch.where(mine, token - start, 0)], 0.0)
        else:
            chosen = shifted_PV.sum(1)[predictor].expand(token.shape)  # zeros that stay connected to the graph
        total: Tensor = sum_over_tp(chosen.contiguous(), group=group)
        total = total - total_P.log()[predictor]
        return total

    logprobs_C = logprobs(predictor_C, token_C)
    others = None if picks is None else logprobs(picks.predictors[:, None], picks.ids)
    if entropy == "none":
        return HeadOutputs(logprobs_C, None, others)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        weighted_P = sum_over_tp((exp_PV * shifted_PV).sum(1), group=group)
        return HeadOutputs(logprobs_C, total_P.log() - weighted_P / total_P, others)


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A pipeline stage. `forward` maps a `Packed` to hidden states [N, 1, hidden], or on the last stage to `Scores`."""

    def __init__(
        self, model: Architecture, frequencies: Tensor, config: TransformerConfig, place: RankPlace, *, engine: bool
    ) -> None:
        """`frequencies` is the result of `architecture.rotary_frequencies`. The weights are uninitialised."""
        layout = place.layout
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(model, engine=engine),
            vocab_size=model.padded_vocab(layout.tp),
            max_sequence_length=model.positions,
            pre_process=place.pp_rank == 0,
            post_process=place.pp_rank == layout.pp - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="none",  # rotations are computed below from the node positions
        )
        if self.post_process and model.head == "value":
            # A column-parallel layer would add up the gradient of its input, all of which every rank has here.
            self.output_layer: Any = ValueHead(model.hidden, config.params_dtype)
        elif config.sequence_parallel and self.post_process:
            # the head gets whole rows, selected from a gathered sequence: see `_scores`
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True
        self._vocab = model.vocab
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def recompute_layers(self) -> None:
        """Keep only each layer's input for the backward pass, which runs the layer again."""
        for layer in self.decoder.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def forward(self, packed: Packed) -> Any:
        angles = packed.nodes.depths.float()[:, None] * self._frequencies
        hidden: Tensor | None = None
        if self.pre_process:
            hidden = self.embedding(input_ids=packed.nodes.token_ids[None], position_ids=None)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=packed.layout,
            rotary_pos_emb=torch.cat([angles, angles], 1)[:, None, None],
        )
        return self._scores(packed, cast(Tensor, hidden)) if self.post_process else hidden

    def _scores(self, packed: Packed, hidden: Tensor) -> Scores:
        """Return the outputs, and the entropies if there are any, of the tokens scored in this micro-batch, on every
        tensor-parallel rank."""
        nodes = packed.nodes
        if self.config.sequence_parallel:
            hidden = gather_sequence(hidden, tensor_parallel_output_grad=False)
        rows = hidden[nodes.predictors]
        if isinstance(self.output_layer, ValueHead):
            values_P = self.output_layer(rows[:, 0])
            return Scores(nodes.tokens, values_P[nodes.child_predictor][nodes.token_child], None)
        most = max_logits(hidden.device.type) * self.config.tensor_model_parallel_size
        step = max(1, most // self.vocab_size)
        if len(rows) <= step:
            made = self._head(packed, rows, nodes.child_predictor, nodes.child_token, packed.picks)
        else:
            made = self._head_in_blocks(packed, rows, step)
        return made.of_tokens(nodes, packed.picks)

    def _head(
        self, packed: Packed, rows: Tensor, predictor_C: Tensor, token_C: Tensor, picks: PickedIds | None
    ) -> HeadOutputs:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(rows, weight=weight)
        return token_logprobs(
            logits[:, 0],
            predictor_C,
            token_C,
            packed.temperature,
            packed.entropy,
            vocab=self._vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
            picks=picks,
        )

    def _head_in_blocks(self, packed: Packed, rows: Tensor, step: int) -> HeadOutputs:
        """Do the work of `_head` with at most `step` rows of logits at a time. The backward pass recomputes them."""
        nodes = packed.nodes
        parts: list[HeadOutputs] = []
        for some, children in head_blocks(packed.batch, step):
            part = checkpoint(
                self._head,
                packed,
                rows[some],
                nodes.child_predictor[children] - some.start,
                nodes.child_token[children],
                None if packed.picks is None else packed.picks.block(some, children),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            parts.append(part)
        return HeadOutputs.joined(parts)
