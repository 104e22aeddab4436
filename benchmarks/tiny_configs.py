"""Tiny configurations of any causal language model of transformers."""

from __future__ import annotations

from typing import Any

VOCAB, LAYERS, WIDTH, HEADS, GROUPS, EXPERTS = 96, 2, 64, 4, 2, 4
_STATE = {"state_size", "ssm_state_size", "mamba_d_state", "mamba_state_dim"}

# Values of entries by name, where a configuration has them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"], WIDTH
    ),
    **dict.fromkeys(
        [
            *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff", "encoder_ffn_dim"),
            *("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("ffn_hidden_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"),
            *("shared_intermediate_size", "intermediate_size_mlp", "feed_forward_size"),
        ],
        2 * WIDTH,
    ),
    **dict.fromkeys(
        [
            *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
            *("decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"),
        ],
        LAYERS,
    ),
    **dict.fromkeys(
        [
            *("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
            *("decoder_attention_heads", "attention_heads", "num_decoder_attention_heads"),
        ],
        HEADS,
    ),
    **dict.fromkeys(
        ["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"], GROUPS
    ),
    **dict.fromkeys(
        ["head_dim", "kv_channels", "attention_head_dim", "v_head_dim", "d_kv"], WIDTH // HEADS
    ),
    **dict.fromkeys(
        [
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            *("num_local_experts_per_tok",),
        ],
        EXPERTS,
    ),
    **dict.fromkeys(["num_experts_per_tok", "moe_top_k", "num_experts_per_token", "top_k"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(
        [
            *("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq"),
            *("max_seq_len", "context_length", "max_target_positions", "max_source_positions"),
        ],
        256,
    ),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim"], 8),
    **dict.fromkeys(["sliding_window", "attention_window_size"], 64),
    **dict.fromkeys(["first_k_dense_replace", "moe_layer_start_index"], 1),
    **dict.fromkeys(_STATE, 8),
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "project_dim": WIDTH,
    "rotary_dim": 8,
}

# What the names above do not say, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    # Their defaults scale nothing.
    **{f"granite{kind}": {"logits_scaling": 8.0} for kind in ("", "moe", "moehybrid", "moeshared")},
    "hyperclovax": {"logits_scaling": 0.125},
}

_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id")


def tiny(config_class: Any, model_type: str = "") -> Any:
    """Return a small configuration of a class, and of all configurations in it.

    Raises whatever the class raises if the sizes do not fit together.
    """
    return config_class(**_values(config_class, model_type))


def _values(config_class: Any, model_type: str) -> dict[str, Any]:
    default = config_class()
    named = default.to_dict()
    layers = next((named[n] for n in ("num_hidden_layers", "n_layer") if named.get(n)), None)
    values: dict[str, Any] = {}
    for name, value in named.items():
        if name in SIZES and (isinstance(value, int) or value is None):
            if value is not None or name in ("head_dim",):
                values[name] = SIZES[name]
        elif isinstance(value, list) and layers and len(value) == layers:
            values[name] = _both_kinds(value)
        elif name in _IDS and isinstance(value, int):
            values[name] = min(value, _IDS.index(name))
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            values[name] = VOCAB - 1
        elif name.endswith("dropout") and isinstance(value, float):
            values[name] = 0.0
    for name in getattr(config_class, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            values[name] = _values(type(getattr(default, name)), "")
    if "is_decoder" in named:
        values["is_decoder"] = True
    return values | OVERRIDES.get(model_type, {})


def _both_kinds(listed: list[Any]) -> list[Any]:
    """Return LAYERS entries of a list of one entry a layer, with two kinds if it has them."""
    other = next((one for one in listed if one != listed[0]), listed[0])
    return [listed[0], *[other] * (LAYERS - 1)]
