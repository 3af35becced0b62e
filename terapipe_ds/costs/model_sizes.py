"""Hold named model sizes as plain numbers, for models and planner alike.

Sources of the numbers: `nano`, `tiny` and `mini` are ours, for work on a CPU. `gpt3-*` are the models of Li et al.,
"TeraPipe" (ICML 2021, arXiv 2102.07988, table 1), with vocabulary and context of Brown et al. (2020, arXiv
2005.14165). `llama-*` are the models of Touvron et al. (2023, arXiv 2307.09288) and of Grattafiori et al. (2024,
arXiv 2407.21783); `qwen3-*` of the Qwen team (2025, arXiv 2505.09388), `mistral-7b` and `mixtral-8x7b` of Mistral AI's
config.json (v0.3 and v0.1), `deepseek-v3` of DeepSeek-AI (2024, arXiv 2412.19437), without its multi-token prediction,
`gemma-3-*` of the Gemma team (2025, arXiv 2503.19786), without images, `gpt-oss-*` of OpenAI (2025, arXiv 2508.10925).

With experts, time and memory take each decoder layer as the mean of all: a few layers may have one MLP instead. Time
counts the window of each layer's attention, and memory their mean.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from terapipe_ds.messages import look_up, show_value
from terapipe_ds.plan import split_evenly

_LOGIT_BYTES = {True: 2**24, False: 2**30}  # at once, on a CPU, where a chunk should stay in its caches, and elsewhere


def loss_chunk_tokens(vocabulary: int, *, on_cpu: bool) -> int:
    """Return the most tokens whose logits a loss without logits computes at once; `vocabulary` is of one rank."""
    return max(64, _LOGIT_BYTES[on_cpu] // (4 * vocabulary))


class ModelSizeError(ValueError):
    """Refuse an unknown name, or numbers that no model can have."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Hold the numbers of a layer whose tokens choose among MLPs; `ModelSize.ffn_size` is the width of one of these."""

    number: int  # experts of a layer
    per_token: int  # experts that a token chooses
    shared_ffn_size: int = 0  # total width of the experts that take every token
    dense_layers: int = 0  # layers with one MLP in place of experts
    dense_ffn_size: int = 0  # the width of that MLP

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.number or min(dataclasses.astuple(self)) < 0:
            raise ModelSizeError(f"{self}: give numbers >= 0, and per_token from 1 to number")


@dataclasses.dataclass(frozen=True)
class Latent:
    """Hold the numbers of multi-head latent attention: queries, keys and values come from narrow projections."""

    query_rank: int  # 0: queries come from the hidden states
    key_value_rank: int
    rope_dim: int  # the part of `head_dim` that has positions; the heads share this part of the keys
    value_dim: int  # width of a head's values; `head_dim` is the width of its queries and keys


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Hold the numbers of one decoder-only Transformer. Raise ModelSizeError for numbers that no model can have."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention
    head_dim: int
    ffn_size: int  # width between the matrices of the MLP
    vocab_size: int
    max_sequence_length: int  # tokens
    gated_mlp: bool = True  # three matrices (SwiGLU) instead of two
    bias: bool = False  # of every linear and of every norm (LayerNorm instead of RMSNorm)
    tied_embedding: bool = False  # output matrix = token embedding
    positions: str = "rope"  # "rope" | "learned"
    rope_base: float = 10000.0
    experts: Experts | None = None
    latent: Latent | None = None
    windows: tuple[int, ...] = ()  # tokens that a token of each layer sees, itself among them; 0: all. Empty: all 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ModelSizeError(f"model size {self.name!r}: {field.name} = {value!r}; give an integer >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelSizeError(
                f"model size {self.name!r}: num_heads = {self.num_heads} does not divide by num_kv_heads = "
                f"{self.num_kv_heads}; give a divisor of {self.num_heads}"
            )
        if self.positions not in ("rope", "learned"):
            raise ModelSizeError(f"model size {self.name!r}: positions = {self.positions!r}; give 'rope' or 'learned'")
        if len(self.windows) not in (0, self.num_layers):
            raise ModelSizeError(
                f"model size {self.name!r}: {len(self.windows)} windows, {self.num_layers} layers; give one per layer"
            )

    @property
    def mean_head_dim(self) -> int:
        """Return the mean width of a head's queries or keys, and of its values or outputs."""
        return self.head_dim if self.latent is None else (self.head_dim + self.latent.value_dim) // 2

    @property
    def window_of_layers(self) -> tuple[int, ...]:
        """Return the window of each layer, 0 where it sees all tokens."""
        return self.windows or (0,) * self.num_layers

    @property
    def matrices_of_mlp(self) -> int:
        return 3 if self.gated_mlp else 2

    def attention_weights(self) -> int:
        """Count the weights of a layer's projections for attention."""
        if self.latent is None:
            return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        one, heads = self.latent, self.num_heads
        queries = (self.hidden_size + heads * self.head_dim) * one.query_rank
        if not one.query_rank:
            queries = self.hidden_size * heads * self.head_dim
        down = self.hidden_size * (one.key_value_rank + one.rope_dim)
        up = one.key_value_rank * heads * (self.head_dim - one.rope_dim + one.value_dim)
        return queries + down + up + heads * one.value_dim * self.hidden_size

    def mlp_weights(self, *, active: bool = False) -> int:
        """Count the weights of all layers' MLPs and routers, with `active` only of the MLPs that one token passes."""
        per_width = self.matrices_of_mlp * self.hidden_size
        if (of := self.experts) is None:
            return self.num_layers * per_width * self.ffn_size
        routed = (of.per_token if active else of.number) * self.ffn_size + of.shared_ffn_size
        mixed = per_width * routed + self.hidden_size * of.number
        return (self.num_layers - of.dense_layers) * mixed + of.dense_layers * per_width * of.dense_ffn_size

    def active_ffn(self) -> float:
        """Return the width of the MLPs that one token passes in a layer, the mean of all layers."""
        if (of := self.experts) is None:
            return self.ffn_size
        routed = of.per_token * self.ffn_size + of.shared_ffn_size
        return routed + of.dense_layers / self.num_layers * (of.dense_ffn_size - routed)

    def layer_parameters(self) -> int:
        """Count the parameters of one Transformer layer: attention, MLP and its two norms; the mean of all layers."""
        matrices = self.attention_weights() + -(-self.mlp_weights() // self.num_layers)
        up = (2 if self.gated_mlp else 1) * self.ffn_size  # gate beside it where there is one
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + up + 2 * self.hidden_size
        return matrices + (biases if self.bias else 0) + 2 * self.norm_parameters()

    def embedding_parameters(self) -> int:
        """Count the parameters in front of the first layer: token embedding and, where learned, position embedding."""
        positions = self.max_sequence_length if self.positions == "learned" else 0
        return (self.vocab_size + positions) * self.hidden_size

    def head_parameters(self) -> int:
        """Count the parameters after the last layer: final norm and, unless tied, the output matrix."""
        return self.norm_parameters() + (0 if self.tied_embedding else self.vocab_size * self.hidden_size)

    def num_parameters(self) -> int:
        """Count all parameters, a tied matrix once."""
        rounded_up = -self.mlp_weights() % self.num_layers  # of the mean layer
        layers = self.num_layers * self.layer_parameters() - rounded_up
        return self.embedding_parameters() + layers + self.head_parameters()

    def active_parameters(self) -> int:
        """Count the parameters that one token passes: its experts, and all parameters outside of experts."""
        return self.num_parameters() - self.mlp_weights() + self.mlp_weights(active=True)

    def notes(self, tensor_ranks: int) -> dict[str, str]:
        """Return, by name, lines about experts, windows, and weights that models of Hugging Face keep whole."""
        found = {}
        if (of := self.experts) is not None:
            total, active = self.num_parameters() / 1e9, self.active_parameters() / 1e9
            found["experts"] = (
                f"{of.number} per layer, {of.per_token} per token; {total:.4g} B parameters, {active:.3g} B per token; "
                "all experts of a layer on its stage, expert parallelism is not searched"
            )
        if self.windows:
            counts = self.windows_of(range(self.num_layers))
            texts = (f"{count} of {self.num_layers} layers see {window:,} tokens at most" for window, count in counts)
            found["windows"] = ", ".join(texts)
        has = {"latent attention": self.latent, "experts": self.experts}
        kinds = " and ".join(name for name, value in has.items() if value)
        if tensor_ranks > 1 and kinds:
            found["tensor ranks"] = (
                f"{kinds} counted as divided, as megatron-core does; models of Hugging Face keep them whole"
            )
        return found

    def training_flops(self, length: int) -> float:
        """Count the FLOPs of a forward and its backward over one sequence, without recomputation."""
        matrices = self.num_layers * self.attention_weights() + self.mlp_weights(active=True)
        matrices += self.vocab_size * self.hidden_size
        seen = (min(window or length, length) for window in self.window_of_layers)
        pairs = sum(window * (window + 1) // 2 + (length - window) * window for window in seen)
        attention = 4 * self.num_heads * self.mean_head_dim * pairs
        return 3.0 * (2 * matrices * length + attention)

    def windows_of(self, layers: range) -> tuple[tuple[int, int], ...]:
        """Return the windows of these layers, each with the number of layers that have it."""
        return tuple(Counter(filter(None, self.window_of_layers[layers.start : layers.stop])).items())

    def norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.bias else 1)

    def layers_of_parts(self, num_parts: int, given: Sequence[int] | None, error: type[ValueError]) -> tuple[int, ...]:
        """Return the number of layers of each part: `given` if it adds up, else as even as possible, larger first."""
        if given is None and num_parts <= self.num_layers:
            return split_evenly(self.num_layers, num_parts)
        if given is None:
            raise error(
                f"num_stages = {num_parts}: {self.name} has {self.num_layers} layers; give at most that many stages"
            )
        layers = tuple(given)
        whole = all(type(count) is int and count >= 0 for count in layers)
        if len(layers) != num_parts or not whole or sum(layers) != self.num_layers:
            raise error(
                f"layers_per_part = {show_value(list(layers))}: give {num_parts} integers that add up to the "
                f"{self.num_layers} layers of {self.name}"
            )
        return layers

    def check_tensor_parallel(self, degree: int, error: type[ValueError]) -> None:
        """Raise `error` unless `degree` ranks can share a layer. Key/value heads may be repeated on several ranks."""
        for name in ("num_heads", "ffn_size", "num_kv_heads"):
            value = getattr(self, name)
            may_repeat = name == "num_kv_heads"
            if value % degree and not (may_repeat and degree % value == 0):
                raise error(
                    f"tensor_parallel = {degree}: {name} = {value} of {self.name} does not divide by it; give a "
                    f"divisor{' or a multiple' if may_repeat else ''} of {value}"
                )


def _gpt3(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelSize:
    fields = (num_layers, hidden_size, num_heads, num_heads, hidden_size // num_heads, 4 * hidden_size, 50257, 2048)
    return ModelSize(name, *fields, gated_mlp=False, bias=True, tied_embedding=True, positions="learned")


def _gemma3(name: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> ModelSize:
    fields = (hidden_size, num_heads, num_heads // 2, head_dim, 4 * hidden_size, 262208, 131072)
    windows = tuple(1024 if (layer + 1) % 6 else 0 for layer in range(num_layers))
    return ModelSize(name, num_layers, *fields, tied_embedding=True, rope_base=1e6, windows=windows)


def _gpt_oss(name: str, num_layers: int, experts: int) -> ModelSize:
    fields, windows = (2880, 64, 8, 64, 2880, 201088, 131072), (128, 0) * (num_layers // 2)
    return ModelSize(name, num_layers, *fields, rope_base=150000.0, experts=Experts(experts, 4), windows=windows)


# num_layers, hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, vocab_size, max_sequence_length
_SIZES = (
    ModelSize("nano", 2, 64, 2, 2, 32, 192, 256, 4096),
    ModelSize("tiny", 4, 128, 4, 2, 32, 384, 256, 4096),
    ModelSize("mini", 8, 512, 8, 8, 64, 1408, 256, 4096),
    _gpt3("gpt3-1b", 24, 2048, num_heads=16),
    _gpt3("gpt3-13b", 40, 5120, num_heads=40),
    _gpt3("gpt3-44b", 96, 6144, num_heads=48),
    _gpt3("gpt3-175b", 96, 12288, num_heads=96),
    ModelSize("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    ModelSize("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, rope_base=500000.0),
    ModelSize("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, rope_base=500000.0),
    ModelSize("llama-3-405b", 126, 16384, 128, 8, 128, 53248, 128256, 8192, rope_base=500000.0),
    ModelSize("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, rope_base=1000000.0),
    ModelSize("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960, rope_base=1000000.0),
    ModelSize("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, 32768, rope_base=1000000.0),
    _gemma3("gemma-3-12b", 48, 3840, num_heads=16, head_dim=256),
    _gemma3("gemma-3-27b", 62, 5376, num_heads=32, head_dim=128),
    ModelSize("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, rope_base=1e6, experts=Experts(8, 2)),
    ModelSize("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, 40960, rope_base=1e6, experts=Experts(128, 8)),
    ModelSize("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151936, 40960, rope_base=1e6, experts=Experts(128, 8)),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    ModelSize(
        *("deepseek-v3", 61, 7168, 128, 128, 192, 2048, 129280, 163840),
        experts=Experts(256, 8, shared_ffn_size=2048, dense_layers=3, dense_ffn_size=18432),
        latent=Latent(query_rank=1536, key_value_rank=512, rope_dim=64, value_dim=128),
    ),
)

MODEL_SIZES: dict[str, ModelSize] = {size.name: size for size in _SIZES}


def model_size(name: str) -> ModelSize:
    """Return the size called `name`, or raise ModelSizeError with the nearest name and all names."""
    return look_up(name, MODEL_SIZES, "model size", MODEL_SIZES, ModelSizeError)
