"""Save and load checkpoints of an engine by DeepSpeed's own methods, and refuse checkpoints that do not fit.

The plan and the schedule may differ from the checkpoint's; TP x PP x DP may not. DeepSpeed (0.19.8) fails with another
tensor-parallel size. With another number of stages it fills optimizers with states of other layers, or with zeros. So
this module checks a checkpoint before DeepSpeed reads it, and every rank refuses it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as torch_dist
from deepspeed.checkpoint import constants
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.files.user_json import DeepSpeedJson
from terapipe_ds.messages import describe, in_short, logger
from terapipe_ds.runtime.agreement import by_text, everywhere, from_rank_0, gather, gather_results, refuse_everywhere
from terapipe_ds.runtime.checkpoints.choose import (
    choose_checkpoint,
    find_checkpoint,
    load_everywhere,
    problem_of_files,
)
from terapipe_ds.runtime.checkpoints.disks import problem_of_local_storage
from terapipe_ds.runtime.checkpoints.manifest import OPTIMIZER_FILES, CheckpointError
from terapipe_ds.runtime.checkpoints.other_layouts import ENVELOPE, LISTED, PARAMETERS_ALONE, optimizer_states
from terapipe_ds.runtime.checkpoints.save import LATEST, finish_decoupled, save_checkpoint
from terapipe_ds.runtime.checkpoints.strict_pickles import read_states, strict_loading
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.sequence_axis import sequence_size
from terapipe_ds.runtime.planning.plans import Plans

# names in a checkpoint under which DeepSpeed reads back states of its own, without refusing them in client_state
_STATES = {"module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"}
_TP_DEGREE, _PP_DEGREE = constants.CHECKPOINT_TP_DEGREE, constants.CHECKPOINT_PP_DEGREE
MODEL_SIZES = "terapipe_model_sizes"  # in `universal_checkpoint_info` of a module, and so in its checkpoints
_CONVERT = (
    "Convert the checkpoint (python -m deepspeed.checkpoint.ds_to_universal; its writer must use ZeRO stage 1) and "
    'load it with "checkpoint": {"load_universal": true}'
)


class LoadOptions(NamedTuple):
    """Hold the arguments of `load_checkpoint` that follow the folder and the tag, in DeepSpeed's order."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    custom_load_fn: Any

    @property
    def with_optimizer(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    def compared(self) -> dict[str, bool]:
        """Return the arguments by name; of a function, whether there is one."""
        return {name: bool(each) for name, each in self._asdict().items()}

    def loaded(self) -> list[str]:
        """Return names for all that a load sets."""
        more = ("optimizer states", self.load_optimizer_states), ("learning rates", self.load_lr_scheduler_states)
        whole = ["numbers of steps", *(name for name, is_asked in more if is_asked)]
        return ["parameters", *([] if self.load_module_only else whole)]


class SafeCheckpoints:
    """Save and load the checkpoints of one engine; `world` is a group of all ranks on the CPU."""

    def __init__(
        self, engine: PipelineEngine, layout: Layout, world: Any, plans: Plans, watchdog: Watchdog, allow_pickle: bool
    ) -> None:
        self._engine, self._layout, self._world = engine, layout, world
        self._plans, self._watchdog, self._allow_pickle = plans, watchdog, allow_pickle
        self._half_loaded: dict[str, str] = {}  # contents that may be of two checkpoints, and the reason

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
        self.refuse_half_loaded()
        engine, stages = self._engine, range(self._layout.num_stages)
        parts = [[place.part_id for place in self._layout.places(stage_id)] for stage_id in stages]
        layout = {"parts_by_stage": parts, "first_layers": [int(layer_id) for layer_id in engine.module.parts]}
        ranks = {"sequence_ranks": sequence_size(engine.module)}  # which DeepSpeed counts as replicas in its files
        training = {**self._plans.described(), "layout": layout, **ranks}
        with self._watchdog.long_call("save_checkpoint"), ExitStack() as stack:
            tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
            passed = {"tag": tag, "exclude_frozen_parameters": exclude_frozen_parameters}
            refuse_other_calls("save_checkpoint", passed, self._world)
            state = everywhere(lambda: with_description(engine, client_state), self._world)
            mappings = getattr(engine.optimizer, "_param_slice_mappings", None)
            if mappings is not None and not engine.is_last_stage():
                # DeepSpeed's converter takes a loss module's values from any stage that lists them: one trains them
                listed = [{n: at for n, at in each.items() if not n.startswith("loss_fn.")} for each in mappings]
                stack.enter_context(replaced(engine.optimizer, "_param_slice_mappings", listed))
            states = optimizer_states(engine, self._layout, self._world)
            if states is not None:
                state |= stack.enter_context(states.saved_in_stock_order())

            def save_as(tag: str, is_latest: bool) -> Any:
                return stock_save(save_dir, tag, state, is_latest, exclude_frozen_parameters)

            settings = save_dir, tag, save_latest, training, self._allow_pickle
            return save_checkpoint(engine, self._world, save_as, *settings)

    def load(self, stock_load: Callable[..., Any], load_dir: str, tag: str | None, options: LoadOptions) -> Any:
        """Load by DeepSpeed's method `stock_load`; see `TeraPipeEngine.load_checkpoint`."""
        engine, with_optimizer = self._engine, options.with_optimizer
        with self._watchdog.long_call("load_checkpoint"), ExitStack() as stack:
            refuse_other_calls("load_checkpoint", {"tag": tag and str(tag), **options.compared()}, self._world)
            finish_decoupled(engine)
            stack.enter_context(self._form_of(Path(load_dir), tag, options))
            # Before DeepSpeed reads, check that the checkpoint is whole and fits this engine
            chosen = find_checkpoint(engine, self._world, load_dir, tag, with_optimizer, self._allow_pickle)
            if chosen.pickled is None:
                stack.enter_context(strict_loading())
            folder = None if chosen.read_as is None else Path(load_dir, chosen.read_as)
            refuse_what_does_not_fit(engine, self._world, folder, options)
            # States of another layout go to the stages that hold their parameters
            if folder is not None and with_optimizer and not engine.load_universal_checkpoint():
                states = optimizer_states(engine, self._layout, self._world)
                if states is not None:
                    path = Path(engine._get_ckpt_name(load_dir, chosen.read_as))
                    stack.enter_context(states.loaded_in_order_of(path))
            stack.enter_context(keeping_own(engine, with_optimizer))

            # After an error the parameters may be of two checkpoints, until a load of the same contents succeeds
            @refusing_other_optimizer(engine.basic_optimizer)
            def load_all() -> Any:
                return stock_load(load_dir, chosen.read_as, *options)

            try:
                loaded = load_everywhere(engine, self._world, load_all)
            except Exception as error:
                why = f"the load of {chosen.tag} failed ({describe(error)})"
                self._half_loaded |= dict.fromkeys(options.loaded() if folder else (), why)
                raise
        if loaded[0] is not None:
            self._half_loaded = {what: why for what, why in self._half_loaded.items() if what not in options.loaded()}
        for key in (LISTED, ENVELOPE):
            (loaded[1] or {}).pop(key, None)  # DeepSpeed takes keys that it does not know for the client's
        if chosen.manifest is not None and loaded[0] is not None and not options.load_module_only:
            self._plans.resume(chosen.manifest.tag, chosen.manifest.training)
        return loaded

    @contextmanager
    def _form_of(self, folder: Path, tag: str | None, options: LoadOptions) -> Iterator[None]:
        """Let an engine that began from a universal checkpoint load the ordinary ones that it has saved since.

        Warn of those that a universal one in the same folder hides.
        """
        engine, is_universal = self._engine, self._engine.load_universal_checkpoint()

        def is_ordinary() -> bool:
            return tag is None and (folder / LATEST).is_file() and not (folder / "latest_universal").is_file()

        if is_universal and from_rank_0(is_ordinary, self._world):
            with replaced(engine, "load_universal_checkpoint", lambda: False):
                yield
            return
        yield
        if is_universal and tag is None and not options.load_module_only and engine.global_rank == 0:
            with suppress(CheckpointError, OSError):
                later = choose_checkpoint(folder, None)
                if later.manifest is not None and later.manifest.global_steps > engine.global_steps:
                    logger.warning(
                        "load_checkpoint went back to step %d, of the universal checkpoint, and %s in the same folder "
                        'has step %d: to go on from that one, set "load_universal" to false',
                        engine.global_steps,
                        later.tag,
                        later.manifest.global_steps,
                    )

    def refuse_half_loaded(self) -> None:
        """Raise CheckpointError, on every rank alike, if a load has failed after it had begun to set parameters."""
        for why in self._half_loaded.values():
            raise CheckpointError(
                f"{why}, so that {', '.join(self._half_loaded)} may be of two checkpoints. Load one that is whole, "
                "with all of these, before the next batch or save"
            )


def refuse_other_calls(call: str, passed: Mapping[str, Any], world: Any) -> None:
    """Raise CheckpointError on every rank if one has passed other arguments: the ranks would wait for one another."""
    own = {name: repr(value) for name, value in {"call": call, **passed}.items()}
    everyone = gather(own, world)
    for name in own:
        texts = {rank: of_rank.get(name, "absent") for rank, of_rank in enumerate(everyone)}
        if len({*texts.values()}) > 1:
            raise CheckpointError(f"the ranks disagree in {call} on {name}: {by_text(texts)}; give all the same")


# -- checkpoints that do not fit ---------------------------------------------------------------------------------------


def refuse_what_does_not_fit(engine: PipelineEngine, world: Any, folder: Path | None, options: LoadOptions) -> None:
    """Compare the engine with the checkpoint in `folder`. A collective over all ranks; the first one reads.

    Warn of what the engine will keep of its own.

    Raises:
        TeraPipeConfigError: on every rank: contents that would be loaded wrongly or are missing, and the remedy.
        CheckpointError: on every rank: the file to check cannot be read.
    """
    is_universal = engine.load_universal_checkpoint()

    def look() -> str | None:
        if folder is None:  # there is nothing to load
            return None
        if options.custom_load_fn is not None:
            return "load_checkpoint(custom_load_fn=...): DeepSpeed's pipelines do not take it, leave it out"
        if not is_universal and (folder / "zero").is_dir():
            how = 'set "checkpoint": {"load_universal": true}, or load the one that it was made of'
            return f"{folder} is a universal checkpoint: {how}"
        problem = None if options.load_module_only else _problem_of_masters(engine, options.load_optimizer_states)
        # The file of the first rank tells the sizes of all; `problem_of_files` reports that it is missing
        path = folder / "mp_rank_00_model_states.pt"
        if problem is not None or not path.is_file():
            return problem
        saved = read_states(path)
        problem = _problem_of_model(engine.module, saved) or _problem_of_scheduler(engine.lr_scheduler, saved, options)
        if problem is not None or not is_universal:
            problem = problem or _problem_of_sizes(engine, saved, options.with_optimizer)
            return problem or _problem_of_form(engine, saved, path.parent, options)
        return _problem_of_universal(engine, path.parent / "zero" / "optimizer_state.pt")

    problem = from_rank_0(look, world)
    if problem is not None:
        raise TeraPipeConfigError(problem)
    if folder is not None:
        with_states, is_strict = options.with_optimizer, options.load_module_strict
        own = everywhere(lambda: problem_of_files(engine, folder, with_states, is_strict), world)
        refuse_everywhere(own, world)
    if is_universal:
        _warn_of_kept(engine, world)


def _warn_of_kept(engine: PipelineEngine, world: Any) -> None:
    """Warn of what a universal checkpoint lacks. A collective over all ranks."""

    def kept() -> list[str]:
        states = engine.module.state_dict(keep_vars=True)
        return [name for name, each in states.items() if isinstance(each, Tensor) and not each.requires_grad]

    everyone = {name for names in gather_results(kept, world) for name in names or ()}
    if everyone and torch_dist.get_rank() == 0:
        logger.warning(
            "a universal checkpoint holds neither frozen parameters nor buffers: %s keep their values from before "
            "load_checkpoint",
            in_short(sorted(everyone)),
        )


def _problem_of_universal(engine: PipelineEngine, path: Path) -> str | None:
    """Say what of a universal checkpoint DeepSpeed would pass over; `path` has what is common to all parameters."""
    stage = engine.zero_optimization_stage()
    if stage != 1:
        return (
            f"a universal checkpoint is loaded by ZeRO stage 1, not by stage {stage}, which would pass over its "
            'parameters. Set "zero_optimization": {"stage": 1}'
        )
    if not path.is_file():
        return f'{path.parent.parent} is no universal checkpoint: name one that is, or set "load_universal" to false'
    otherwise = 'load the checkpoint it was made of, with load_module_only=True and "load_universal": false'
    groups, inner = engine.optimizer.param_groups, engine.optimizer.optimizer
    ours, theirs = len(groups), len(read_states(path).get(constants.PARAM_GROUPS, ()))
    if ours != theirs:
        return (
            f"the optimizer that was saved has {theirs} groups of parameters, and this one has {ours}: DeepSpeed would "
            f"pass over the rest. Build the groups that were saved, or {otherwise}"
        )
    # an engine that has not trained has no states yet
    keys = {key for state in inner.state.values() for key in state} - {"step", "exp_avg", "exp_avg_sq"}
    lost = sorted(keys | {"max_exp_avg_sq" for group in groups if group.get("amsgrad")})
    return f"universal checkpoints lack {', '.join(lost)} of {type(inner).__name__}: {otherwise}" if lost else None


def warn_of_checkpoints(engine: PipelineEngine) -> None:
    """Warn before hours of training if checkpoints cannot be saved, or cannot be loaded whole."""
    problems = {"save": problem_of_local_storage(engine), "load": _problem_of_masters(engine, True)}
    for call, problem in problems.items():
        if problem is not None:
            logger.warning("%s_checkpoint will be refused: %s", call, problem)


@contextmanager
def keeping_own(engine: PipelineEngine, with_optimizer: bool) -> Iterator[None]:
    """Keep what DeepSpeed takes from a checkpoint although the config or the caller says otherwise.

    DeepSpeed takes the limit of `gradient_clipping`. It takes the loss scaler of another precision, such as a constant
    1.0. Of a universal checkpoint it takes everything, even if the caller leaves the optimizer states out.
    """
    optimizer, is_whole = engine.optimizer, engine.load_universal_checkpoint() and not with_optimizer
    scaler, limit = getattr(optimizer, "loss_scaler", None), getattr(optimizer, "clip_grad", None)
    owners = list[Any]()
    if is_whole:
        inner, lists = optimizer.optimizer, getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        mappings = (vars(each)["_hp_mapping"] for group in lists for each in group)
        owners = [inner.state, *inner.param_groups, *(vars(each) for each in mappings if each is not None)]
    # A load writes into the states of a parameter; the dicts of a mapping are the optimizer's own, and stay the same
    kept = [{key: dict(v) if isinstance(key, Tensor) else v for key, v in owner.items()} for owner in owners]
    try:
        yield
    finally:  # also after an error: the load that follows keeps what it finds
        for owner, own in zip(owners, kept, strict=True):
            owner.clear()
            owner.update(own)
        if limit is not None:
            optimizer.clip_grad = limit
        if scaler is not None and (is_whole or type(optimizer.loss_scaler) is not type(scaler)):
            optimizer.loss_scaler, optimizer.dynamic_loss_scale = scaler, scaler.dynamic


@contextmanager
def refusing_other_optimizer(optimizer: Any) -> Iterator[None]:
    """Raise TeraPipeConfigError if a load takes settings from the optimizer's groups, and brings others in their place.

    The next step would fail. A newer class of the same optimizer may have a setting more, and fills it by itself.
    """

    def groups() -> list[set[str]]:
        return [set(group) for group in getattr(optimizer, "param_groups", ())]

    before, first = set[str]().union(*groups()), None
    try:
        yield
    except KeyError as error:  # some optimizers read their settings as they load
        first = error
    wanted, found = before.intersection(getattr(optimizer, "defaults", ())), groups()
    lost = sorted(name for name in wanted if any(name not in group for group in found))
    if lost and set[str]().union(*found) - before:
        name = type(optimizer).__name__
        raise TeraPipeConfigError(
            f"the checkpoint was saved by another optimizer than {name}: its groups lack {', '.join(lost)}. Train on "
            f"with the optimizer that was saved, or begin {name}'s states anew. {PARAMETERS_ALONE}"
        ) from first
    if first is not None:
        raise first


def _problem_of_masters(engine: PipelineEngine, load_optimizer_states: bool) -> str | None:
    """Say which states DeepSpeed cannot load; or why the next step would undo the load, without the fp32 copies."""
    optimizer = engine.optimizer
    is_elastic = load_optimizer_states and getattr(optimizer, "elastic_checkpoint", False)
    if is_elastic and "step" not in optimizer.param_groups[0]:
        return (
            "zero_optimization.elastic_checkpoint: DeepSpeed cannot load the optimizer states that it saves of "
            f"{type(optimizer.optimizer).__name__}. {PARAMETERS_ALONE}, and remove the key for the next time"
        )
    if engine.zero_optimization() or not hasattr(optimizer, "refresh_fp32_params"):
        return None
    if isinstance(optimizer, BF16_Optimizer):
        return (
            "DeepSpeed cannot load optimizer states in bf16 without ZeRO: it saved the states of one replica. "
            f'{PARAMETERS_ALONE}, and set "zero_optimization": {{"stage": 1}} and "data_types": {{"grad_accum_dtype": '
            '"fp32"} for the next time'
        )
    if not load_optimizer_states:
        return (
            "load_optimizer_states=False leaves the fp32 copies of the parameters as they are, so that the next step "
            "undoes the load. Use load_module_only=True"
        )
    return None


def _problem_of_scheduler(scheduler: Any, saved: Mapping[str, Any], options: LoadOptions) -> str | None:
    """Say why DeepSpeed fails to load the state of a scheduler, or torch adds it to a scheduler that begins anew."""
    if scheduler is None or options.load_module_only or not options.load_lr_scheduler_states:
        return None
    state, own = saved.get("lr_scheduler"), scheduler.state_dict()
    if not own or (state and not own.keys().isdisjoint(state)):
        return None
    name, theirs = type(scheduler).__name__, "no state of a learning rate scheduler"
    if state:
        theirs = f"the state of another scheduler ({', '.join(state)})"
    return (
        f"the checkpoint has {theirs}, and this engine has a {name} with {', '.join(own)}. Use the "
        f"scheduler that was saved, or begin {name} anew with load_lr_scheduler_states=False"
    )


def _problem_of_sizes(engine: PipelineEngine, saved: Mapping[str, Any], with_optimizer: bool) -> str | None:
    dimensions = saved.get(constants.CHECKPOINT_PARALLEL_DIMS)
    if not isinstance(dimensions, Mapping):  # of another version of DeepSpeed
        return None
    saved_tensor, saved_stages = (dimensions.get(key) for key in (_TP_DEGREE, _PP_DEGREE))
    tensor, stages = engine.grid.get_slice_parallel_world_size(), engine.grid.get_pipe_parallel_world_size()
    alone = f"{PARAMETERS_ALONE}. Another way keeps the states. "
    # the ranks that ZeRO divides states over, which include the ranks of each slice
    replicas, saved_replicas = engine.seq_dp_world_size, saved.get("dp_world_size")
    splits, why = with_optimizer and engine.zero_optimization(), f"ZeRO splits optimizer states over them. {alone}"
    for matters, theirs, ours, who, reason in (
        (True, saved_tensor, tensor, "tensor-parallel ranks", "each holds another part of the parameters. "),
        (with_optimizer, saved_stages, stages, "stages", f"optimizer states are saved by stage. {alone}"),
        (splits, saved_replicas, replicas, "data-parallel replicas", why),
    ):
        if matters and theirs != ours:
            return f"the checkpoint was saved by {theirs} {who}, and {ours} would load it: {reason}{_CONVERT}"
    return None


def _problem_of_form(
    engine: PipelineEngine, saved: Mapping[str, Any], folder: Path, options: LoadOptions
) -> str | None:
    """Say why DeepSpeed cannot read the optimizer states that another precision or ZeRO stage has saved."""
    ds_config, is_bf16 = saved.get("ds_config"), engine.bfloat16_enabled()
    if not options.with_optimizer or engine.optimizer is None or not isinstance(ds_config, Mapping):
        return None
    if engine.zero_optimization():
        fits = (folder / f"{'bf16_' * is_bf16}zero_pp_rank_0_mp_rank_00_{OPTIMIZER_FILES}").is_file()
    else:
        state = saved.get("optimizer")
        state = state.get(ENVELOPE, state) if isinstance(state, Mapping) else {}
        key = "fp32_groups" if hasattr(engine.optimizer, "refresh_fp32_params") else "param_groups"
        fits = any(str(each).startswith(key) for each in state)
    ours = "bf16" if is_bf16 else "fp16" if engine.fp16_enabled() else "fp32", engine.zero_optimization_stage()
    written = DeepSpeedJson(dict(ds_config))
    theirs, stage = written.precision or "fp32", written.at("zero_optimization.stage") or 0
    if fits or (theirs, stage) == ours:  # in the latter case a file is missing, as DeepSpeed reports
        return None
    return (
        f"the checkpoint was saved in {theirs} with ZeRO stage {stage}, and this engine trains in {ours[0]} with ZeRO "
        f"stage {ours[1]}, whose optimizer states have another form. {PARAMETERS_ALONE}. Another way keeps the states. "
        f"{_CONVERT}"
    )


def _problem_of_model(module: Any, saved: Mapping[str, Any]) -> str | None:
    """Compare sizes that a module saves beside its parameters: shapes do not tell heads from head size."""
    both = saved.get(constants.UNIVERSAL_CHECKPOINT_INFO), _description(module)
    theirs, ours = (info.get(MODEL_SIZES) if isinstance(info, Mapping) else None for info in both)
    if theirs is None or ours is None:
        return None
    different = [
        f"{name}={theirs.get(name)} there and {ours.get(name)} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    what = f"the checkpoint is of another model: {', '.join(different)}. Build the one that was saved"
    return what if different else None


def _description(module: Any) -> Any:
    """Return the description of parameters that a module has for DeepSpeed's converter: a dict, a method, or None."""
    info = getattr(module, constants.UNIVERSAL_CHECKPOINT_INFO, None)
    return info() if callable(info) else info


def with_description(engine: PipelineEngine, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add to `client_state` the description of its parameters that a method of the module returns.

    DeepSpeed (0.19.8) takes `universal_checkpoint_info` for a dict and would save the method, with the module and its
    process groups. Megatron-DeepSpeed, where it is a method, passes the method's dict as the client's state.
    """
    state, name = dict(client_state or {}), constants.UNIVERSAL_CHECKPOINT_INFO
    own = {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")}
    taken = [key for key in state if key in _STATES or (key in own and state[key] != own[key])]
    if taken:
        raise CheckpointError(
            f"client_state has {in_short(taken)}, under which DeepSpeed keeps states of its own: a load would take "
            "yours for them, or lose yours. Give your values other names, and leave out what load_checkpoint has "
            "returned beside them"
        )
    if name in state or not callable(getattr(engine.module, name, None)):
        return state
    return {**state, name: _description(engine.module)}
