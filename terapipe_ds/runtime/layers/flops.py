"""Count the operations of a stage, if DeepSpeed's config has `flops_profiler`.

DeepSpeed 0.19.8 waits for the device around each module (which hangs if receives are posted ahead), and prints nothing
with pipelines. Here every stage of the first replica counts the F, B and W of the first micro-batch of `profile_step`
by torch's formulas: products of matrices, convolutions and attention, 2 for each multiply-add. Attention counts only
the scores that a causal mask leaves, so slices count as much as whole sequences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.profiling.flops_profiler.profiler import number_to_string
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from terapipe_ds import compat
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.files.atomic import write_text
from terapipe_ds.runtime.layout.sequence_axis import sequence_ranks_of
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.schedule.action import Action, Kind

_COUNTED = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradients apart"}
_QK_AND_PV, _BACKWARD = 2, 5  # products of a fused kernel; the backward: Q K^T again, dP, dV, dQ, dK


def attention_formula(operation: Any, products: int, token_dim: int = 2) -> Callable[..., int]:
    """Return the formula of a kernel with `products` products per score, for shapes in the place of its tensors.

    `token_dim` is the dimension of queries that counts tokens.
    """
    names = [each.name for each in operation.default._schema.arguments]  # noqa: SLF001  # operators have no other
    query, is_causal = (names.index(a if a in names else b) for a, b in (("query", "q"), ("is_causal", "causal")))

    def count(*args: Any, **options: object) -> int:
        q, k, v = args[query : query + 3]
        if len(q) < 4:  # packed documents, whose lengths are on the device
            return 0
        hidden = len(args) > is_causal and bool(args[is_causal]) and q[token_dim] * (q[token_dim] - 1) // 2
        scores = q[0] * q[3 - token_dim] * (q[token_dim] * k[token_dim] - hidden)  # the last query sees all keys
        return int(2 * scores * (q[-1] * (products - products // 2) + v[-1] * (products // 2)))

    return count


def _formulas() -> dict[object, Callable[..., int]]:
    """Return the formulas of operations that torch does not count, or counts without the mask.

    Torch's own fail for `addmm` with a dtype of its result, and for `_flash_attention_forward` with a prefix.
    """
    aten, sdpa = torch.ops.aten, "_scaled_dot_product_"
    kinds = "flash_attention", "flash_attention_for_cpu", "cudnn_attention", "efficient_attention"
    kernels: list[tuple[Any, str, str, int]] = [(aten, f"{sdpa}{kind}", f"{sdpa}{kind}_backward", 2) for kind in kinds]
    kernels.append((aten, "_flash_attention_forward", "_flash_attention_backward", 1))
    if compat.has("flash_attn"):
        kernels.append((torch.ops.flash_attn, "_flash_attn_forward", "_flash_attn_backward", 1))
    if compat.has("flash_attn_3") and hasattr(torch.ops.flash_attn_3, "bwd"):
        kernels.append((torch.ops.flash_attn_3, "fwd", "bwd", 1))

    def product(total: Any, a: Any, b: Any, *dtype: object, **options: object) -> int:
        return int(2 * math.prod(a) * b[1])

    formulas: dict[object, Callable[..., int]] = {aten.addmm: product, aten.addmm_: product}
    for library, forward, backward, token_dim in kernels:
        for name, products in ((forward, _QK_AND_PV), (backward, _BACKWARD)):
            operation = getattr(library, name)
            formulas[operation] = attention_formula(operation, products, token_dim)
    return formulas


class _Undecomposed(dict[object, Callable[..., int]]):
    """Hold formulas that torch takes for complete: it decomposes operations without one, and last bits change."""

    def __contains__(self, operation: object) -> bool:  # torch before 2.15 asks for overloads, then for packets
        return isinstance(operation, OpOverload | OpOverloadPacket) or super().__contains__(operation)

    def __missing__(self, operation: object) -> Callable[..., int]:
        return lambda *args, **options: 0


class _ForwardTracker(ModuleTracker):
    """Track modules in forwards alone: torch's hooks on tensors fail on a layer that hands on its input in a
    recomputed forward, such as the head of a loss without logits.
    """

    def _fw_pre_hook(self, mod: Any, input: Any) -> None:
        self._get_append_fn(self._get_mod_name(mod), False)()

    def _fw_post_hook(self, mod: Any, input: Any, output: Any) -> None:
        self._get_pop_fn(self._get_mod_name(mod), False)()


class StageFlops:
    """Count the first micro-batch of the profiled step, in place of `engine.flops_profiler`.

    With `counts_first`, count the first micro-batch of the first training step as well, for monitors.
    """

    def __init__(self, engine: PipelineEngine, counts_first: bool = False) -> None:
        self._engine, self._formulas, self._counts_first = engine, _formulas(), counts_first
        self._prints = False
        grid = engine.grid
        replica_ranks = grid.get_data_parallel_rank(), grid.get_slice_parallel_rank(), sequence_ranks_of(grid).rank
        self._is_chosen = not any(replica_ranks)
        self._is_counting = False
        self._deferred, self._tokens = 0, 1
        self.totals: Counter[Kind] = Counter()
        self.forward_of: Counter[str] = Counter()  # path of a module -> operations of its forward

    def open_batch(self, training: bool, tokens: int) -> None:
        """Begin to count when the profiled step begins, whose first micro-batch has `tokens`; count no other batch."""
        engine, is_mine = self._engine, training and self._is_chosen
        # monitors want one count, before their first report
        is_due = engine.flops_profiler_enabled() and engine.global_steps == engine.flops_profiler_profile_step()
        self._prints = is_mine and is_due
        self._is_counting = is_mine and (is_due or (self._counts_first and not self.totals))
        if self._is_counting:
            self.totals.clear()
            self.forward_of.clear()
            self._deferred, self._tokens = 0, max(1, tokens)

    def defer(self, micro_batch_id: int, operations: int) -> None:
        """Count a product of the model's forward that a loss leaves to the backward."""
        if self._is_counting and not micro_batch_id:
            self._deferred += operations

    def of_token(self) -> float:
        """Return the operations per token of the last counted micro-batch on this stage; 0 if none was counted.

        They are three times the forward's count: recomputation does not count. If parameters are frozen, it is the
        actual count, if that is less.
        """
        forward, counted = self.totals[Kind.FORWARD] + self._deferred, sum(self.totals.values())
        is_trained = all(parameter.requires_grad for parameter in self._engine.module.parameters())
        return (3 * forward if is_trained else min(3 * forward, counted)) / self._tokens

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Count the operations of `action`, if it belongs to the first micro-batch of the profiled step."""
        if not self._is_counting or action.kind not in _COUNTED or action.micro_batch_id:
            yield
            return
        counter = FlopCounterMode(display=False, custom_mapping=self._formulas)
        counter.flop_registry = _Undecomposed(counter.flop_registry)
        counter.mod_tracker = _ForwardTracker()
        # under such a mode torch's compiler would give up functions for good, and fail with `fullgraph`
        with torch.compiler.set_stance("force_eager"), counter:
            yield
        self.totals[action.kind] += counter.get_total_flops()
        if action.kind is Kind.FORWARD:
            by_module = {path: sum(by_operation.values()) for path, by_operation in counter.get_flop_counts().items()}
            self.forward_of.update({path: count for path, count in by_module.items() if count and path != "Global"})

    def report(self) -> None:
        """Print the counts of the profiled step; or write `output_file`, stage k > 0 `<output_file>.stage<k>`."""
        path, stage_id = self._engine.flops_profiler_output_file(), self._engine.stage_id
        if self._prints and not path:
            print(self._text(), flush=True)
        elif self._prints:
            target = Path(path if stage_id == 0 else f"{path}.stage{stage_id}")
            with Diagnostic(f"flops_profiler.output_file: cannot write {target}").attempt():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_text(target, self._text() + "\n")

    def _text(self) -> str:
        """Describe the stage and its modules down to `module_depth`: all with `detailed`, else `top_modules`."""
        engine = self._engine
        deepest, is_detailed = engine.flops_profiler_module_depth(), engine.flops_profiler_detailed()
        modules = [path for path, _ in self.forward_of.most_common() if deepest == -1 or path.count(".") <= deepest]
        counts = {name: self.totals[kind] for kind, name in _COUNTED.items()}
        for path in modules if is_detailed else modules[: engine.flops_profiler_top_modules()]:
            counts[f"forward of {path}"] = self.forward_of[path]
        heading = (
            f"flops_profiler: step {engine.global_steps}, stage {engine.stage_id} of {engine.num_stages} (rank "
            f"{engine.global_rank}), operations for one micro-batch in its slices"
        )
        return "\n".join([heading, *(f"  {name}: {number_to_string(counts[name], precision=4)}" for name in counts)])

    def start_profile(self, ignore_list: object = None) -> None:
        """Do nothing: DeepSpeed calls this in each forward of rank 0, which is a slice here."""

    stop_profile = start_profile


def stage_flops(engine: PipelineEngine, counts_first: bool) -> StageFlops | None:
    """Return the counter of this stage, in place of DeepSpeed's profiler, if config or monitors need one."""
    if not engine.flops_profiler_enabled():
        return StageFlops(engine, counts_first) if counts_first else None
    factor = engine.flops_profiler_recompute_fwd_factor()
    if factor:
        raise TeraPipeConfigError(
            f"flops_profiler.recompute_fwd_factor = {factor}: the backward is counted here, with all that it computes "
            "again, and not estimated; remove the key or set it to 0"
        )
    engine.flops_profiler = StageFlops(engine, counts_first)
    return engine.flops_profiler
