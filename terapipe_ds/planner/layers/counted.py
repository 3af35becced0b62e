"""Count the costs of a named model's layers for a device: embedding, decoder layers, and norm with head."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from terapipe_ds.costs.analytic import OPTIMIZER_BYTES_PER_PARAMETER, AnalyticCosts
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.parts import Again, Floats, Layers, Setting, Span, TiedCopy, bytes_summed
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import ITEMSIZE, Setup

HOST_ADAM_PARAMETERS_PER_S = 10e9 / 2.57
"""Parameters that the host of a node steps per second with DeepSpeed's Adam for CPUs: 10 billion in 2.57 s (Ren et al.,
"ZeRO-Offload", 2021, arXiv 2101.06840, table 4)."""

_HOST_BYTES = 16  # per parameter: its fp32 copy, two states and the gradient; a copy in its own dtype comes on top
_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class CountedLayers(Layers):
    """Count the costs of the layers of a model size for a cluster's devices."""

    is_sliceable = whole_is_least = recomputes_before_weights = True
    levers = frozenset({"offload_activations", "offload_optimizer"})
    kinds = tuple(Again)
    fused_loss = True  # the last part keeps no logits

    def __init__(self, size: ModelSize, cluster: Cluster, dtype: str = "auto") -> None:
        self.size, self._cluster = size, cluster
        self._arithmetic = cluster.card.resolve_dtype(dtype)
        self.dtype = _DTYPES[self._arithmetic]
        self.num_layers = size.num_layers + 2

    def refuse_tensor(self, degree: int) -> str | None:
        try:
            self.size.check_tensor_parallel(degree, PlannerError)
        except PlannerError as error:
            return str(error)
        if self.size.hidden_size % degree:
            return f"tensor_parallel = {degree}: hidden_size = {self.size.hidden_size} does not divide by it"
        return None

    def refuse_sequence(self, ranks: int) -> str | None:
        if self.size.num_heads % ranks:
            return f"num_heads = {self.size.num_heads} of {self.size.name} does not divide by {ranks} sequence ranks"
        return None

    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[AnalyticCosts]:
        """Return the costs of embedding, decoder layer and head; the costs of a part are their sums."""

        def kind(layers: int, *, embedding: bool = False, head: bool = False, window: int = 0) -> AnalyticCosts:
            links = self._cluster.between, self._cluster.within
            counts = self._arithmetic, setting.micro_batch, layers, embedding, head, setting.tensor
            return AnalyticCosts(
                self.size,
                self._cluster.card,
                *counts,
                bool(recompute),
                *links,
                sequence_parallel=setting.sequence,
                keeps_attention=recompute == Again.KEEPS_ATTENTION,
                fused_loss=self.fused_loss,
                windows=((window, 1),) if window else (),
            )

        windows = self.size.window_of_layers
        decoders = {window: kind(1, window=window) for window in set(windows)}
        return [kind(0, embedding=True), *map(decoders.__getitem__, windows), kind(0, head=True)]

    def output_bytes(self, setting: Setting) -> Floats:
        per_token = setting.micro_batch * self.size.hidden_size * ITEMSIZE[self.dtype] / setting.sequence
        return np.full(self.num_layers, float(per_token))

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        # the memory model counts ends with their part, so it takes only the number of decoder layers
        counts = tuple(sum(1 for layer in range(s.start, s.stop) if self._is_decoder(layer)) for s in spans)
        parts = {again: self._parts(setting, counts, again) for again in {span.recompute for span in spans}}
        return tuple(parts[span.recompute][part_id] for part_id, span in enumerate(spans))

    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        """Count per parameter; a tied matrix counts with the embedding."""
        summed, moved = self._bytes_at_the_end(setting)
        return summed * self._parameters(setting), moved * self._parameters(setting)

    def host_bytes(self, setting: Setting) -> Floats:
        share = _HOST_BYTES + ITEMSIZE[self.dtype] if setting.offload_optimizer else 0
        return share * self._parameters(setting) / setting.data / setting.sequence

    def _parameters(self, setting: Setting) -> Floats:
        size = self.size
        counts = [size.embedding_parameters(), *[size.layer_parameters()] * size.num_layers, size.head_parameters()]
        return np.array(counts, float) / setting.tensor

    def tied_copy(self, setting: Setting) -> TiedCopy | None:
        size, itemsize = self.size, 4 if self.dtype == "bfloat16" else ITEMSIZE[self.dtype]
        if not size.tied_embedding:
            return None
        parameters = size.vocab_size * size.hidden_size / setting.tensor
        return TiedCopy(itemsize * parameters, *(number * parameters for number in self._bytes_at_the_end(setting)))

    def _bytes_at_the_end(self, setting: Setting) -> tuple[float, float]:
        """Return the bytes that a parameter sums (`bytes_summed`) and moves; ZeRO-1 and bfloat16 divide the states."""
        # DeepSpeed's optimizer for bfloat16 divides its states whatever the ZeRO stage
        is_divided = self.dtype == "bfloat16" or setting.zero_stage
        divided = setting.data * setting.sequence if is_divided else 1
        moved = OPTIMIZER_BYTES_PER_PARAMETER / divided
        if setting.offload_optimizer:  # seconds on the host, as bytes that the device could have moved in that time
            rate = self._cluster.host_link.bandwidth_bytes_per_s
            copied_s = (4 + ITEMSIZE[self.dtype]) / rate  # gradients down, parameters up
            host_s = copied_s + self._cluster.devices_per_node / HOST_ADAM_PARAMETERS_PER_S
            host_bytes = host_s * self._cluster.card.reachable_bytes_per_s
            # a CPU is its own host: nothing is faster there
            moved = max(OPTIMIZER_BYTES_PER_PARAMETER, host_bytes) / divided
        return bytes_summed(self.dtype, setting.zero_stage), moved

    def _is_decoder(self, layer: int) -> bool:
        return 0 < layer < self.num_layers - 1

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (it goes with the planner that made it)
    def _parts(self, setting: Setting, counts: tuple[int, ...], recompute: int) -> tuple[PartMemory, ...]:
        setup = Setup(
            self.size,
            len(counts),
            self.dtype,
            setting.micro_batch,
            tensor_parallel=setting.tensor,
            data_parallel=setting.data,
            zero_stage=setting.zero_stage,
            activation_checkpointing=bool(recompute),
            keeps_attention=recompute == Again.KEEPS_ATTENTION,
            layers_per_part=counts,
            sequence_ranks=setting.sequence,
            on_cpu=self._cluster.card.is_cpu,
            fused_loss=self.fused_loss,
            offload_optimizer=setting.offload_optimizer,
        )
        return setup.count_parts()
