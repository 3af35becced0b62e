"""Save and load checkpoints around DeepSpeed's own methods, with their arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.checkpoints.compatibility import refuse_what_does_not_fit, with_description
from terapipe_ds.runtime.checkpoints.load import find_checkpoint
from terapipe_ds.runtime.checkpoints.optimizer_states import ENVELOPE, LISTED, optimizer_states
from terapipe_ds.runtime.checkpoints.save import save_checkpoint
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import PipelineGroups
from terapipe_ds.runtime.planning.batch_plans import Plans


class SafeCheckpoints(PipelineEngine):
    """A base of `TeraPipeEngine`: checkpoints that are whole or not there, and that say which slices they had."""

    _layout: Layout
    _groups: PipelineGroups
    _plans: Plans
    _watchdog: Watchdog

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save a checkpoint as a whole or not at all, whatever dies meanwhile. A rank that never arrives is reported.

        Raises:
            CheckpointError: on every rank, where one of them cannot write.
        """
        parts = [[place.part_id for place in self._layout.places(stage_id)] for stage_id in range(self.num_stages)]
        layout = {"parts_by_stage": parts, "first_layers": [int(layer_id) for layer_id in self.module.parts]}
        training = {**self._plans.described(), "layout": layout}
        state, save = with_description(self, client_state), super().save_checkpoint
        with self._watchdog.apart("save_checkpoint"), ExitStack() as stack:
            states = optimizer_states(self, self._layout, self._groups.world)
            if states is not None:
                state |= stack.enter_context(states.saved_in_stock_order())

            def save_as(tag: str | None, is_latest: bool) -> Any:
                return save(save_dir, tag, state, is_latest, exclude_frozen_parameters)

            return save_checkpoint(self, save_as, save_dir, tag, save_latest, training)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load a checkpoint; the plan and the schedule are those of this engine.

        If `latest` names a checkpoint that is not whole, load the newest whole one, with a warning.

        Raises:
            TeraPipeConfigError: on every rank, where another TP x PP x DP has saved what is to be loaded, or stages
                whose optimizer states cannot be brought to those of this engine.
            CheckpointError: on every rank, where `tag` is not whole, or nothing is, or a file cannot be read.
        """
        load, with_optimizer = super().load_checkpoint, load_optimizer_states and not load_module_only
        options = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        with self._watchdog.apart("load_checkpoint"), ExitStack() as stack:
            chosen = find_checkpoint(self, load_dir, tag, with_optimizer)
            folder = None if chosen.read_as is None else Path(load_dir, chosen.read_as)
            refuse_what_does_not_fit(self, folder, load_optimizer_states, load_module_only)
            has_copies = self.zero_optimization() and not load_module_only  # in fp32, among the states of stages
            if folder is not None and (with_optimizer or has_copies) and not self.load_universal_checkpoint():
                states = optimizer_states(self, self._layout, self._groups.world)
                if states is not None:
                    path = Path(self._get_ckpt_name(load_dir, chosen.read_as))
                    stack.enter_context(states.loaded_in_order_of(path))
            loaded = load(load_dir, chosen.read_as, *options)
        for key in (LISTED, ENVELOPE):
            (loaded[1] or {}).pop(key, None)  # DeepSpeed takes what it does not know for the client's
        if chosen.manifest is not None and loaded[0] is not None and not load_module_only:
            self._plans.resume(chosen.manifest.tag, chosen.manifest.training)
        return loaded
