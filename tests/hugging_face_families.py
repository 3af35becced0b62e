"""Tiny configs of the families of transformers that the tests know, and what is expected of each."""

import copy
from importlib.metadata import version
from typing import Any

import pytest

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

_GEMMA4 = _of(
    **_HEADS, **_WINDOW, global_head_dim=8, num_global_key_value_heads=2, vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
_MAMBA1 = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "state_size": 8}
_INDEXED = _of(**_LATENT, **_ROUTED, index_n_heads=2, index_head_dim=8, index_topk=4)

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": _of(**_HEADS, **_WINDOW, **_MOE, num_dense_layers=1),
    "apertus": _of(),
    "apertus1p5_text": _of(),
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
    "cohere2_moe": _of(**_HEADS, **_WINDOW, **_MOE),
    "cwm": _of(**_HEADS, **_WINDOW),
    "deepseek_v2": _of(**_LATENT, **_ROUTED),
    "deepseek_v3": _of(**_LATENT, **_ROUTED),
    "diffllama": _of(),
    "doge": _of(**_HEADS),
    "dots1": _of(**_HEADS, **_ROUTED),
    "ernie4_5": _of(**_HEADS),
    "ernie4_5_moe": _of(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1),
    "exaone": _of(),
    "exaone4": _of(**_WINDOW, **_HEADS, sliding_window_pattern=2),
    "exaone_moe": _of(**_HEADS, **_MOE, **_WINDOW),
    "falcon": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE, "alibi": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "falcon_h1": _of(**_MAMBA, **_HEADS, mamba_d_ssm=64),
    "flex_olmo": _of(num_experts=4, **_TOP2),
    "gemma": _of(**_HEADS),
    "gemma2": _of(**_HEADS, **_WINDOW, **_SCALED),
    "gemma3_text": _of(**_HEADS, **_WINDOW, **_SCALED),
    "gemma4_text": _GEMMA4,
    "glm": _of(**_HEADS),
    "glm4": _of(**_HEADS),
    "glm4_moe": _of(**_HEADS, **_ROUTED),
    "glm4_moe_lite": _of(**_LATENT, **_ROUTED),
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
    "gpt_neox_japanese": _of(hidden_dropout=0.0, intermediate_multiple_size=2),
    "gpt_oss": _of(**_HEADS, **_LOCAL, **_WINDOW),
    "gptj": dict(_GPT2, rotary_dim=4),
    "granite": _of(),
    "granitemoe": _of(**_LOCAL),
    "granitemoehybrid": _of(**_LOCAL, **_MAMBA, layer_types=["mamba", "attention"]),
    "granitemoeshared": _of(**_LOCAL, shared_intermediate_size=32),
    "helium": _of(**_HEADS),
    "hunyuan_v1_dense": _of(**_HEADS),
    "hunyuan_v1_moe": _of(**_HEADS, num_experts=4, moe_topk=2),
    "jetmoe": _of(kv_channels=8, **_LOCAL),
    "kimi_linear": _of(
        **_LATENT, **_LOCAL, moe_intermediate_size=32, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lara_mini": _of(
        **_HEADS, **_LINEAR, **_MOE, **_WINDOW, num_hidden_layers=5, shared_expert_intermediate_size=32,
    ),
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
    "mimo_v2_flash": _of(**_HEADS, **_WINDOW, **_ROUTED),
    "minicpm3": _of(**_LATENT),
    "minimax_m2": _of(**_HEADS, **_LOCAL),
    "ministral": _of(**_WINDOW, **_HEADS),
    "ministral3": _of(**_HEADS),
    "mistral": _of(**_WINDOW),
    "mixtral": _of(**_LOCAL, sliding_window=None),
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB_SIZE, "max_seq_len": 64},
    "nanochat": _of(),
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
    "qwen3_5_moe_text": _of(**_HEADS, **_LINEAR, **_MOE, num_hidden_layers=4, shared_expert_intermediate_size=32),
    "qwen3_5_text": _of(**_HEADS, **_LINEAR, num_hidden_layers=4),
    "qwen3_moe": _of(**_HEADS, **_MOE),
    "qwen3_next": _of(**_HEADS, **_LINEAR, **_MOE, num_hidden_layers=4, shared_expert_intermediate_size=32),
    "sarvam_mla": _of(**_LATENT, **_ROUTED),
    "sarvam_moe": _of(**_HEADS, **_ROUTED),
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
BY_CACHE = {
    "bloom", "diffllama", "doge", "falcon", "gpt_neo", "gpt_neox_japanese", "llama4_text", "mpt", "xglm",
}  # fmt: skip
# Families some of whose layers carry a state from slice to slice.
WITH_STATES = {
    "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "mamba2", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
}  # fmt: skip
# Families that cannot compute in fp64 where the default dtype is fp32: their masks hold the least number of one of the
# two, or their experts add one to the other.
NOT_IN_FP64 = {"xglm"}
# Families that draw a number for each layer, to drop none: the engine's check of the first batch refuses that.
DRAWING: set[str] = set()

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ctrl": (
        {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE, "n_positions": 64},
        "tied to the embedding, and has a bias",
    ),
    "deepseek_v32": (_INDEXED, "its attention reads the mask itself"),
    "deepseek_v4": (_of(**_ROUTED), "Only those of one stream go from stage to stage"),
    "dory": (
        _of(**_HEADS, **_WINDOW, num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
        "its 4 decoder layers run 6 times",
    ),
    "falcon_mamba": (_MAMBA1, "goes on from a state only with one token at a time"),
    "gemma3n_text": (
        _of(
            **_HEADS, num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8, laurel_rank=4, layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        "hidden states",
    ),
    "gemma4_text, E2B": ({**_GEMMA4, "hidden_size_per_layer_input": 8}, "without providing `input_ids`"),
    "glm_moe_dsa": (_INDEXED, "its attention reads the mask itself"),
    "inkling2_loop_text": (
        _of(
            **_HEADS, num_hidden_layers=4, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
            sliding_window_size=4, unpadded_vocab_size=60, n_layers_per_attn_res_block=2, loop_layer_index_start=2,
            loop_layer_index_end=4, loop_gate_rank=4, d_rel=4, rel_extent=8, n_routed_experts=4,
            moe_intermediate_size=32, **_TOP2,
        ),
        "gets tuple",
    ),
    "jamba": (
        _of(num_experts=4, **_TOP2, mamba_d_state=8, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1),
        "goes on from a state only with one token at a time",
    ),
    "longcat_flash": (
        _of(
            **{**_LATENT, **_TOP2, "num_hidden_layers": 4}, ffn_hidden_size=64, expert_ffn_hidden_size=32, num_layers=2,
            n_routed_experts=4, moe_topk=2, zero_expert_num=2,
        ),
        "it has no list of 4 decoder layers",
    ),
    "mamba": (_MAMBA1, "goes on from a state only with one token at a time"),
    "minimax": (_of(**_HEADS, **_LOCAL, block_size=4), "uses cache of its own"),
    "openai-gpt": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE, "n_positions": 64}, "takes no cache"
    ),
    "recurrent_gemma": (
        _of(**_HEADS, lru_width=32, attention_window_size=8, num_hidden_layers=3),
        "keeps a state of its own between calls",
    ),
    "rwkv": (
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "attention_hidden_size": 32},
        "takes no cache",
    ),
    "xlstm": (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": VOCAB_SIZE, "chunk_size": 8},
        "a cache of a kind of its own",
    ),
    "zamba2": (
        _of(
            mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1, chunk_size=4,
            layers_block_type=["mamba", "hybrid"], num_mem_blocks=1,
        ),
        "Only hidden states go from stage to stage",
    ),
    "zaya": (_of(**_HEADS), "has parameters beside those of its layers"),
}  # fmt: skip

IS_4 = version("transformers").startswith("4.")
NEWER = set[str]()
BY_CACHE_BEFORE_5_24 = {"codegen", "gptj"}
IS_BEFORE_5_24 = tuple(map(int, version("transformers").split(".")[:2])) < (5, 24)
if IS_BEFORE_5_24:
    BY_CACHE |= BY_CACHE_BEFORE_5_24
    NEWER |= {
        "apertus1p5_text", "dory", "exaone", "inkling2_loop_text", "lara_mini", "sarvam_mla", "sarvam_moe"
    }  # fmt: skip
if IS_4:  # 4.57
    NEWER |= {
        "afmoe", "cohere2_moe", "cwm", "deepseek_v32", "deepseek_v4", "exaone_moe", "gemma4_text", "gemma4_text, E2B",
        "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "lfm2_moe", "mimo_v2_flash", "minicpm3", "minimax_m2",
        "ministral3", "nanochat", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "zaya",
    }  # fmt: skip
CONFIGS, REFUSED = ({name: each[name] for name in each if name not in NEWER} for each in (CONFIGS, REFUSED))
WITH_STATES -= NEWER
if IS_4:
    STATEFUL = WITH_STATES & set(CONFIGS) | {"falcon_mamba", "jamba", "mamba", "rwkv", "zamba2"}
    for name in sorted(STATEFUL):  # in one order, for workers that collect the same tests
        fields = CONFIGS.pop(name) if name in CONFIGS else REFUSED[name][0]
        REFUSED[name] = (fields, "a cache of a kind of its own")
    REFUSED["recurrent_gemma"] = (REFUSED["recurrent_gemma"][0], "takes no cache")
    REFUSED["doge"] = (CONFIGS.pop("doge"), "computes something else than on the whole sequence")  # which is not causal
    # without the interfaces of attention or masks
    BY_CACHE |= {
        "biogpt", "granitemoe", "granitemoeshared", "jetmoe", "nemotron", "olmoe", "opt", "persimmon", "phimoe",
        "qwen2_moe", "stablelm",
    }  # fmt: skip
    DRAWING |= {"biogpt", "opt", "xglm"}
    NOT_IN_FP64 |= {"deepseek_v3", "dots1", "glm4_moe", "mpt"}


def known(*families: str) -> list[Any]:
    """Return the families, with a skip for those that the installed transformers lacks or that are refused with it."""
    lacking = pytest.mark.skip(reason="not with transformers 4.57")
    return [pytest.param(name, marks=[lacking] * (name not in CONFIGS)) for name in families]


def config_of(family: str, num_layers: int | None = None) -> Any:
    """Return the config of a family, with experts that compute one by one: those do so in any dtype."""
    from transformers import AutoConfig

    fields = CONFIGS[family] if family in CONFIGS else REFUSED[family][0]
    config = AutoConfig.for_model(family.partition(",")[0], **copy.deepcopy(fields))
    if num_layers is not None:  # of the kinds that there are, in turns
        kinds = getattr(config, "layer_types", None)
        if kinds and num_layers != len(kinds):
            config.layer_types = [kinds[index % len(kinds)] for index in range(num_layers)]
        config.num_hidden_layers = num_layers
    config._experts_implementation = "eager"
    return config
