"""Count the memory of a part from model sizes: the tensors that layers of `models/gpt.py` save for their backward.

Per token, i bytes an item, h hidden size, q = H D, kv = H_kv D, f the width of the MLP, V vocabulary:

  norm          its input i h and statistics (LayerNorm, and RMSNorm where it is one kernel, as on a GPU); where it is
                made of plain operations, as on a CPU, input and normalised input, both in fp32 at least. The first
                norm's input is the part's received input
  qkv, up       their input, the norm's output: i h each
  attention     queries, output and log-sum-exp: 2 i q + max(4, i) H. Keys and values are in the slice store, 2 i kv. A
                sequence in one slice keeps them itself; where positions are rotary it keeps the turned keys and the
                fused product (q + 2 kv), which includes the values
  out           its input is the attention's output, counted there
  SwiGLU        gate and up 2 f, silu(gate) f, the product f; GELU: its input f and its output f
  residual adds nothing
  experts       a token's input and output of each of its experts
  loss          the log-probabilities in fp32 at least, V, and the labels; a loss without logits the labels alone
  W             from B to W where backwards are split, or to the product that several slices share: input and output
                gradient of qkv, out, up, down, and of an untied output matrix (a tied one has its gradient in B),
                whatever the slice kept before
  links         the output, kept until the gradient arrives, i h; the received input only where no layer keeps it

On top of the kept tensors, while a slice runs (peaks in its backward, in which kept tensors go as gradients come):

  a layer       begins with its MLP: the gradients of gate and up (GELU: of the product), and of the residual stream.
                Attention comes when the tensors of MLP and its norm are gone; only its need beyond them counts
  head          begins with the gradients of log-probabilities and logits; the layers come when its tensors are gone
  links         gradients or activations of two computations ahead, and a message in flight; sent gradients, until
                the stage hears from the other end or waits for it (the budget of sends)

Gradients of parameters come with a batch's first backward and go with the optimizer's step, unless the optimizer keeps
its own (bf16, ZeRO). A stage has one table of rotary positions. Not counted, well under 1 %: token ids, scalars, and
the last slice's input and its gradient, which live until the next batch. With activation checkpointing a decoder layer
keeps its input alone, or with it attention's output and log-sum-exp (`keeps_attention`), and one layer at a time is
whole in its backward; the tensors of its MLP are gone when the gradients of the prefix come. Tensor parallelism divides
the same as in Megatron: q, kv, f, V and their weights; norms, residual stream and messages only with sequence
parallelism.

This count is 0 to 2 % above exact peaks of steps in fp32 on a CPU (`studies.memory`) on two stages. The largest error
is 8 % above, on a middle stage of few layers with one slice and one micro-batch: it counts messages that never come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from terapipe_ds.costs.model_sizes import ModelSize, loss_chunk_tokens
from terapipe_ds.messages import show_value
from terapipe_ds.plan import JOINED_ROWS
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.schedule.schedule import RECEIVE_AHEAD
from terapipe_ds.strategy import REDUCE_BUCKET

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "lamb": 2, "adagrad": 1, "lion": 1, "sgd": 0}
"""Numbers that an optimizer keeps per parameter (SGD: without momentum)."""

LARGEST = "working", "window_tokens", "joined_tokens", "loss_chunk_tokens"
"""Fields of `PartMemory`, by their first letters, that are the maximum over layers; all others add up."""

_INDEX_BYTES = 8  # token ids and labels are int64


@dataclass(frozen=True)
class PartMemory:
    """Hold one part in bytes, counted or measured; rates are bytes per token of a slice with all rows of a micro-batch.

    Raises:
        PlannerError: a number that is negative or not finite.
    """

    static_bytes: float  # parameters, optimizer states, and gradients that an optimizer keeps between batches
    slice_bytes_per_token: float  # a live slice keeps these for its backward
    store_bytes_per_token: float = 0  # keys and values of a live micro-batch
    store_grad_bytes_per_token: float = 0  # their gradients, while the micro-batch is in backward
    working_bytes: int = 0  # more, only while an F, B or W runs
    working_bytes_per_token: float = 0  # of the slice that runs; link buffers are in here
    working_bytes_per_prefix_token: float = 0
    gradient_bytes: float = 0  # of the parameters, from a batch's first backward to its optimizer step
    whole_bytes_per_token: float | None = None  # keys and values of a sequence in one slice; None: as with the store
    weight_bytes_per_token: float | None = None  # a slice keeps these between its B and W; None: as before its B
    carried_bytes_per_slice: float = 0  # states that a live slice has read; the first one of a micro-batch has none
    windowed_store_bytes_per_token: float = 0  # of `store_bytes_per_token`, the share of layers with a window
    windowed_grad_bytes_per_token: float = 0  # of `store_grad_bytes_per_token`, the share of layers with a window
    window_tokens: float = 0  # that a token of these layers sees before its own: their mean, by bytes
    working_sent_bytes_per_token: float = 0  # of gradients for the part before, until they are known to be there
    staying_bytes_per_token: float = 0  # of `slice_bytes_per_token`: inputs and outputs of a part, never offloaded
    joined_bytes_per_token: float = 0  # of a B that is not split, until the slices that join it have run
    joined_tokens: float = 0  # slices join up to this number, and share their product for weight gradients
    loss_bytes_per_token: float = 0  # logits of a loss that keeps none, while a chunk of tokens runs
    loss_chunk_tokens: float = 0  # the most that run at once
    working_gone_bytes_per_token: float = 0  # of `working_bytes_per_token`, before dK, dV of the prefix come
    working_whole_bytes: float = 0  # on top of `working_bytes`, if the slice is its whole sequence
    working_copied_bytes_per_token: float = 0  # of one weight's factors, which a W copies for all its slices
    working_whole_bytes_per_token: float = 0  # keys and values of a layer that runs again, if its sequence is one slice
    working_factor_bytes_per_token: float = 0  # of `working_bytes_per_token`, what is in `weight_bytes_per_token` too
    step_bytes: float = 0  # more, only while gradients are reduced and the optimizer steps; then no slice is live
    tied_bytes: float = 0  # of `static_bytes`, those of a matrix that is the first part's where one stage has both
    tied_step_bytes: float = 0  # the share of that matrix in `step_bytes`
    tied_gradient_bytes: float = 0  # the share of that matrix in `gradient_bytes`

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise PlannerError(f"memory of a part: {field.name} = {value!r}: give a finite number >= 0")

    @classmethod
    def of(cls, numbers: Mapping[str, Any] | None) -> PartMemory | None:
        """Return the memory of a part or a layer from a profile; None: it was not measured."""
        return None if numbers is None else cls(**numbers)


DEEPSPEED_OPTIMIZERS = {
    "DeepSpeedZeroOptimizer": "zero",
    "BF16_Optimizer": "bf16",
    "FP16_Optimizer": "fp16",
    "FP16_UnfusedOptimizer": "unfused fp16",
}
_REDUCED_AT_ONCE = 500_000_000  # numbers: pipe/engine.py, MEMORY_OPT_ALLREDUCE_SIZE


def bytes_of_step(
    trained: float, optimizer: str, dtype: str, sum_dtype: str, replicas: int, *, is_narrow: bool = False
) -> int:
    """Return the bytes beyond gradients and states while DeepSpeed 0.19.8 reduces gradients and steps.

    Args:
        trained: parameters of a rank that have gradients.
        optimizer: as `DEEPSPEED_OPTIMIZERS` has it.
            "zero": it joins its share of the gradients, and copies that to fp32.
            "bf16": it copies its share to fp32; sums in fp32 it casts for the reduction.
            "fp16": it copies all to fp32, and joins the copies; the unfused one does not join them.
            "": the reduction joins the gradients, also without replicas.
        replicas: the ranks that divide the states.
        is_narrow: the optimizer's own copy of the weights has 16 bits.
    """
    item, of_sum = ITEMSIZE[dtype], ITEMSIZE[sum_dtype]
    copied = 4 if of_sum < 4 and not is_narrow else 0
    if optimizer == "zero":
        return math.ceil(trained / replicas * (of_sum + copied))
    if optimizer == "bf16":
        return math.ceil(trained / replicas * copied if copied else min(trained, _REDUCED_AT_ONCE) * item)
    if optimizer:
        return math.ceil(trained * (8 if optimizer == "fp16" else 4))
    return math.ceil(min(trained, _REDUCED_AT_ONCE) * of_sum)


def optimizer_of(dtype: str, sum_dtype: str, zero_stage: int, on_cpu: bool = False) -> str:
    """Return the optimizer that DeepSpeed chooses: one of `DEEPSPEED_OPTIMIZERS`, or "" for the user's own."""
    if dtype == "bfloat16" and (zero_stage == 0 or sum_dtype == "float32"):
        return "bf16"
    if zero_stage == 1:
        return "zero"
    return {"float16": "unfused fp16" if on_cpu else "fp16"}.get(dtype, "")


@dataclass
class Setup:
    """Describe the training of a model, and count its memory. Raises PlannerError for values that no run can have."""

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
    # of the sums of gradients; None: float32 for bfloat16 with ZeRO-1, as in strategies, else dtype
    gradient_dtype: str | None = None
    fused_norm: bool | None = None  # RMSNorm in one kernel; None: on a GPU, and plain operations on a CPU
    on_cpu: bool = False  # a fused loss takes fewer tokens at once
    layers_per_part: Sequence[int] | None = None  # None: as even as possible, more on the first parts
    sequence_ranks: int = 1  # that divide the tokens of each slice; ZeRO divides states over them too
    keeps_attention: bool = False  # activation checkpointing keeps attention's output and log-sum-exp
    fused_loss: bool = True  # the last part keeps no logits (`terapipe_ds.losses`)
    offload_optimizer: bool = False  # DeepSpeed's: the states of ZeRO-1 are in the host's memory
    narrow_states: bool = False  # DeepSpeed's `bf16_optimizer_states`: states and the copy of the weights have 16 bits
    reduce_bucket: int | None = None  # numbers of the bucket in which ZeRO-1 reduces; None: as strategies set it

    def __post_init__(self) -> None:
        for name in ("num_stages", "micro_batch", "tensor_parallel", "data_parallel", "sequence_ranks"):
            check_count(name, getattr(self, name))
        for name, value, known in (
            ("dtype", self.dtype, ITEMSIZE),
            ("gradient_dtype", self.gradient_dtype or self.dtype, ITEMSIZE),
            ("optimizer", self.optimizer, OPTIMIZER_STATES),
            ("zero_stage", self.zero_stage, (0, 1)),
        ):
            if value not in known or isinstance(value, bool):
                raise PlannerError(f"{name} = {show_value(value)}: give one of {', '.join(map(str, known))}")
        self.size.check_tensor_parallel(self.tensor_parallel, PlannerError)
        size = self.size
        self.fused_norm = not self.on_cpu if self.fused_norm is None else self.fused_norm
        self._layers = size.layers_of_parts(self.num_stages, self.layers_per_part, PlannerError)
        self._item = ITEMSIZE[self.dtype]
        self._wide = max(4, self._item)  # bytes of a number in fp32 or wider
        self._query, self._key_value = size.num_heads * size.mean_head_dim, size.num_kv_heads * size.mean_head_dim
        self._out_of_mlp = math.ceil(size.active_ffn())
        self._into_mlp = (2 if size.gated_mlp else 1) * self._out_of_mlp  # gate and up, or up alone
        self._routed = 2 * size.experts.per_token * size.hidden_size if size.experts else 0  # to experts and from them
        self._residual = size.hidden_size // (self.tensor_parallel if self.sequence_parallel else 1)  # on one rank

    def count_parts(self) -> tuple[PartMemory, ...]:
        """Return one `PartMemory` per part: embedding on the first, final norm, head and loss on the last."""
        kinds = [(part_id == 0, part_id == self.num_stages - 1, n) for part_id, n in enumerate(self._layers)]
        part_of_kind = {kind: part_id for part_id, kind in enumerate(kinds)}
        parts = {kind: self._part(part_id, kind[2]) for kind, part_id in part_of_kind.items()}
        return tuple(parts[kind] for kind in kinds)

    def _part(self, part_id: int, layers: int) -> PartMemory:
        size, rows, item = self.size, self.micro_batch, self._item
        share: float = rows if self.sequence_ranks == 1 else rows / self.sequence_ranks  # of a slice's tokens
        is_first, is_last = part_id == 0, part_id == self.num_stages - 1
        message = self._residual * item
        # kept from F to B by each live slice
        again = self.activation_checkpointing
        inputs = message + (self._attention_kept if self.keeps_attention else 0)
        kept = layers * (inputs if again else self._layer_saved)
        # the first layer may keep a wider copy of the part's input in place of the input itself
        keeps_input = again or size.bias or self.fused_norm or item == self._wide
        kept += _INDEX_BYTES if is_first else 0 if keeps_input else message
        kept += self._head_saved if is_last else message
        # of a rank; the heads of keys and values may be on several
        heads = max(1, size.num_kv_heads // self.tensor_parallel)
        keys_values = 2 * heads // math.gcd(heads, self.sequence_ranks) * size.mean_head_dim  # of all tokens of a slice
        query = size.num_heads // self.tensor_parallel // self.sequence_ranks * size.mean_head_dim
        whole = keys_values if size.positions == "learned" else 3 * keys_values // 2 + query
        vocabulary = -(-size.vocab_size // self.tensor_parallel)
        # kept whatever runs: parameters, states, and gradients that the optimizer keeps
        parameters = self._parameters(part_id, layers)
        # DeepSpeed drops the gradients with each step (`DeepSpeedEngine.zero_grad`), unless the optimizer keeps its own
        drops_gradients = self.zero_stage == 0 and self.dtype != "bfloat16"
        gradients = parameters * ITEMSIZE[self._sum_dtype] if drops_gradients else 0
        waiting = share * self._kept_for_weights(is_last, layers)
        joins = item < 4 and not (again or self.offload_optimizer)  # `WeightGradients.joins_unsplit`
        matrix = vocabulary * size.hidden_size if size.tied_embedding else 0
        has_copy = is_last and self.num_stages > 1
        tied_gradient = gradients * matrix // parameters if has_copy else 0
        tied = self._static_bytes(matrix) - tied_gradient if has_copy else 0
        # a table of the turns of all positions, complex numbers, has a power of two of them
        turns = (1 << max(10, (size.max_sequence_length - 1).bit_length())) * size.head_dim * self._wide
        gone = max(0, self._phases[0] - self._phases[1])  # of a layer that runs again, once attention's backward runs
        # logits of a chunk: as computed, and in fp32 at least, where that differs
        logits = size.vocab_size * (self._wide + (item if item < self._wide else 0)) // self.tensor_parallel
        fresh, fresh_of_whole = (self._fresh_gradient_bytes(is_first, is_last, layers, w) for w in (False, True))
        store, store_grad = (rows * layers * keys_values * of for of in (item, self._wide))
        windowed = len(windows := [*filter(None, size.windows)]) / size.num_layers  # the share of the mean layer
        return PartMemory(
            static_bytes=self._static_bytes(parameters) - gradients,
            slice_bytes_per_token=share * kept,
            store_bytes_per_token=store,
            store_grad_bytes_per_token=store_grad,
            windowed_store_bytes_per_token=windowed * store,
            windowed_grad_bytes_per_token=windowed * store_grad,
            window_tokens=fmean(windows) - 1 if windows else 0,
            working_bytes=fresh + (turns if layers and size.positions == "rope" else 0),
            working_whole_bytes=fresh_of_whole - fresh,
            working_bytes_per_token=share * self._working(is_first, is_last, layers),
            working_bytes_per_prefix_token=rows * keys_values * item if layers else 0,  # dK, dV of one layer's prefix
            working_gone_bytes_per_token=share * gone if again and layers else 0,
            working_sent_bytes_per_token=0 if is_first else share * message,
            gradient_bytes=gradients,
            weight_bytes_per_token=waiting,
            joined_bytes_per_token=waiting if joins else 0,
            joined_tokens=JOINED_ROWS / share,
            working_copied_bytes_per_token=share * self._largest_factors(is_last, layers),
            working_factor_bytes_per_token=share * self._factors_of_layer if again and layers else 0,
            staying_bytes_per_token=share * message * ((not is_first) + (not is_last)),
            step_bytes=self._step_bytes(parameters),
            loss_bytes_per_token=share * logits if is_last and self.fused_loss else 0,
            loss_chunk_tokens=loss_chunk_tokens(vocabulary, on_cpu=self.on_cpu) / share,
            whole_bytes_per_token=0 if again else rows * layers * whole * item,
            working_whole_bytes_per_token=rows * min(layers, 1) * whole * item if again else 0,
            tied_bytes=tied,
            tied_gradient_bytes=tied_gradient,
            tied_step_bytes=self._step_bytes(parameters) - self._step_bytes(parameters - matrix * has_copy),
        )

    # --- parameters

    def _parameters(self, part_id: int, layers: int) -> int:
        """Count a rank's parameters. A tied output matrix has a copy on the last stage; norms are on every rank."""
        size, degree = self.size, self.tensor_parallel
        norm = size.norm_parameters()
        total = layers * ((size.layer_parameters() - 2 * norm) // degree + 2 * norm)
        vocabulary = -(-size.vocab_size // degree) * size.hidden_size
        if part_id == 0:
            total += vocabulary + size.embedding_parameters() - size.vocab_size * size.hidden_size
        if part_id == self.num_stages - 1:
            has_matrix = not size.tied_embedding or self.num_stages > 1
            total += norm + (vocabulary if has_matrix else 0)
        return total

    def _static_bytes(self, parameters: int) -> int:
        """Return bytes of parameters, gradients and optimizer states as DeepSpeed 0.19.8 holds them.

        fp16 and ZeRO-1 have an fp32 master copy beside the states; ZeRO-1 divides both by the data-parallel ranks. bf16
        has a buffer that accumulates the gradients (`data_types.grad_accum_dtype`), and its optimizer
        (bf16_optimizer.py) always divides. Linear layers and embeddings add to this buffer and leave `.grad` empty
        (`runtime/layers/gradient_sums.py`). An offloaded optimizer adds each gradient to its sum at once, and drops it.
        Autograd makes the gradients of experts, which otherwise wait in `.grad` for the end of a backward.
        """
        is_bf16 = self.dtype == "bfloat16"
        gradients = ITEMSIZE[self._sum_dtype]
        gradients += self._item if self._has_sums and self.size.experts else 0
        # small floats and ZeRO-1 step an fp32 copy
        has_master = self._item < 4 or self.zero_stage == 1
        divided = self.data_parallel * self.sequence_ranks if self.zero_stage == 1 or is_bf16 else 1
        wide = self._item if self._is_narrow else self._wide
        states = parameters * wide * (OPTIMIZER_STATES[self.optimizer] + has_master)
        on_device = 0 if self.offload_optimizer else -(-states // divided)
        return parameters * (self._item + gradients) + on_device

    def _step_bytes(self, parameters: int) -> int:
        """Count `bytes_of_step`; an offloaded optimizer steps on the host."""
        replicas = self.data_parallel * self.sequence_ranks
        kinds = self._deepspeed_optimizer, self.dtype, self._sum_dtype
        step = bytes_of_step(parameters, *kinds, replicas, is_narrow=self._is_narrow)
        return 0 if self.offload_optimizer else step

    @property
    def _deepspeed_optimizer(self) -> str:
        return optimizer_of(self.dtype, self._sum_dtype, self.zero_stage, self.on_cpu)

    @property
    def _is_narrow(self) -> bool:
        return self.narrow_states and self._deepspeed_optimizer == "zero"  # others ignore it

    @property
    def _has_sums(self) -> bool:
        """Return whether gradients have sums beside `.grad`, which stay for a whole batch."""
        is_apart = self._deepspeed_optimizer == "bf16" or ITEMSIZE[self._sum_dtype] > self._item
        return is_apart and not self.offload_optimizer

    @property
    def _sum_dtype(self) -> str:
        """Return the dtype in which gradients accumulate."""
        return self.gradient_dtype or ("float32" if self.dtype == "bfloat16" and self.zero_stage else self.dtype)

    def _fresh_gradient_bytes(self, is_first: bool, is_last: bool, layers: int, is_whole: bool) -> int:
        """Count the bytes of the largest gradient that is beside the accumulated one for a moment.

        Autograd makes the gradients of the embedding, of experts and of a tied output matrix. Products of linear layers
        add to the sums in place (`runtime/layers/weight_gradients.py`). Autograd makes them where the optimizer has no
        sums and a sequence is one slice (`is_whole`), or where the optimizer is offloaded and takes each gradient. Such
        an optimizer copies a gradient to the dtype of the sum. It also keeps a buffer for the largest gradient, and a
        bucket for the reduction (stage_1_and_2.py). A CPU rounds a product to the dtype of its factors, and copies it.
        """
        size, item = self.size, self._item
        total = ITEMSIZE[self._sum_dtype]
        makes_products = self.offload_optimizer or (is_whole and not self._has_sums)
        into = (2 if size.gated_mlp else 1) * size.ffn_size
        widths = [size.vocab_size] if is_first or (is_last and size.tied_embedding and not self.fused_loss) else []
        widths += [into * size.experts.number] if size.experts and layers else []  # one weight, with all experts
        widens = (self.on_cpu or self.offload_optimizer) and total > item
        if widens or makes_products:
            widths += [into, (size.num_heads + 2 * size.num_kv_heads) * size.head_dim] if layers else []
            widths += [size.vocab_size] if is_last else []
        largest = max(widths, default=0)
        widest = largest * (item + (total if widens else 0))
        # a loss without logits adds up its chunks in fp32 at least, beside the product of one (`losses/deferred.py`)
        if is_last and self.fused_loss and makes_products:
            of_chunk = item + (self._wide if self.on_cpu else 0) if item < self._wide else 0
            widest = max(widest, size.vocab_size * (self._wide + of_chunk))
        widest += largest * item if self.offload_optimizer else 0
        bucket = self.reduce_bucket
        if bucket is None:
            bucket = REDUCE_BUCKET if self.offload_optimizer else 0
        has_bucket = self.offload_optimizer or self._deepspeed_optimizer == "zero"
        return widest * size.hidden_size // self.tensor_parallel + bucket * total * has_bucket

    # --- bytes per token of one row

    def _working(self, is_first: bool, is_last: bool, layers: int) -> int:
        """Return the bytes that the running slice needs on top of the kept ones, messages of the links included."""
        layer = max(self._phases) if layers else 0
        if self.activation_checkpointing and layers:  # the layer that runs again is whole
            layer += self._layer_saved - (self._attention_kept if self.keeps_attention else 0)
        # gradients of log-probabilities and logits (a forward's logits are smaller), then the norm's
        of_logits = self.size.vocab_size * (0 if self.fused_loss else self._wide + self._item) // self.tensor_parallel
        head = max(of_logits, 2 * self._residual * self._item)
        working = max(layer - self._head_saved, head) if is_last else layer
        # A received activation becomes the slice's input. Where the last part has most, one of the next two is a B.
        inwards = 2 if is_last else 1 + RECEIVE_AHEAD
        links = (0 if is_first else inwards) + (0 if is_last else RECEIVE_AHEAD)
        return working + links * self._residual * self._item

    def _kept_for_weights(self, is_last: bool, layers: int) -> int:
        """Return the bytes that W needs after B: input and output gradient of every linear layer."""
        size, degree = self.size, self.tensor_parallel
        divided = 2 * self._query + 2 * self._key_value + self._into_mlp + self._out_of_mlp
        layer = 4 * self._residual + self._routed + divided // degree
        head = self._residual + size.vocab_size // degree if self._has_product_of_head(is_last) else 0
        return (layers * layer + head) * self._item

    @property
    def _factors_of_layer(self) -> int:
        """Return the bytes that W needs of the last layer that runs again in a B, which has them then anyway.

        Attention's backward runs beside the factors that the layer's MLP leaves to W.
        """
        mlp, attention = self._phases
        of_mlp = 2 * self._residual + self._routed + (self._into_mlp + self._out_of_mlp) // self.tensor_parallel
        more = max(mlp, attention + of_mlp * self._item) - max(mlp, attention)
        return max(0, self._kept_for_weights(False, 1) - more)

    def _largest_factors(self, is_last: bool, layers: int) -> int:
        """Return the most bytes that one of these linear layers leaves to W."""
        widths = [self._into_mlp, self._query + 2 * self._key_value] if layers else []
        widths += [self.size.vocab_size] if self._has_product_of_head(is_last) else []
        return (self._residual + max(widths) // self.tensor_parallel) * self._item if widths else 0

    def _has_product_of_head(self, is_last: bool) -> bool:
        """Return whether W has a product for the output matrix; a fused loss does all in B."""
        return is_last and not self.size.tied_embedding and not self.fused_loss

    @cached_property
    def _norm_saved(self) -> int:
        """Return the bytes that a norm keeps, with its output."""
        if self.size.bias or self.fused_norm:
            return 2 * self._residual * self._item + 2 * self._wide
        return self._residual * (2 * self._wide + self._item) + self._wide

    @cached_property
    def _layer_saved(self) -> int:
        outputs = 2 if self.sequence_ranks > 1 else 1  # of all tokens, and of a rank's own ones for the projection
        attention = (1 + outputs) * self._query * self._item + self.size.num_heads * self._wide
        divided = (attention + 2 * self._into_mlp * self._item) // self.tensor_parallel
        return 2 * self._norm_saved + self._routed * self._item + divided

    @cached_property
    def _head_saved(self) -> int:
        if self.fused_loss:  # no logits, but the weights of the tokens
            return self._norm_saved + _INDEX_BYTES + self._wide
        return self._norm_saved + self.size.vocab_size * self._wide // self.tensor_parallel + _INDEX_BYTES

    @property
    def _attention_kept(self) -> int:
        """Return the bytes of attention's output and log-sum-exp."""
        return (self._query * self._item + self.size.num_heads * self._wide) // self.tensor_parallel

    @cached_property
    def _phases(self) -> tuple[int, int]:
        """Count gradients beside the tensors still kept: in the MLP, and in attention once the MLP's share is gone."""
        item, degree = self._item, self.tensor_parallel
        mlp = self._into_mlp * item // degree
        # of out, q, expanded k and v; then the fused product
        attention = (6 * self._query + 2 * self._key_value) * item
        gone = 2 * self._into_mlp * item // degree + self._norm_saved
        return mlp + self._residual * item, attention // degree + 2 * self._residual * item - gone
