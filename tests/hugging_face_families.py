"""Tiny configs of the families of transformers that the tests know, and what is expected of each."""

from __future__ import annotations

import copy
from typing import Any

VOCAB_SIZE = 64
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE, "n_positions": 64, "n_inner": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OPT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _of(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, **changes}


_HEADS = {"head_dim": 8}
_WINDOW = {"sliding_window": 4}
_SCALED = {"query_pre_attn_scalar": 8}
_TOP2 = {"num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "moe_intermediate_size": 32, **_TOP2}
_LOCAL = {"num_local_experts": 4, **_TOP2}
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, **_TOP2,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": _of(**_HEADS, **_WINDOW, **_MOE, num_dense_layers=1),
    "apertus": _of(),
    "arcee": _of(),
    "bamba": _of(**_MAMBA, attn_layer_indices=[1]),
    "biogpt": dict(_OPT, intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "bitnet": _of(),
    "bloom": {
        "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE, "hidden_dropout": 0.0,
        "attention_dropout": 0.0
    },
    "codegen": dict(_GPT2, rotary_dim=4, n_ctx=64),
    "cohere": _of(),
    "cohere2": _of(**_WINDOW, **_HEADS),
    "cwm": _of(**_HEADS, **_WINDOW),
    "deepseek_v2": _of(**_LATENT, **_ROUTED),
    "deepseek_v3": _of(**_LATENT, **_ROUTED),
    "diffllama": _of(),
    "doge": _of(**_HEADS),
    "dots1": _of(**_HEADS, **_ROUTED),
    "ernie4_5": _of(**_HEADS),
    "ernie4_5_moe": _of(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1),
    "exaone4": _of(**_WINDOW, **_HEADS, sliding_window_pattern=2),
    "falcon": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE, "alibi": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "falcon_h1": _of(**_MAMBA, **_HEADS, mamba_d_ssm=64),
    "flex_olmo": _of(num_experts=4, **_TOP2),
    "gemma": _of(**_HEADS),
    "gemma2": _of(**_HEADS, **_WINDOW, **_SCALED),
    "gemma3_text": _of(**_HEADS, **_WINDOW, **_SCALED),
    "glm": _of(**_HEADS),
    "glm4": _of(**_HEADS),
    "glm4_moe": _of(**_HEADS, **_ROUTED),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64,
        "window_size": 4,
        "attention_types": [[["global", "local"], 1]], "attention_dropout": 0.0, "embed_dropout": 0.0,
        "resid_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": _of(hidden_dropout=0.0),
    "gpt_oss": _of(**_HEADS, **_LOCAL, **_WINDOW),
    "gptj": dict(_GPT2, rotary_dim=4),
    "granite": _of(),
    "granitemoe": _of(**_LOCAL),
    "granitemoehybrid": _of(**_LOCAL, **_MAMBA, layer_types=["mamba", "attention"]),
    "helium": _of(**_HEADS),
    "hunyuan_v1_dense": _of(**_HEADS),
    "hunyuan_v1_moe": _of(**_HEADS, num_experts=4, moe_topk=2),
    "jetmoe": _of(kv_channels=8, **_LOCAL),
    "lfm2": _of(layer_types=["conv", "full_attention"]),
    "lfm2_moe": _of(layer_types=["conv", "full_attention"], num_dense_layers=1, **_MOE),
    "llama": _of(),
    "llama4_text": _of(
        **_HEADS, num_local_experts=4, attention_chunk_size=4, intermediate_size_mlp=64,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "mamba2": {
        "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "state_size": 8, "num_heads": 8,
        "head_dim": 8, "expand": 2,
        "n_groups": 1, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "minimax_m2": _of(**_HEADS, **_LOCAL),
    "ministral": _of(**_WINDOW, **_HEADS),
    "mistral": _of(**_WINDOW),
    "mixtral": _of(**_LOCAL, sliding_window=None),
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB_SIZE, "max_seq_len": 64},
    "nemotron": _of(),
    "nemotron_h": _of(
        **_HEADS, hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1,
        chunk_size=4,
    ),
    "olmo": _of(),
    "olmo2": _of(),
    "olmo3": _of(**_WINDOW),
    "olmo_hybrid": _of(**{**_LINEAR, "linear_num_key_heads": 4}, layer_types=["linear_attention", "full_attention"]),
    "olmoe": _of(num_experts=4, **_TOP2),
    "opt": dict(_OPT, ffn_dim=64, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=32),
    "persimmon": _of(),
    "phi": _of(),
    "phi3": _of(),
    "phimoe": _of(**_LOCAL, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "qwen2": _of(),
    "qwen2_moe": _of(**_MOE, shared_expert_intermediate_size=32),
    "qwen3": _of(**_HEADS),
    "qwen3_5_text": _of(**_HEADS, **_LINEAR, num_hidden_layers=4),
    "qwen3_moe": _of(**_HEADS, **_MOE),
    "qwen3_next": _of(**_HEADS, **_LINEAR, **_MOE, num_hidden_layers=4, shared_expert_intermediate_size=32),
    "seed_oss": _of(**_HEADS, residual_dropout=0.0),
    "smollm3": _of(),
    "stablelm": _of(),
    "starcoder2": _of(**_WINDOW),
    "vaultgemma": _of(**_HEADS, **_WINDOW, **_SCALED),
    "xglm": {
        "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}  # fmt: skip

# Families whose attention is their own code, or reads masks: it gets the keys of all tokens so far from a cache.
BY_CACHE = frozenset(
    ["bloom", "codegen", "diffllama", "doge", "falcon", "gpt_neo", "gptj", "llama4_text", "mpt", "xglm"]
)
# Families some of whose layers carry a state from slice to slice.
WITH_STATES = frozenset(
    [
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_next",
    ]
)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3n_text": (
        _of(
            **_HEADS, num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8, laurel_rank=4, layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        "hidden states",
    ),
    "jamba": (
        _of(num_experts=4, **_TOP2, mamba_d_state=8, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1),
        "goes on from a state only with one token at a time",
    ),
    "mamba": (
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "state_size": 8},
        "goes on from a state only with one token at a time",
    ),
    "minimax": (_of(**_HEADS, **_LOCAL, block_size=4), "uses cache of its own"),
    "recurrent_gemma": (
        _of(**_HEADS, lru_width=32, attention_window_size=8, num_hidden_layers=3),
        "keeps a state of its own between calls",
    ),
    "rwkv": (
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "attention_hidden_size": 32},
        "takes no cache",
    ),
    "zamba2": (
        _of(
            mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1, chunk_size=4,
            layers_block_type=["mamba", "hybrid"], num_mem_blocks=1,
        ),
        "Only hidden states go from stage to stage",
    ),
}  # fmt: skip


def config_of(family: str, num_layers: int | None = None) -> Any:
    """Return the config of a family, with experts that compute one by one: those do so in any dtype."""
    from transformers import AutoConfig

    fields = CONFIGS[family] if family in CONFIGS else REFUSED[family][0]
    config = AutoConfig.for_model(family, **copy.deepcopy(fields))
    if num_layers is not None:  # of the kinds that there are, in turns
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = [kinds[index % len(kinds)] for index in range(num_layers)]
        config.num_hidden_layers = num_layers
    config._experts_implementation = "eager"
    return config
