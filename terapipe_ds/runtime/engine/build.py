"""Build a `TeraPipeEngine`: the setup before DeepSpeed's own `__init__`, and the collaborators after it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

import terapipe_ds.runtime.engine.deepspeed_faults as faults
from terapipe_ds.attention import SliceStore
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.unknown_keys import misspelt_keys
from terapipe_ds.files.user_json import is_on
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import everywhere, gather, refuse_everywhere
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.own_time import OwnTime
from terapipe_ds.runtime.engine.part_runner import DeepSpeedCalls, Stage
from terapipe_ds.runtime.engine.refused_calls import (
    problem_of_arguments,
    problem_of_checkpointing,
    problem_of_device_waits,
    problem_of_split,
    warn_of_checkpointable,
    warn_of_unused,
)
from terapipe_ds.runtime.engine.step_report import peak_flops
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.engine.trained_parameters import (
    fill_empty_groups,
    never_none_at_all,
    problem_of_foreign_parameters,
    remembering,
    tensors_of,
)
from terapipe_ds.runtime.failures.device_memory import warning_of_allocator
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import forget_recompute, set_recompute
from terapipe_ds.runtime.layers.compiled import compile_layers, problem_of_compile, tell_of_schedules, uncompile_layers
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import stage_flops
from terapipe_ds.runtime.layers.gradient_sums import hooks_without_need
from terapipe_ds.runtime.layers.offload import ActivationOffload
from terapipe_ds.runtime.layers.sliceable import problem_of_layers
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products, leave_to_autograd
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from terapipe_ds.runtime.layout.layers_to_parts import lay_out
from terapipe_ds.runtime.layout.layout import Layout, layout_of
from terapipe_ds.runtime.layout.same_model import (
    refuse_other_grid,
    refuse_other_stages,
    refuse_other_tensor_ranks,
    require_equal_models,
)
from terapipe_ds.runtime.layout.sequence_axis import (
    problem_of_lengths,
    problem_of_sequence_axis,
    sequence_size,
    shortest_slice_on,
    slice_length_multiple,
    take_sequence_axis,
    with_multiple,
)
from terapipe_ds.runtime.layout.tied_and_copied import problem_of_shared_layers, restore_hooks
from terapipe_ds.runtime.links.choose_formats import problem_of_links, warn_of_links
from terapipe_ds.runtime.links.groups import PipelineGroups, Wires
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.runtime.log import show_log
from terapipe_ds.runtime.planning.measure_and_share import warn_of_unread

_ENGINE = "_terapipe_engine"  # attribute of a module: the id of the engine that has prepared its layers last


@dataclass(frozen=True)
class EngineSetup:
    """Hold the settings that are final before DeepSpeed builds its engine."""

    config: TeraPipeConfig  # its granularity is one that the layers can be cut by
    slice_length_multiple: int
    layout: Layout
    parameters: Any  # the `model_parameters` of `deepspeed.initialize`, for the layers that this stage holds now
    optimizer: Any
    trained: list[torch.Tensor]  # these and the user's tensors in `optimizer`, complete once the optimizer is made
    sequence: SequenceRanks  # the ranks that divide each slice; their number divides `slice_length_multiple`
    own_time: OwnTime = field(default_factory=OwnTime)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineSetup:
        """Read the engine arguments of `deepspeed.initialize`, and lay the module out. A collective over all ranks."""
        raw, rank = options["config_class"]._param_dict, torch_dist.get_rank()
        config = everywhere(lambda: TeraPipeConfig.from_deepspeed(dict(raw)))  # this may read files
        module, optimizer = options["model"], options.get("optimizer")
        # refuse settings that do not fit while all layers are where DeepSpeed built them
        require_equal_models(module)

        def check() -> tuple[int, Layout]:
            refuse_other_grid(module, config)
            refuse_other_stages(module, raw)
            refuse_other_tensor_ranks(module, raw)
            # before DeepSpeed turns autocast on, for this process and all engines to come
            problem = problem_of_arguments(module)
            problem = problem or faults.problem_of_grad_scaler(options["config_class"], module.num_stages)
            problem = problem or faults.problem_of_curriculum(options["config_class"], module.num_stages)
            problem = problem or problem_of_sequence_axis(module, raw)
            if problem is not None:
                raise TeraPipeConfigError(problem)
            multiple = slice_length_multiple(module) * sequence_size(module)  # each rank's share fits its layers
            set_recompute(module, config, raw)
            return multiple, layout_of(config, module)

        multiple, layout = everywhere(check)
        # bring the layers to their stages, then give the optimizer the parameters that are there
        chosen = lay_out(module, layout, options.get("model_parameters"), optimizer)
        deepspeed.set_optimizer_flags(options["config_class"], module)  # Muon's; layers that moved here lack them

        def trained_here() -> Any:
            if problem := faults.problem_of_memory(module):
                raise TeraPipeConfigError(problem)
            return never_none_at_all(module, chosen)  # this consumes an iterator of the program

        parameters = everywhere(trained_here)
        fill_empty_groups(module, optimizer)
        trained = tensors_of(() if parameters is None else parameters)
        optimizer = remembering(optimizer, trained)
        # make groups only now, so that a refusal leaves none behind
        show_log(rank)
        if rank == 0 and is_on((raw.get("pipeline") or {}).get("seed_layers")) and not module.seed_layers:
            logger.warning("pipeline.seed_layers: DeepSpeed ignores it; give PipelineModule seed_layers=True instead")
        for text in misspelt_keys(raw) if rank == 0 else ():
            logger.warning("%s", text)
        sequence = take_sequence_axis(module.mpu())
        if sequence.size > 1 and raw.get("seq_parallel_communication_data_type"):  # DeepSpeed does not see these ranks
            settled = options["config_class"]
            settled.communication_data_type = settled.seq_parallel_communication_data_type
        return cls(with_multiple(config, multiple, rank), multiple, layout, parameters, optimizer, trained, sequence)

    def refuse(self, engine: PipelineEngine) -> None:
        """Raise TeraPipeConfigError on every rank if the engine cannot train these layers. A collective."""
        config, multiple = self.config, self.slice_length_multiple
        uncompile_layers(engine.module)  # of an earlier engine
        shortest = shortest_slice_on(engine.module)
        problems = (problem_of_lengths("terapipe.slices", each, multiple, shortest) for each in config.listed_slices)
        refuse_everywhere(
            problem_of_checkpointing(config.is_stock_order)
            or problem_of_foreign_parameters(engine.module, self.trained)
            or problem_of_layers(engine.module, config, engine.has_moe_layers, self.sequence.size > 1)
            or next(filter(None, problems), None)
            or config.problem_of_count(engine.micro_batches)
            or problem_of_shared_layers(engine.module, self.layout)
            or problem_of_links(config, self.layout, torch.device(engine.device))
            or problem_of_split(engine.module, config.schedule)
            or getattr(engine.module, "training_problem", None)
        )
        if config.compile:
            has_sequence_ranks = self.sequence.size > 1
            refuse_everywhere(problem_of_compile(engine.module, engine.flops_profiler_enabled(), has_sequence_ranks))
        if engine.global_rank == 0:
            warn_of_links(config)
            warn_of_checkpointable(engine.module)
            tell_of_schedules(config)
            warn_of_unread(config)


def build_stage(engine: PipelineEngine, setup: EngineSetup, groups: PipelineGroups, wires: Wires) -> Stage:
    """Build the objects that the parts of a stage share. A collective over all ranks.

    From now on the linear layers accumulate their weight gradients in their products, and DeepSpeed counts gradients
    correctly.
    """
    refuse_everywhere(problem_of_device_waits(wires.post_on_device), groups.world)
    if wires.post_on_device and engine.global_rank == 0 and (warning := warning_of_allocator()):
        logger.warning("%s", warning)
    # features that only some configs enable
    config, module, store = setup.config, engine.module, SliceStore()
    if config.verify == "off":
        store.on_unused = functools.partial(warn_of_unused, set())
    # rank 0 writes, and programs may configure its monitors alone; all its pipeline sends it the figures
    engine.monitor.enabled = gather(engine.monitor.enabled, groups.world)[0]
    is_monitored = engine.monitor.enabled and 0 in groups.ranks
    flops, finite = stage_flops(engine, is_monitored and peak_flops(engine, config) is not None), None
    restore_hooks(module)
    # layers leave weight gradients to W, or add them to their sums in the product itself
    weights = leave_to_autograd(module) if config.compile else accumulate_in_products(module, engine.optimizer)
    if config.check_finite == "every_step":
        is_collected = hooks_without_need(engine.optimizer) is None  # else gradients stay in `.grad`
        where = store, engine.stage_id, groups.world
        finite = FiniteCheck(module, *where, not faults.may_overflow(engine), is_collected, weights.sums)
    if config.compile:
        compile_layers(module)
    setattr(module, _ENGINE, id(engine))
    faults.warn_of_first_step(engine)
    faults.count_nothing_as_zero(engine.optimizer)
    faults.reduce_in_one_bucket(engine.optimizer)
    faults.forget_replaced_parameters(engine.optimizer)
    faults.join_in_each_group(engine.optimizer, groups.world)
    # from here on the watch-dog reports a stage that hangs
    watchdog = Watchdog(
        engine.global_rank,
        engine.stage_id,
        config.stall_timeout_s,
        asynchronous=not get_accelerator().is_synchronized_device(),
        trace_dir=config.trace_dir,
        data_timeout_s=config.data_timeout_s,
    )
    announces_each = module.dynamic_shape and config.is_stock_order
    links = StageLinks(wires, setup.layout, engine.stage_id, announces_each, compiles=config.compile)
    links.waiting = watchdog.waiting
    return Stage(
        engine.stage_id,
        DeepSpeedCalls(engine, config.offload_activations),
        links,
        store,
        watchdog,
        weights,
        BatchResults(engine, config.sequence_dim, setup.sequence, sums_outputs=faults.skips_nan(engine)),
        Tracer(config.trace_dir, engine.global_rank, engine.stage_id, engine.num_stages, is_monitored),
        setup.own_time,
        finite,
        flops,
        setup.sequence,
        ActivationOffload(module, torch.device(engine.device)) if config.offload_activations else None,
    )


def give_back(engine: PipelineEngine) -> None:
    """Let the layers of a destroyed engine run as they did before it, at their new places, unless another has them."""
    module = engine.module
    if vars(module).get(_ENGINE) != id(engine):
        return
    delattr(module, _ENGINE)
    uncompile_layers(module)
    leave_to_autograd(module)
    forget_recompute(module)
    for name in [name for name in module._parameters if name.startswith(NOTHING_TRAINED)]:
        del module._parameters[name]
