"""Save and load checkpoints of an engine around DeepSpeed's own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.checkpoints.compatibility import refuse_what_does_not_fit, with_description
from terapipe_ds.runtime.checkpoints.load import find_checkpoint
from terapipe_ds.runtime.checkpoints.optimizer_states import ENVELOPE, LISTED, optimizer_states
from terapipe_ds.runtime.checkpoints.save import save_checkpoint
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.planning.batch_plans import Plans


class LoadOptions(NamedTuple):
    """Hold what `load_checkpoint` is asked for besides a folder and a tag, in DeepSpeed's order."""

    module_strict: bool
    optimizer_states: bool
    lr_scheduler_states: bool
    module_only: bool
    custom_load_fn: Any


class SafeCheckpoints:
    """Save and load the checkpoints of one engine: they are whole or not there, and say which slices they had.

    Args:
        world: a group of all ranks, on the CPU.
    """

    def __init__(self, engine: PipelineEngine, layout: Layout, world: Any, plans: Plans, watchdog: Watchdog) -> None:
        self._engine, self._layout, self._world = engine, layout, world
        self._plans, self._watchdog = plans, watchdog

    def save(
        self,
        stock_save: Callable[..., Any],
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
    ) -> Any:
        """Save by DeepSpeed's method `stock_save`; see `TeraPipeEngine.save_checkpoint`."""
        engine, stages = self._engine, range(self._layout.num_stages)
        parts = [[place.part_id for place in self._layout.places(stage_id)] for stage_id in stages]
        layout = {"parts_by_stage": parts, "first_layers": [int(layer_id) for layer_id in engine.module.parts]}
        training = {**self._plans.described(), "layout": layout}
        state = with_description(engine, client_state)
        with self._watchdog.long_call("save_checkpoint"), ExitStack() as stack:
            states = optimizer_states(engine, self._layout, self._world)
            if states is not None:
                state |= stack.enter_context(states.saved_in_stock_order())

            def save_as(tag: str | None, is_latest: bool) -> Any:
                return stock_save(save_dir, tag, state, is_latest, exclude_frozen_parameters)

            return save_checkpoint(engine, self._world, save_as, save_dir, tag, save_latest, training)

    def load(self, stock_load: Callable[..., Any], load_dir: str, tag: str | None, options: LoadOptions) -> Any:
        """Load by DeepSpeed's method `stock_load`; see `TeraPipeEngine.load_checkpoint`."""
        engine, with_optimizer = self._engine, options.optimizer_states and not options.module_only
        with self._watchdog.long_call("load_checkpoint"), ExitStack() as stack:
            chosen = find_checkpoint(engine, self._world, load_dir, tag, with_optimizer)
            folder = None if chosen.read_as is None else Path(load_dir, chosen.read_as)
            refuse_what_does_not_fit(engine, self._world, folder, options.optimizer_states, options.module_only)
            has_copies = engine.zero_optimization() and not options.module_only  # in fp32, among the states of stages
            if folder is not None and (with_optimizer or has_copies) and not engine.load_universal_checkpoint():
                states = optimizer_states(engine, self._layout, self._world)
                if states is not None:
                    path = Path(engine._get_ckpt_name(load_dir, chosen.read_as))
                    stack.enter_context(states.loaded_in_order_of(path))
            loaded = stock_load(load_dir, chosen.read_as, *options)
        for key in (LISTED, ENVELOPE):
            (loaded[1] or {}).pop(key, None)  # DeepSpeed takes what it does not know for the client's
        if chosen.manifest is not None and loaded[0] is not None and not options.module_only:
            self._plans.resume(chosen.manifest.tag, chosen.manifest.training)
        return loaded
