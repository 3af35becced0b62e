"""Read the model size from a Hugging Face `config.json`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terapipe_ds import compat
from terapipe_ds.costs.model_sizes import Experts, Latent, ModelSize, ModelSizeError
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import JsonError, parse_json
from terapipe_ds.messages import show_value
from terapipe_ds.planner.errors import PlannerError

_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
}
"""Field of a model size -> the names that families of transformers give it."""

_NOT_GATED = {
    "gpt2", "opt", "bloom", "gpt_neox", "gptj", "falcon", "gpt_bigcode", "phi", "starcoder2", "mpt", "codegen",
    "gpt_neo", "nemotron", "xglm", "biogpt", "persimmon", "apertus", "apertus1p5_text", "arcee", "gpt_neox_japanese",
    "nanochat", "jais2",
}  # fmt: skip
_WITHOUT_BIAS = {
    "mpt", "nemotron", "falcon", "apertus", "apertus1p5_text", "arcee", "gpt_neox_japanese", "nanochat",
}  # fmt: skip
_LEARNED = {"gpt2", "opt", "gpt_bigcode", "gpt_neo", "biogpt"}
_TIED = {
    *_LEARNED, "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "mpt", "starcoder2", "cohere", "cohere2", "smollm3",
    "xglm", "ernie4_5", "ernie4_5_moe",
}  # fmt: skip
"""Families whose configs tie the output matrix to the embedding where they do not say."""

_EXPERTS = {
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "gpt_oss", "phimoe",
    "granitemoe", "dots1", "flex_olmo", "solar_open", "minimax_m2", "glm4_moe_lite", "sarvam_moe",
    "sarvam_mla", "exaone_moe", "granitemoeshared", "ernie4_5_moe",
}  # fmt: skip
"""Families whose experts are counted."""

_ONE_KEY_HEAD = {"falcon", "gpt_bigcode"}  # where `multi_query` is true or absent
_MAX_LAYERS = 10_000  # the planner goes over every layer
_DECODERS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")
_OTHER_LAYERS = (
    "mamba", "rwkv", "xlstm", "jamba", "bamba", "zamba", "recurrent", "nemotron_h", "falcon_h1", "kimi_linear", "lfm2",
    "cpmant", "hrm_text", "moshi", "openai-gpt", "phi4mm", "phi4_multimodal", "xlnet",
)  # fmt: skip

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Entries of `layer_types` of layers with attention."""

_WINDOWS = {"sliding_window", "attention_chunk_size"}
"""Keys in which layers may differ; chunks of attention are not counted."""

_WINDOWED = {"mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen3_moe"}
"""Families whose layers all have the window of their config, unless it lists kinds of layers."""

_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gpt_oss": 2}
"""Families in which every n-th layer has no window, unless their config says otherwise."""


def size_of_config(path: str) -> ModelSize:
    """Return the model size of a Hugging Face `config.json`.

    Raises PlannerError where the file cannot be read, lacks a number, or is of a family that cannot be counted.
    """
    document, config = _decoder_of(path)
    family = str(config.get("model_type", ""))
    _check_kind(path, family, document, config)
    # families spell the same number in different ways
    for name in (*itertools.chain(*_KEYS.values()), "sliding_window"):
        if (value := config.get(name)) is not None and (type(value) is not int or value < 0):
            fix = "give an integer, or a measured profile if layers differ"
            raise PlannerError(f"{path}: {name} = {show_value(value)}: {fix}")
    numbers = {field: _number(config, names) for field, names in _KEYS.items()}
    missing = [
        _KEYS[field][0] for field in ("num_layers", "hidden_size", "num_heads", "vocab_size") if not numbers[field]
    ]
    if missing:
        fix = "give the config.json of a decoder model"
        fix += ", or install transformers with its class, which has its defaults" * (config is not document)
        raise PlannerError(f"{path} lacks {', '.join(missing)}: {fix}")
    if numbers["num_layers"] > _MAX_LAYERS:
        raise PlannerError(f"{path}: {numbers['num_layers']} layers are more than {_MAX_LAYERS}: correct their number")
    hidden, heads = numbers["hidden_size"], numbers["num_heads"]
    # Falcon 7B's config says 71 key heads, which its class does not read
    has_one_key_head = family in _ONE_KEY_HEAD and not config.get("new_decoder_architecture")
    numbers["num_kv_heads"] = 1 if has_one_key_head and config.get("multi_query", True) else numbers["num_kv_heads"]
    # a key that a config leaves out has the default of transformers' classes
    usual = {"ffn_size": 4 * hidden, "num_kv_heads": heads, "head_dim": max(1, hidden // heads)}
    usual["max_sequence_length"] = 2048
    try:
        experts, latent = _experts(path, family, config, numbers), _latent(path, config, numbers)
        fields = {field: value or usual[field] for field, value in numbers.items()}
        return ModelSize(
            name=str(document.get("_name_or_path") or Path(path).parent.name or path),
            **fields,
            experts=experts,
            latent=latent,
            gated_mlp=family not in _NOT_GATED,
            bias=family in _NOT_GATED - _WITHOUT_BIAS,
            tied_embedding=_is_tied(family, document, config),
            positions="learned" if family in _LEARNED else "rope",
            windows=_windows(path, family, config, numbers["num_layers"]),
        )
    except ModelSizeError as error:
        raise PlannerError(f"{path}: {error}") from None


def _decoder_of(path: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the file, and its decoder's config: with several kinds of input it is one level down, without defaults."""
    try:
        document = parse_json(read_bytes(path))
    except (OSError, JsonError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        fix = "give a decoder's config.json, one of the files of its model on the Hugging Face hub"
        raise PlannerError(f"{path}: {problem}; {fix}") from None
    if not isinstance(document, dict):
        raise PlannerError(f"{path}: give a JSON object, the config.json of a decoder model")
    text = document.get("text_config")
    try:
        return document, compat.with_defaults(text) if isinstance(text, dict) else document
    except Exception as error:
        problem = " ".join(str(error).split())
        raise PlannerError(f"{path}: transformers cannot read text_config ({problem}): give the model's file") from None


def _is_tied(family: str, *configs: Mapping[str, Any]) -> bool:
    """Return whether embedding and output share a matrix: the first config with the key decides, or else the family."""
    said = (config["tie_word_embeddings"] for config in configs if config.get("tie_word_embeddings") is not None)
    return bool(next(said, family in _TIED))


def _experts(path: str, family: str, config: Mapping[str, Any], numbers: dict[str, int]) -> Experts | None:
    """Return the experts of a family with experts, and set `numbers["ffn_size"]` to the width of one expert."""
    keys = [key for key in config if re.search(r"(num|routed|local)_experts$", key) and config[key]]
    if not keys:
        return None
    if family not in _EXPERTS:
        known = ", ".join(sorted(_EXPERTS))
        raise PlannerError(f"{path}: {keys[0]}: experts are counted for {known}; give a measured profile")
    width, of_dense = _number(config, ["moe_intermediate_size"]) or numbers["ffn_size"], numbers["ffn_size"]
    # layers without experts: the first ones, the layers that a list names, and all but every n-th
    step = _number(config, ["decoder_sparse_step", "moe_layer_interval"]) or 1
    first = _number(config, ["first_k_dense_replace", "moe_layer_start_index"])
    layers, named = range(numbers["num_layers"]), set(_listed(path, config, "mlp_only_layers", int))
    named |= {*layers[(_number(config, ["moe_layer_end_index"]) or len(layers)) + 1 :]}
    named |= {layer for layer, kind in enumerate(_listed(path, config, "mlp_layer_types", str)) if kind == "dense"}
    dense = sum(layer < first or layer in named or (layer + 1) % step != 0 for layer in layers)
    number = _number(config, ["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"])
    shared = _number(config, ["shared_expert_intermediate_size", "shared_intermediate_size"]) or number * width
    numbers["ffn_size"] = width
    per_token = _number(config, ["moe_k"]) or _needed(path, config, "num_experts_per_tok")
    return Experts(_needed(path, config, keys[0]), per_token, shared, dense, of_dense if dense else 0)


def _latent(path: str, config: Mapping[str, Any], numbers: dict[str, int]) -> Latent | None:
    """Return the ranks of latent attention, and set `numbers["head_dim"]` to the width of queries and keys."""
    if not config.get("kv_lora_rank"):
        return None
    names = "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"
    rank, rope, value, rest = (_needed(path, config, name) for name in names)
    numbers["head_dim"] = rope + rest
    return Latent(_number(config, ["q_lora_rank"]), rank, rope, value)


def _windows(path: str, family: str, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the tokens that each layer sees, 0 for all; nothing if no layer has a window."""
    window, layers = _number(config, ["sliding_window"]), range(num_layers)
    window *= bool(config.get("use_sliding_window", not family.startswith(("qwen", "smollm3"))))
    kinds = _listed(path, config, "layer_types", str)
    every = _number(config, ["sliding_window_pattern"]) or _FULL_EVERY.get(family, 0)
    if kinds:
        windowed = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    elif every:
        windowed = {layer for layer in layers if (layer + 1) % every}
    elif family in ("qwen2", "qwen3"):
        windowed = {*layers[_number(config, ["max_window_layers"]) or 28 :]}
    else:
        windowed = {*layers} if family in _WINDOWED else set()
    if kinds and len(kinds) != num_layers:
        raise PlannerError(f"{path}: layer_types has {len(kinds)} entries for {num_layers} layers: give one per layer")
    own = (config.get("per_layer_config") or {}).get
    of_layers = ({"sliding_window": window} | own(str(layer), {}) for layer in layers)
    windows = [_number(each, ["sliding_window"]) * (i in windowed) for i, each in enumerate(of_layers)]
    return tuple(windows) if any(windows) else ()


def _needed(path: str, config: Mapping[str, Any], name: str) -> int:
    if not (number := _number(config, [name])):
        raise PlannerError(f"{path} lacks {name}: give the config.json of a decoder model")
    return number


def _check_kind(path: str, family: str, document: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise PlannerError for encoders, and for layers that are not all attention and a usual MLP."""
    architectures = _listed(path, document, "architectures", str)
    is_other = architectures and not any(name.endswith(_DECODERS) for name in architectures)
    if document.get("is_encoder_decoder") or is_other:
        what = ", ".join(architectures) or family
        raise PlannerError(f"{path}: {what} is no decoder model; give the config.json of a causal language model")
    kinds = {str(kind) for kind in _listed(path, config, "layer_types", str)}
    other_keys = "hidden_size_per_layer_input", "type_vocab_size", "block_configs"  # Gemma 3n and 4; BERT; Nemotron NAS
    per_layer = config.get("per_layer_config") or {}  # layer number -> keys in which it differs from the others
    is_dict = isinstance(per_layer, dict) and all(isinstance(layer, dict) for layer in per_layer.values())
    is_other = any(map(config.get, other_keys)) or not (is_dict and {*itertools.chain(*per_layer.values())} <= _WINDOWS)
    if is_other or family.startswith(_OTHER_LAYERS) or not kinds <= _KINDS:
        raise PlannerError(f"{path}: layers of {family} are not all attention and a usual MLP; give a measured profile")


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int:
    values = [config[name] for name in names if type(config.get(name)) is int and config[name] > 0]
    return values[0] if values else 0


def _listed(path: str, config: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = config.get(name) or []
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise PlannerError(f"{path}: {name} is no list of {kind.__name__}: give the config.json of a decoder model")
    return values
