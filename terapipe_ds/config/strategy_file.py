"""Read the strategy that `terapipe.strategy` names, and report where the rest of the config contradicts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terapipe_ds.config.values import tuples_to_lists
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.user_json import is_on, value_at, with_new_names
from terapipe_ds.messages import show_value
from terapipe_ds.strategy import Strategy, StrategyError

_SETTLED = ("schedule", "chunks_per_stage", "partition", "slices", "recompute", "keep_attention",
            "offload_activations")  # fmt: skip
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_strategy(path: str) -> Strategy:
    """Return the strategy in a file. Raises ValueError, whose text ends with the fix."""
    try:
        return Strategy.from_json(read_bytes(path))
    except OSError as error:
        wrote = "`terapipe strategy --strategy-out` or `to_json` wrote"
        raise ValueError(f"cannot read it ({error.strerror}); give a file that {wrote}") from None
    except StrategyError as error:
        raise ValueError(str(error).removeprefix("strategy: ")) from None


def section_of(strategy: Strategy) -> dict[str, Any]:
    """Return the keys of the section that a strategy settles. Its `slices` refuse sequences of another length."""
    return {name: getattr(strategy, name) for name in _SETTLED} | {"schedule_options": {}}


def sizes_of(strategy: Strategy) -> dict[str, int]:
    """Return the sizes of a batch under DeepSpeed's names."""
    wanted = strategy.to_deepspeed()
    return {name: wanted[name] for name in _SIZES}


def contradictions(strategy: Strategy, section: Mapping[str, Any], ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each value that differs from the strategy's; `section` has the keys that are set, valid."""
    ds_config = with_new_names(ds_config)
    for name, wanted in section_of(strategy).items():
        if name in section and not _is_same(strategy, name, section[name], wanted):
            yield _line(f"terapipe.{name}", tuples_to_lists(section[name]), wanted)
    for name, size in sizes_of(strategy).items():
        if ds_config.get(name, size) != size:
            yield _line(name, ds_config[name], size)
    if (zero_stage := value_at(ds_config, "zero_optimization.stage") or 0) != strategy.zero_stage:
        yield _line("zero_optimization.stage", zero_stage, strategy.zero_stage, f"set it to {strategy.zero_stage}")
    device = str(value_at(ds_config, "zero_optimization.offload_optimizer.device") or "none")
    if (device != "none") != strategy.offload_optimizer:
        wanted = "cpu" if strategy.offload_optimizer else "none"
        yield _line("zero_optimization.offload_optimizer.device", device, wanted, f'set it to "{wanted}"')
    if (precision := _precision(ds_config)) != strategy.dtype:
        yield _line("the precision", precision, strategy.dtype, "set bf16.enabled or fp16.enabled as it says")


def _is_same(strategy: Strategy, name: str, given: Any, wanted: Any) -> bool:
    """Return whether a value means the same as the strategy's, perhaps in another form."""
    if name == "slices" and isinstance(given, int):
        lists = {plan.lengths for plan in strategy.plans}
        return {given} == set(map(len, lists)) and all(max(lengths) - min(lengths) <= 1 for lengths in lists)
    if given is None or name != "recompute":
        return given is None or tuples_to_lists(given) == wanted
    given, wanted = (range(strategy.grid["pipe"]) if value == "full" else value for value in (given, wanted))
    return sorted(given) == sorted(wanted)


def _precision(ds_config: Mapping[str, Any]) -> str:
    kinds = {"bf16": "bfloat16", "fp16": "float16", "torch_autocast": "torch_autocast"}
    enabled = (dtype for name, dtype in kinds.items() if is_on(value_at(ds_config, f"{name}.enabled")))
    return next(enabled, "float32")


def _line(what: str, given: Any, wanted: Any, fix: str = "leave it out, or give the same") -> str:
    return f"{what} = {show_value(given)}: the strategy says {show_value(wanted)}; {fix}, or plan again"
