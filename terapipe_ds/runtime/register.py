"""Make `deepspeed.initialize` build a `TeraPipeEngine` if the config enables it.

`deepspeed.initialize` looks up its pipeline engines as globals of the package `deepspeed` at each call. After
`register`, these names are bound to stand-ins. Their metaclass sends the *call* to the right engine class, and
`isinstance`/`issubclass` to DeepSpeed's own class, so that existing checks and subclasses keep working.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds import compat
from terapipe_ds.compat import builds
from terapipe_ds.compat.unread_section import guard_unregistered, guarded, is_enabled
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.conflicts import problem_of_auto, problem_of_quotes
from terapipe_ds.runtime.agreement import everywhere, require_equal_configs

_registered = False
_verify_only = False
_pipeline_class: Any = None  # bound to deepspeed.PipelineEngine before `register`: DeepSpeed's, or a program's own


def _section(raw: Mapping[str, Any]) -> TeraPipeConfig:
    """Validate the section of a DeepSpeed config, after checking that all ranks have the same one."""
    require_equal_configs(raw)
    read = functools.partial(TeraPipeConfig.from_deepspeed, dict(raw))  # files, too; all ranks must agree
    return everywhere(read) if torch_dist.is_initialized() and is_enabled(raw) else read()


def _is_enabled(config_class: Any = None, **_: Any) -> bool:
    """Read the config that an engine is built with: DeepSpeed keeps unknown sections in `_param_dict`."""
    return _section(getattr(config_class, "_param_dict", None) or {}).enabled


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """Say in plain words that a rank has ended: no watch-dog runs yet, and the network names only addresses."""
    from terapipe_ds.runtime.failures.last_words import PipelineAborted
    from terapipe_ds.runtime.failures.watchdog import is_lost_connection

    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise PipelineAborted(
            "lost the connection to another rank in deepspeed.initialize(): that rank, or the launcher that serves the "
            "store of the job, has ended. Its own output and exit code tell why: make it run, and start the job again"
        ) from error


@_lost_ranks_named()
def _build_pipeline_engine(*args: Any, **kwargs: Any) -> Any:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    is_enabled_here = _is_enabled(**kwargs)
    if is_enabled_here and _pipeline_class is PipelineEngine:
        from terapipe_ds.runtime.engine.engine import TeraPipeEngine

        return TeraPipeEngine(*args, verify_only=_verify_only, **kwargs)
    if _verify_only and not is_enabled_here:
        fix = 'set "terapipe": {"enabled": true} there'
        raise TeraPipeConfigError(f"--verify: the DeepSpeed config has no enabled section, so nothing is sliced; {fix}")
    return _pipeline_class(*args, **kwargs)  # one that does not read the section refuses it itself, if it is enabled


def _build_dualpipev_engine(*args: Any, **kwargs: Any) -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

    if _is_enabled(**kwargs):
        raise TeraPipeConfigError(
            "terapipe.enabled: true cannot be combined with a DualPipeVModule: DualPipeV brings its own schedule and "
            "runs two stages on each rank. Build the model as a PipelineModule, or set terapipe.enabled to false."
        )
    return DualPipeVEngine(*args, **kwargs)


def _stand_in(stock: type, build: Any) -> type:
    """Make a class that looks like `stock` to isinstance and issubclass, and whose call is `build`."""

    class Dispatch(type(stock)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is stand_in:
                return build(*args, **kwargs)
            return super().__call__(*args, **kwargs)  # a user's own subclass: build that

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    stand_in: type = Dispatch(stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__})
    return stand_in


@functools.cache
def _names() -> tuple[tuple[Any, str, tuple[Any, Any]], ...]:
    """Return each name that is bound: its owner, the name, and (DeepSpeed's value, ours).

    Our `PipelineModule._partition_layers` records the partition method, by which layers are cut anew if stages hold
    several parts. Our `_index_tied_modules` makes the groups of tied layers for each sequence rank. Our
    `DeepSpeedConfig._configure_train_batch_size` applies a strategy's batch sizes before DeepSpeed computes the sizes
    that the config leaves open; `_initialize_params` sees the values that Trainer would fill in. Our
    `PipelineParallelGrid` compares the grids of ranks before DeepSpeed makes groups.
    `DeepSpeedEngine.__init__` sees engines that read no section. Our `build_shm_op` compiles nothing when a script on a
    CPU starts, and our `FileBaton.wait` names the lock of a build that was killed. Call `compat.require_hooks` first.
    """
    import deepspeed  # not at the top: compat reports problems with it
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from torch.utils.file_baton import FileBaton

    from terapipe_ds.compat.tied_groups import index_tied_modules
    from terapipe_ds.runtime.layout.layers_to_parts import PARTITION_METHOD
    from terapipe_ds.runtime.layout.same_model import require_equal_grids
    from terapipe_ds.runtime.layout.topology import take_batch_sizes

    stock_partition, stock_sizes = PipelineModule._partition_layers, DeepSpeedConfig._configure_train_batch_size
    stock_tied = PipelineModule._index_tied_modules
    guard_unregistered()  # stays after `unregister`
    stock_params = DeepSpeedConfig._initialize_params
    comm = importlib.import_module("deepspeed.comm.torch")  # in deepspeed.comm this name is torch itself
    stock_shm = comm.build_shm_op
    pipe_module = importlib.import_module("deepspeed.runtime.pipe.module")
    stock_grid = pipe_module.PipelineParallelGrid

    def grid(topology: Any, process_group: Any) -> Any:
        if torch_dist.get_world_size() > 1:
            require_equal_grids(topology, process_group)
        return stock_grid(topology=topology, process_group=process_group)

    @functools.wraps(stock_shm)
    def build_shm_op() -> Any:
        return stock_shm() if builds.builds_shm_comm() else None

    @functools.wraps(stock_partition)
    def partition_layers(self: Any, method: str = "uniform") -> Any:
        setattr(self, PARTITION_METHOD, method)
        return stock_partition(self, method)

    @functools.wraps(stock_sizes)
    def configure_train_batch_size(self: Any) -> Any:
        raw = self._param_dict
        if isinstance(section := raw.get("terapipe"), Mapping) and section.get("strategy") is not None:
            take_batch_sizes(_section(raw), self)
        return stock_sizes(self)

    @functools.wraps(stock_params)
    def initialize_params(self: Any, raw: Any) -> Any:
        if is_enabled(raw) and (problem := problem_of_auto(raw) or problem_of_quotes(raw)):
            raise TeraPipeConfigError(problem)
        return stock_params(self, raw)

    return (
        (deepspeed, "PipelineEngine", (PipelineEngine, _stand_in(PipelineEngine, _build_pipeline_engine))),
        (deepspeed, "DualPipeVEngine", (DualPipeVEngine, _stand_in(DualPipeVEngine, _build_dualpipev_engine))),
        (pipe_module, "PipelineParallelGrid", (stock_grid, grid)),
        (PipelineModule, "_partition_layers", (stock_partition, partition_layers)),
        (PipelineModule, "_index_tied_modules", (stock_tied, functools.wraps(stock_tied)(index_tied_modules))),
        (DeepSpeedConfig, "_initialize_params", (stock_params, initialize_params)),
        (DeepSpeedConfig, "_configure_train_batch_size", (stock_sizes, configure_train_batch_size)),
        (DeepSpeedEngine, "__init__", (DeepSpeedEngine.__init__, guarded(DeepSpeedEngine.__init__, always=True))),
        (comm, "build_shm_op", (stock_shm, build_shm_op)),
        (FileBaton, "wait", (FileBaton.wait, builds.wait_for_build)),
    )


def _bind(ours: bool) -> None:
    """Bind DeepSpeed's names to our stand-ins, or to its own classes again."""
    global _registered, _pipeline_class
    import deepspeed

    if ours:
        _pipeline_class = deepspeed.PipelineEngine
    for owner, name, stock_and_ours in _names():
        setattr(owner, name, stock_and_ours[ours])
    if not ours:
        deepspeed.PipelineEngine = _pipeline_class
    _registered = ours


def register(verify_only: bool = False) -> None:
    """Let `deepspeed.initialize` return a `TeraPipeEngine` for configs with an enabled `terapipe` section.

    The model must be a `PipelineModule`; in every other case `deepspeed.initialize` returns DeepSpeed's own engine.
    Another call changes only `verify_only`; `unregister` undoes it. With `verify_only` the first `train_batch` compares
    slices with whole sequences, prints the report and ends the process with 0, or with 1 after a difference.

    Raises:
        terapipe_ds.compat.CompatError: the installed DeepSpeed lacks a hook that the engine needs.
    """
    global _verify_only
    _verify_only = verify_only
    if not _registered:
        compat.require_hooks()
        compat.warn_about_versions()
        _bind(ours=True)


def unregister() -> None:
    """Undo `register`. Existing engines keep working."""
    global _verify_only
    _verify_only = False
    if _registered:
        _bind(ours=False)


def is_registered() -> bool:
    """Return True between `register` and `unregister`."""
    return _registered


def lay_out(module: Any, ds_config: dict[str, Any] | str) -> None:
    """Move the layers of a `PipelineModule` to the stages that hold them under `ds_config`. Every rank must call it.

    `deepspeed.initialize` does this itself. Call this function before, right after the module is built, if you make
    parameter groups or an optimizer from the module's parameters and stages hold several parts. `ds_config` may be the
    path of a JSON file. If the module cannot have the layout, every rank raises TeraPipeConfigError. A stage where
    nothing is trained gets a number, which belongs to no layer, since optimizers accept no empty list.
    """
    from terapipe_ds.files.bounded import read_bytes
    from terapipe_ds.files.strict_json import parse_json
    from terapipe_ds.runtime.engine.trained_parameters import never_none_at_all
    from terapipe_ds.runtime.layout.layers_to_parts import lay_out as lay_out_parts
    from terapipe_ds.runtime.layout.layout import layout_of
    from terapipe_ds.runtime.layout.same_model import refuse_other_grid, require_equal_models

    raw = everywhere(lambda: dict(ds_config) if isinstance(ds_config, Mapping) else parse_json(read_bytes(ds_config)))
    config = _section(raw)
    if config.enabled:
        require_equal_models(module)
        everywhere(lambda: refuse_other_grid(module, config))
        lay_out_parts(module, layout_of(config, module))
        never_none_at_all(module, None)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize` with the plugin registered for this one call: same arguments, same result."""
    was_registered = _registered
    register(_verify_only)
    import deepspeed

    try:
        return deepspeed.initialize(*args, **kwargs)
    finally:
        if not was_registered:
            unregister()
