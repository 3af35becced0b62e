"""Build a `TeraPipeEngine`: what precedes DeepSpeed's own `__init__`, and the collaborators that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import SliceStore
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.runtime.agreement import everywhere, gather_results, refuse_everywhere
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.collaborators import Stage
from terapipe_ds.runtime.engine.deepspeed_calls import DeepSpeedCalls
from terapipe_ds.runtime.engine.deepspeed_faults import count_every_stage_in_norm, count_nothing_as_zero, may_overflow
from terapipe_ds.runtime.engine.step_report import peak_flops
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import set_recompute
from terapipe_ds.runtime.layers.compiled import compile_layers, problem_of_compile, tell_of_schedules
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import stage_flops
from terapipe_ds.runtime.layers.offload import ActivationOffload
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients, accumulate_in_products
from terapipe_ds.runtime.layout.cut_module import lay_out
from terapipe_ds.runtime.layout.layout import Layout, layout_of
from terapipe_ds.runtime.layout.sequence_axis import (
    problem_of_sequence_axis,
    shortest_slice_on,
    take_sequence_axis,
    token_multiple,
)
from terapipe_ds.runtime.layout.tied_and_copied import problem_of_copies
from terapipe_ds.runtime.layout.topology import refuse_other_models
from terapipe_ds.runtime.links.compression import problem_of_links, warn_of_links
from terapipe_ds.runtime.links.groups import PipelineGroups, Wires
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.runtime.log import show_log
from terapipe_ds.runtime.refusals import (
    check_checkpointing,
    problem_of_device_waits,
    problem_of_layers,
    problem_of_lengths,
    with_multiple,
)

NOTHING_TRAINED = "terapipe_nothing_is_trained"  # of the module: a parameter for the optimizer of a frozen stage


@dataclass(frozen=True)
class EngineSetup:
    """What is settled before DeepSpeed builds its engine.

    `config` has a granularity that the layers can be cut by. `parameters` are `model_parameters` of
    `deepspeed.initialize`, of the layers that this stage holds now. `trained` are these and the tensors that
    `optimizer` got by hand, complete once it is made. `sequence` are the ranks that divide the tokens of each slice;
    their number divides `slice_length_multiple`.
    """

    config: TeraPipeConfig
    slice_length_multiple: int
    layout: Layout
    parameters: Any
    optimizer: Any
    trained: list[torch.Tensor]
    sequence: SequenceRanks

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineSetup:
        """Read what `deepspeed.initialize` gives to its engine, and lay the module out. A collective over all ranks."""
        raw, rank = options["config_class"]._param_dict, torch_dist.get_rank()
        config = everywhere(lambda: TeraPipeConfig.from_deepspeed(dict(raw)))  # which may read files
        module, optimizer = options["model"], options.get("optimizer")
        # refuse what does not fit while all layers are where DeepSpeed built them
        refuse_other_models(module, config)
        refuse_everywhere(problem_of_sequence_axis(module, config, raw))
        multiple = token_multiple(module)
        gather_results(lambda: set_recompute(module, config, raw))
        # bring the layers to their stages, then give the optimizer the parameters that are there
        layout = layout_of(config, module)
        chosen = lay_out(module, layout, options.get("model_parameters"), optimizer)
        parameters = everywhere(lambda: never_none_at_all(module, chosen))  # which reads an iterator of the program
        fill_empty_groups(module, optimizer)
        # only now make groups: a refusal leaves none behind
        show_log(rank)
        sequence = take_sequence_axis(module.mpu())
        trained = tensors_of(() if parameters is None else parameters)
        optimizer = remembering(optimizer, trained)
        return cls(with_multiple(config, multiple, rank), multiple, layout, parameters, optimizer, trained, sequence)

    def refuse(self, engine: PipelineEngine) -> None:
        """Raise TeraPipeConfigError on every rank where the engine cannot train these layers. A collective."""
        config, multiple = self.config, self.slice_length_multiple
        shortest = shortest_slice_on(engine.module)
        problems = (problem_of_lengths("terapipe.slices", each, multiple, shortest) for each in config.listed_slices)
        check_checkpointing(config.is_stock_order)
        refuse_everywhere(
            problem_of_foreign_parameters(engine.module, self.trained)
            or problem_of_layers(engine.module, config, engine.has_moe_layers, self.sequence.size > 1)
            or next(filter(None, problems), None)
            or config.problem_of_count(engine.micro_batches)
            or problem_of_copies(self.layout, engine.optimizer)
            or problem_of_links(config, self.layout, torch.device(engine.device))
        )
        if config.compile:
            has_sequence_ranks = self.sequence.size > 1
            refuse_everywhere(problem_of_compile(engine.module, engine.flops_profiler_enabled(), has_sequence_ranks))
        if engine.global_rank == 0:
            warn_of_links(config)
            tell_of_schedules(config)


def never_none_at_all(module: Any, parameters: Any) -> Any:
    """Return `parameters`; on a stage where nothing is trained, or in a group, a number that never gets a gradient.

    Optimizers take no empty list, and ZeRO no empty group. The number is a parameter of the module, so that it has the
    dtype and the device of all others, but of no layer, so that no checkpoint has it.
    """
    listed = list(module.parameters() if parameters is None else parameters)
    if any(isinstance(each, Mapping) for each in listed):
        return [_with_some(module, group, f"{NOTHING_TRAINED}_{index}") for index, group in enumerate(listed)]
    if any(each.requires_grad for each in listed):
        return parameters if parameters is None else listed
    return [_number(module, NOTHING_TRAINED)]


def fill_empty_groups(module: Any, optimizer: Any) -> None:
    """Put a number into each empty group of an optimizer: DeepSpeed would remove the group, and a scheduler counts it.

    Which groups are empty depends on the layers of a stage.
    """
    for index, group in enumerate(optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()):
        if not group["params"]:
            group["params"] = [_number(module, f"{NOTHING_TRAINED}_{index}")]


def tensors_of(parameters: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of a list of parameters or of parameter groups."""
    nested = [each["params"] if isinstance(each, Mapping) else [each] for each in parameters]
    return [tensor for each in nested for tensor in ([each] if isinstance(each, torch.Tensor) else each)]


def remembering(optimizer: Any, trained: list[torch.Tensor]) -> Any:
    """Return `optimizer`, or a function that makes one. `trained` gets its tensors, before ZeRO flattens them."""
    if isinstance(optimizer, torch.optim.Optimizer):
        trained += tensors_of(optimizer.param_groups)
    elif callable(optimizer):

        def make(parameters: Any) -> Any:
            made = optimizer(parameters)
            trained.extend(tensors_of(made.param_groups))
            return made

        return make
    return optimizer


def problem_of_foreign_parameters(module: Any, trained: Iterable[torch.Tensor]) -> str | None:
    """Return an error about parameters that would be trained although they are not in the module; None without any.

    A loss function can bring them, or a layer that hides them in a list: no stage would sum their gradients.
    """
    own = {id(parameter) for parameter in module.parameters()}
    foreign = {id(tensor): tensor for tensor in trained if tensor.requires_grad and id(tensor) not in own}
    if not foreign:
        return None
    shapes = ", ".join(str(list(tensor.shape)) for tensor in list(foreign.values())[:4])
    return (
        f"the optimizer trains parameters that are not in the PipelineModule: {len(foreign)}, of shape {shapes}"
        f"{', ...' if len(foreign) > 4 else ''}. Stages would not sum their gradients, and no checkpoint would have "
        "them: move them into a layer, or make loss_fn an nn.Module that holds them"
    )


def _with_some(module: Any, group: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = group["params"]
    listed = [given] if isinstance(given, torch.Tensor) else list(given)
    is_trained = any(each.requires_grad for each in listed)
    return {**group, "params": listed if is_trained else [*listed, _number(module, name)]}


def _number(module: Any, name: str) -> torch.nn.Parameter:
    first = next(module.parameters(), None)
    number = torch.nn.Parameter(torch.zeros(1) if first is None else first.detach().new_zeros(1))
    module.register_parameter(name, number)
    return number


def build_stage(engine: PipelineEngine, setup: EngineSetup, groups: PipelineGroups, wires: Wires) -> Stage:
    """Build what the parts of a stage share. A collective over all ranks.

    From now on the linear layers accumulate their weight gradients in their products, and DeepSpeed counts gradients
    as it should.
    """
    refuse_everywhere(problem_of_device_waits(wires.post_on_device), groups.world)
    config, module, store = setup.config, engine.module, SliceStore()
    is_monitored = engine.monitor.enabled and 0 in groups.ranks
    flops, finite = stage_flops(engine, is_monitored and peak_flops(engine, config) is not None), None
    if config.check_finite == "every_step":
        is_collected = isinstance(engine.optimizer, DeepSpeedOptimizer)
        finite = FiniteCheck(module, store, engine.stage_id, groups.world, not may_overflow(engine), is_collected)
    weights = WeightGradients() if config.compile else accumulate_in_products(module, engine.optimizer)
    if config.compile:
        compile_layers(module)
    count_every_stage_in_norm(module, engine.grid)
    count_nothing_as_zero(engine.optimizer)
    watchdog = Watchdog(
        engine.global_rank,
        engine.stage_id,
        config.stall_timeout_s,
        asynchronous=not get_accelerator().is_synchronized_device(),
        trace_dir=config.trace_dir,
        data_timeout_s=config.data_timeout_s,
    )
    links = StageLinks(wires, setup.layout, engine.stage_id, module.dynamic_shape and config.is_stock_order)
    links.waiting = watchdog.waiting
    return Stage(
        engine.stage_id,
        DeepSpeedCalls(engine),
        links,
        store,
        watchdog,
        weights,
        BatchResults(engine, config.sequence_dim, setup.sequence),
        Tracer(config.trace_dir, engine.global_rank, engine.stage_id, engine.num_stages, is_monitored),
        finite,
        flops,
        setup.sequence,
        ActivationOffload(module, torch.device(engine.device)) if config.offload_activations else None,
    )
