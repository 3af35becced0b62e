"""Say what the runners of a stage may ask: their collaborators, and of DeepSpeed's engine only `DeepSpeedCalls`."""

from __future__ import annotations

from dataclasses import dataclass, field

from terapipe_ds.attention import SliceStore
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.deepspeed_calls import DeepSpeedCalls
from terapipe_ds.runtime.engine.trace import ActionTracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import StageFlops
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.runtime.memory.offload import ActivationOffload


@dataclass
class Stage:
    """What the parts of one stage share.

    In `store` each part has names of its own. `finite`, which searches for numbers that are not finite, `flops`, which
    counts operations, and `offload`, which brings saved tensors to the host, are there where the config asks for them.
    `sequence` are the ranks that divide the tokens of each slice.
    """

    stage_id: int
    deepspeed: DeepSpeedCalls
    links: StageLinks
    store: SliceStore
    watchdog: Watchdog
    weights: WeightGradients
    results: BatchResults
    tracer: ActionTracer
    finite: FiniteCheck | None = None
    flops: StageFlops | None = None
    sequence: SequenceRanks = field(default_factory=SequenceRanks)
    offload: ActivationOffload | None = None
