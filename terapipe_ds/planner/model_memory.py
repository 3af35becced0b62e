"""The memory of a part counted from model sizes: what the layers of `models/gpt.py` save for their backward.

Per token, i bytes an item, h hidden size, q = H D, kv = H_kv D, f the width of the MLP, V vocabulary:

  norm          its input i h and statistics (LayerNorm, and RMSNorm where it is one kernel, as on a GPU); where it is
                made of plain operations, as on a CPU, input and normalised input, both in fp32 at least
  qkv, up       their input, the norm's output: i h each
  attention     queries, output and log-sum-exp: 2 i q + max(4, i) H. Keys and values are in the slice store, 2 i kv. A
                sequence in one slice keeps them itself, and where positions are rotary the fused product (q + 2 kv),
                of which values are a part, beside the turned keys
  out           its input is the attention's output, counted there
  SwiGLU        gate and up 2 f, silu(gate) f, the product f; GELU: its input f and its output f
  residual adds nothing
  loss          the log-probabilities in fp32 at least, V, and the labels
  W             where backwards are split, from B to W: input and output gradient of qkv, out, up, down, and of an
                untied output matrix (a tied one has its gradient in B), whatever was kept before
  links         the received input and, kept until the gradient arrives, the output: i h each

Beside what is kept, while a slice runs (peaks in its backward, in which kept things go as gradients come):

  a layer       begins with its MLP: the gradients of gate and up (GELU: of the product), and of the residual stream.
                Attention comes when what MLP and its norm kept is gone; only what it needs beyond that counts
  head          begins with the gradients of log-probabilities and logits; the layers come when what it kept is gone
  links         gradients or activations of two computations ahead, and a message on its way

Gradients of parameters come with a batch's first backward and go with the optimizer's step, unless the optimizer keeps
its own (bf16, ZeRO). Not counted, well under 1 %: tables of rotary positions, token ids, scalars, and the input and its
gradient of the last slice, which live until the next batch.

Against exact peaks of steps in fp32 on a CPU (`studies.memory`) that is 0 to 2 % above on two stages. It is most off,
8 % above, on a middle stage of few layers with one slice and one micro-batch: it counts messages that never come.
Where slices are so small that fixed things count, it can be 1 % below.

With activation checkpointing a decoder layer keeps its input alone and one layer at a time is whole in its backward;
embedding, final norm, head and loss stay as they are (`checkpointable_layers: ["DecoderLayer"]`).

Tensor parallelism divides what Megatron divides: q, kv, f, V and their weights; norms, residual stream and messages
only with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.messages import show_value
from terapipe_ds.plan import split_evenly
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.planner.part_memory import PartMemory
from terapipe_ds.schedule.lower import RECEIVE_AHEAD

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "lamb": 2, "adagrad": 1, "lion": 1, "sgd": 0}
"""Numbers that an optimizer keeps per parameter (SGD: without momentum)."""

_INDEX_BYTES = 8  # token ids and labels are int64


@dataclass(frozen=True)
class Setup:
    """How a model is trained; see `count_parts`."""

    size: ModelSize
    num_stages: int
    dtype: str
    micro_batch: int  # sequences
    tensor_parallel: int = 1
    data_parallel: int = 1
    zero_stage: int = 0
    optimizer: str = "adam"
    activation_checkpointing: bool = False
    sequence_parallel: bool = False
    gradient_dtype: str | None = None  # of the buffer that accumulates them; None: float32 for bfloat16, else dtype
    fused_norm: bool = True  # RMSNorm in one kernel
    layers_per_part: Sequence[int] | None = None  # None: as even as possible, more on the first parts

    def __post_init__(self) -> None:
        for name in ("num_stages", "micro_batch", "tensor_parallel", "data_parallel"):
            check_count(name, getattr(self, name))
        self._check_names()
        size, degree = self.size, self.tensor_parallel
        for name in ("num_heads", "num_kv_heads", "ffn_size"):
            repeated = name == "num_kv_heads" and degree % size.num_kv_heads == 0  # each on several ranks
            if getattr(size, name) % degree and not repeated:
                raise PlannerError(
                    f"tensor_parallel = {degree} does not divide {name} = {getattr(size, name)} of {size.name}: "
                    "give a divisor of it"
                )
        self._check_layers()

    def _check_names(self) -> None:
        gradient = self.dtype if self.gradient_dtype is None else self.gradient_dtype
        for name, value, known in (
            ("dtype", self.dtype, ITEMSIZE), ("gradient_dtype", gradient, ITEMSIZE),
            ("optimizer", self.optimizer, OPTIMIZER_STATES), ("zero_stage", self.zero_stage, (0, 1)),
        ):  # fmt: skip
            if value not in known or isinstance(value, bool):
                raise PlannerError(f"{name} = {show_value(value)}: give one of {', '.join(map(str, known))}")

    def _check_layers(self) -> None:
        if self.num_stages > self.size.num_layers and self.layers_per_part is None:
            raise PlannerError(
                f"num_stages = {self.num_stages} for the {self.size.num_layers} layers of {self.size.name}: "
                f"give at most {self.size.num_layers} stages"
            )
        layers = self.layers
        whole = all(type(count) is int and count >= 0 for count in layers)
        if len(layers) != self.num_stages or not whole or sum(layers) != self.size.num_layers:
            raise PlannerError(
                f"layers_per_part = {show_value(list(layers))}: give {self.num_stages} numbers that add up to the "
                f"{self.size.num_layers} layers of {self.size.name}"
            )

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.size.num_heads // self.tensor_parallel

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a rank."""
        return max(1, self.size.num_kv_heads // self.tensor_parallel)

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each part."""
        if self.layers_per_part is not None:
            return tuple(self.layers_per_part)
        return split_evenly(self.size.num_layers, self.num_stages)


def count_parts(setup: Setup) -> tuple[PartMemory, ...]:
    """Return one `PartMemory` per part: embedding on the first, final norm, head and loss on the last.

    Raises:
        PlannerError: from `Setup`, for values that no run can have.
    """
    return tuple(_count_part(setup, part_id, layers) for part_id, layers in enumerate(setup.layers))


def _count_part(setup: Setup, part_id: int, layers: int) -> PartMemory:
    size, rows, item = setup.size, setup.micro_batch, ITEMSIZE[setup.dtype]
    is_first, is_last = part_id == 0, part_id == setup.num_stages - 1
    message = _residual(setup) * item
    per_layer = _layer_saved(setup)
    kept = layers * (message if setup.activation_checkpointing else per_layer)
    kept += _INDEX_BYTES if is_first else message
    kept += _head_saved(setup) if is_last else message
    keys_values = 2 * setup.kv_heads * size.head_dim
    whole = keys_values if size.positions == "learned" else 3 * keys_values // 2 + setup.heads * size.head_dim
    parameters = _parameters(setup, part_id, layers)
    gradients = parameters * ITEMSIZE[setup.gradient_dtype or setup.dtype] if _drops_gradients(setup) else 0
    return PartMemory(
        static_bytes=_static_bytes(setup, parameters) - gradients,
        slice_bytes_per_token=rows * kept,
        store_bytes_per_token=rows * layers * keys_values * item,
        store_grad_bytes_per_token=rows * layers * keys_values * max(4, item),
        working_bytes=_largest_weight(setup, is_first or is_last, layers) * item,
        working_bytes_per_token=rows * _working(setup, is_first, is_last, layers),
        working_bytes_per_prefix_token=rows * keys_values * item if layers else 0,  # one layer's dK, dV of the prefix
        gradient_bytes=gradients,
        weight_bytes_per_token=rows * _weights_kept(setup, is_last, layers),
        whole_bytes_per_token=rows * (min(layers, 1) if setup.activation_checkpointing else layers) * whole * item,
    )


def _working(setup: Setup, is_first: bool, is_last: bool, layers: int) -> int:
    """Return working bytes per token of the slice that runs, with the messages of the links."""
    message = _residual(setup) * ITEMSIZE[setup.dtype]
    layer = _layer_working(setup) if layers else 0
    if setup.activation_checkpointing and layers:
        layer += _layer_saved(setup)
    working = max(layer - _head_saved(setup), _head_working(setup)) if is_last else layer
    # a received activation becomes the slice's input
    inwards = 2 if is_last else 1 + RECEIVE_AHEAD  # where the last part has most, one of the next two is a B
    links = (0 if is_first else inwards) + (0 if is_last else RECEIVE_AHEAD)
    return working + links * message


def _parameters(setup: Setup, part_id: int, layers: int) -> int:
    """Return the number of a rank's parameters. A tied output matrix has a copy on the last stage; norms are on every
    tensor-parallel rank."""
    size, degree = setup.size, setup.tensor_parallel
    norm = size.hidden_size * (2 if size.bias else 1)
    layer = (size.layer_parameters() - 2 * norm) // degree + 2 * norm
    vocabulary = -(-size.vocab_size // degree) * size.hidden_size
    total = layers * layer
    if part_id == 0:
        positions = size.max_sequence_length if size.positions == "learned" else 0
        total += vocabulary + positions * size.hidden_size
    if part_id == setup.num_stages - 1:
        has_matrix = not size.tied_embedding or setup.num_stages > 1
        total += norm + (vocabulary if has_matrix else 0)
    return total


def _static_bytes(setup: Setup, parameters: int) -> int:
    """Return bytes of parameters, gradients and optimizer states as DeepSpeed 0.19.8 holds them.

    fp32, fp64: parameter, gradient and the optimizer's states in the dtype; ZeRO-1 adds an fp32 master copy and divides
    it and the states by the data-parallel ranks. fp16: parameter and gradient 2 + 2, master copy and states in fp32.
    bf16: the same and a buffer that accumulates the gradients (`data_types.grad_accum_dtype`); its optimizer
    (bf16_optimizer.py) divides master copy and states by the data-parallel ranks with and without ZeRO-1. What lives in
    the optimizer step alone is not counted: no slice is live then.
    """
    item, states = ITEMSIZE[setup.dtype], OPTIMIZER_STATES[setup.optimizer]
    gradients = ITEMSIZE[setup.gradient_dtype or setup.dtype]
    if setup.dtype == "bfloat16":
        gradients = item + ITEMSIZE[setup.gradient_dtype or "float32"]
    width = max(item, 4)
    has_master = item < 4 or setup.zero_stage == 1
    divided = setup.data_parallel if setup.zero_stage == 1 or setup.dtype == "bfloat16" else 1
    return parameters * (item + gradients) + -(-parameters * width * (states + has_master) // divided)


def _drops_gradients(setup: Setup) -> bool:
    """Return whether DeepSpeed drops the gradients with each step (`DeepSpeedEngine.zero_grad`)."""
    return setup.zero_stage == 0 and setup.dtype != "bfloat16"


def _largest_weight(setup: Setup, has_vocabulary: bool, layers: int) -> int:
    """Return how many numbers the largest weight has: its new gradient is beside the accumulated one for a moment."""
    size, degree = setup.size, setup.tensor_parallel
    widths = [(2 if size.gated_mlp else 1) * size.ffn_size, (size.num_heads + 2 * size.num_kv_heads) * size.head_dim]
    widths = widths if layers else []
    return max([*widths, size.vocab_size if has_vocabulary else 0]) * size.hidden_size // degree


def _residual(setup: Setup) -> int:
    """Return how many numbers of the residual stream a rank holds per token."""
    return setup.size.hidden_size // (setup.tensor_parallel if setup.sequence_parallel else 1)


def _norm_saved(setup: Setup) -> int:
    """Return what a norm keeps, without its output."""
    item, width = ITEMSIZE[setup.dtype], max(4, ITEMSIZE[setup.dtype])
    if setup.size.bias or setup.fused_norm:
        return _residual(setup) * item + 2 * width
    return 2 * _residual(setup) * width + width


def _layer_saved(setup: Setup) -> int:
    size, item, degree = setup.size, ITEMSIZE[setup.dtype], setup.tensor_parallel
    norms = 2 * (_norm_saved(setup) + _residual(setup) * item)
    attention = 2 * size.num_heads * size.head_dim * item + size.num_heads * max(4, item)
    mlp = (4 if size.gated_mlp else 2) * size.ffn_size * item
    return norms + (attention + mlp) // degree


def _weights_kept(setup: Setup, is_last: bool, layers: int) -> int:
    """Return what W needs per token: input and output gradient of every linear layer, after B."""
    size, item, degree = setup.size, ITEMSIZE[setup.dtype], setup.tensor_parallel
    query, key_value = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    divided = (query + 2 * key_value) + query + (3 if size.gated_mlp else 2) * size.ffn_size
    layer = 4 * _residual(setup) + divided // degree
    head = _residual(setup) + size.vocab_size // degree if is_last and not size.tied_embedding else 0
    return (layers * layer + head) * item


def _head_saved(setup: Setup) -> int:
    item = ITEMSIZE[setup.dtype]
    log_probabilities = setup.size.vocab_size * max(4, item) // setup.tensor_parallel
    return _norm_saved(setup) + _residual(setup) * item + log_probabilities + _INDEX_BYTES


def _layer_working(setup: Setup) -> int:
    """Return the gradients beside what is still kept: in the MLP, or in attention, when what the MLP kept is gone."""
    size, item, degree = setup.size, ITEMSIZE[setup.dtype], setup.tensor_parallel
    mlp = (2 if size.gated_mlp else 1) * size.ffn_size * item // degree
    query, key_value = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    attention = (4 * query + 2 * (query + key_value)) * item  # of out, q, expanded k and v; then the fused product's
    gone = (4 if size.gated_mlp else 2) * size.ffn_size * item // degree + _norm_saved(setup) + _residual(setup) * item
    return max(mlp + _residual(setup) * item, attention // degree + 2 * _residual(setup) * item - gone)


def _head_working(setup: Setup) -> int:
    """Return the gradients of log-probabilities and logits; a forward's logits are smaller."""
    item = ITEMSIZE[setup.dtype]
    vocabulary = setup.size.vocab_size * (max(4, item) + item) // setup.tensor_parallel
    return max(vocabulary, 2 * _residual(setup) * item)  # the norm's come when those are gone
