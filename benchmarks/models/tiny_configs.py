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
    **dict.fromkeys(
        ["num_experts_per_tok", "moe_top_k", "num_experts_per_token", "moe_k", "moe_topk"], 2
    ),
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
    **dict.fromkeys(
        [
            *("project_dim", "adapter_in_dim", "adapter_out_dim", "adapter_input_size"),
            *("adapter_output_size", "embed_dim", "out_hidden_size"),
        ],
        WIDTH,
    ),
    "rotary_dim": 8,
}

# The sparse attention of Qwen4-Exp, which chooses blocks of keys.
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}

# What the names above do not say, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    # Their defaults scale nothing.
    **{f"granite{kind}": {"logits_scaling": 8.0} for kind in ("", "moe", "moehybrid", "moeshared")},
    "hyperclovax": {"logits_scaling": 0.125},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xlm": {"causal": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    **{
        name: {"num_kv_shared_layers": 0}
        for name in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
    },
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _INDEXER),
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    # A layer of each kind.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {
        "logits_scaling": 8.0,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # Its checkpoints have these entries. The class has no defaults that work.
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": GROUPS}},
    **{name: {"unpadded_vocab_size": VOCAB} for name in ("inkling2_text", "inkling2_loop_text")},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    **{f"blt_local_{part}": {"hidden_size_global": 2 * WIDTH} for part in ("encoder", "decoder")},
    "blt_global_transformer": {"hidden_size": 2 * WIDTH, "head_dim": 2 * WIDTH // HEADS},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    **{name: {"num_key_value_heads": HEADS} for name in ("dots3_note", "dots3_note_text")},
}

# Entries that are None by default, and are not found out.
_NEEDED = {
    *("head_dim", "num_key_value_heads", "num_experts_per_tok", "num_experts"),
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_topk"),
    *("hidden_size", "num_attention_heads", "num_hidden_layers"),
}
_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id")


def make_tiny_config(config_class: Any, model_type: str = "") -> Any:
    """Return a small configuration of a class, and of all configurations in it.

    Raises whatever the class raises if the sizes do not fit together.
    """
    return config_class(**_tiny_values(config_class, model_type))


def _tiny_values(config_class: Any, model_type: str) -> dict[str, Any]:
    default = config_class()
    named = default.to_dict()
    layers = next((named[n] for n in ("num_hidden_layers", "n_layer") if named.get(n)), None)
    values: dict[str, Any] = {}
    aliases = getattr(config_class, "attribute_map", {})
    aliases = aliases | {name: alias for alias, name in aliases.items()}
    for name, value in named.items():
        size = SIZES.get(name, SIZES.get(aliases.get(name, "")))
        if size is not None and (isinstance(value, int) or value is None):
            if value is not None or name in _NEEDED:
                values[name] = size
        elif isinstance(value, list) and layers and len(value) == layers:
            values[name] = _both_kinds(value)
        elif name in _IDS and isinstance(value, int):
            values[name] = min(value, _IDS.index(name))
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            values[name] = VOCAB - 1
        elif name.endswith("dropout") and isinstance(value, float):
            values[name] = 0.0
    for name in getattr(config_class, "sub_configs", {}):
        if (inner := getattr(default, name, None)) is not None:
            values[name] = _tiny_values(type(inner), inner.model_type)
    if "is_decoder" in named:
        values["is_decoder"] = True
    if "qk_rope_head_dim" in named:  # latent attention has as many keys as queries
        values |= {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
    for name, value in OVERRIDES.get(model_type, {}).items():
        inner = isinstance(value, dict) and name in getattr(config_class, "sub_configs", {})
        values[name] = values[name] | value if inner else value
    return values


def _both_kinds(entries: list[Any]) -> list[Any]:
    """Return LAYERS entries of a list with one entry per layer, of two kinds if there are two."""
    second_kind = next((entry for entry in entries if entry != entries[0]), entries[0])
    return [entries[0], *[second_kind] * (LAYERS - 1)]
