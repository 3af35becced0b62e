"""What an engine with slices does around DeepSpeed's saving and loading of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.checkpoint_load import find_checkpoint
from terapipe_ds.runtime.checkpoint_save import save_checkpoint
from terapipe_ds.runtime.checkpoints import check_checkpoint, states_folder, with_description
from terapipe_ds.runtime.plans import Plans
from terapipe_ds.runtime.state_layout import OUR_KEYS, described_layout, loaded_from, saved_as_stock
from terapipe_ds.runtime.watchdog import Watchdog


class SafeCheckpoints(PipelineEngine):
    """A base of ``TeraPipeEngine``: checkpoints that are whole or not there, and that say which slices they had."""

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
        """Same arguments and result as DeepSpeed's; it is there as a whole or not at all, whatever dies meanwhile.

        A rank that never arrives is reported.

        Raises:
            CheckpointError: on every rank, where one of them cannot write.
        """
        with self._watchdog.apart("save_checkpoint"):
            with saved_as_stock(self) as listed:
                return save_checkpoint(
                    self, super().save_checkpoint, save_dir, tag, {**with_description(self, client_state), **listed},
                    save_latest, exclude_frozen_parameters,
                    {**self._plans.described(), "layout": described_layout(self)},
                )  # fmt: skip

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
        """Same arguments and result as DeepSpeed's; the plan and the schedule are those of this engine.

        Where ``latest`` names a checkpoint that is not whole, the newest whole one is loaded, with a warning.

        Raises:
            TeraPipeConfigError: on every rank, where another TP x PP x DP has saved what is to be loaded, or stages
                whose optimizer states cannot be brought to those of this engine.
            CheckpointError: on every rank, where ``tag`` is not whole, or nothing is, or a file cannot be read.
        """
        with self._watchdog.apart("load_checkpoint"):
            found = find_checkpoint(self, load_dir, tag, load_optimizer_states and not load_module_only)
            check_checkpoint(self, load_dir, found.read_as, load_optimizer_states, load_module_only)
            folder = states_folder(self, load_dir, found.read_as, load_optimizer_states, load_module_only)
            with loaded_from(self, folder):
                loaded = super().load_checkpoint(
                    load_dir, found.read_as, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                    load_module_only, custom_load_fn,
                )  # fmt: skip
        for key in OUR_KEYS:
            (loaded[1] or {}).pop(key, None)  # DeepSpeed takes what it does not know for the client's
        if found.manifest is not None and loaded[0] is not None and not load_module_only:
            self._plans.resume(found.manifest.tag, found.manifest.training)
        return loaded
