"""Find the checkpoint to load and read its files: never an incomplete one, never another one without a note."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.messages import in_short, logger, show_key, show_value
from terapipe_ds.runtime.agreement import from_rank_0, gather_results
from terapipe_ds.runtime.checkpoints.disks import require_shared, share_of_files
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, names_in
from terapipe_ds.runtime.checkpoints.save import LATEST, CheckpointPaths, FirstError
from terapipe_ds.runtime.checkpoints.strict_pickles import PickleRefused, read_states, read_strictly
from terapipe_ds.runtime.layout.parted_module import each_part
from terapipe_ds.runtime.log import first_line

_LAYER_FILE = re.compile(r"layer_(\d+)-.*model_states\.pt")
Damaged = Mapping[str, str]  # damage in the contents of checkpoints, by `read_as`


@dataclass(frozen=True)
class ChosenCheckpoint:
    """Name a checkpoint to load."""

    tag: str | None  # as it was saved; None: there is none, and DeepSpeed reports this
    read_as: str | None  # the tag by which DeepSpeed finds its files; not `tag` if a kill came before they were named
    manifest: Manifest | None = None  # None for checkpoints of DeepSpeed's own engine, and of its converter
    note: str | None = None  # an unexpected fact about the choice
    pickled: str | None = None  # a file that can only be read as a program, if this is allowed


def find_checkpoint(
    engine: PipelineEngine, world: Any, load_dir: str, tag: str | None, with_optimizer: bool, allow_pickle: bool
) -> ChosenCheckpoint:
    """Choose a checkpoint whose files are intact. A collective over all ranks, which share the files to read.

    Raises:
        CheckpointError: on every rank: the requested checkpoint is not whole (the error names the files that are
            missing or damaged), or a file would run code, and `allow_pickle` does not permit it.
    """
    folder, tag = Path(load_dir), None if tag is None else str(tag)
    is_universal, damaged = bool(engine.load_universal_checkpoint()), dict[str, str]()
    share = 0, 1

    def choose() -> ChosenCheckpoint:
        try:
            if not is_universal:
                return choose_checkpoint(folder, tag, with_optimizer, damaged)
            latest = folder / "latest_universal"
            named = _read_tag(latest) if tag is None and latest.is_file() else tag
            return ChosenCheckpoint(named, named)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error

    while True:
        # The first rank compares sizes. Then all ranks compare checksums and contents
        chosen = from_rank_0(choose, world)
        if chosen.read_as is not None:
            require_shared(folder / chosen.read_as, world)
            share = share_of_files(folder / chosen.read_as, world)
        looked = gather_results(partial(look_at_contents, folder, chosen, with_optimizer, allow_pickle, *share), world)
        damages = {rank: each[0] for rank, each in enumerate(looked) if each is not None and each[0] is not None}
        has_copies = share[1] < torch_dist.get_world_size()  # then the rank tells whose copy it is
        problem = in_short([f"on rank {rank}: {one}" if has_copies else one for rank, one in damages.items()])
        if problem is None:
            break
        # Another one takes its place only if the user has not named this one
        if tag is not None or is_universal:
            raise CheckpointError(_not_whole(folder / str(chosen.read_as), problem))
        damaged[str(chosen.read_as)] = problem
    chosen = replace(chosen, pickled=next((path for _, path in filter(None, looked) if path is not None), None))
    has_checksums = chosen.manifest is None or bool(chosen.manifest.checksums)
    for note, is_needed in (
        (chosen.note, chosen.note),
        (f"{chosen.tag} has no checksums, as older versions saved it: sizes were compared alone", not has_checksums),
        (f"{chosen.pickled} is loaded as a program, which allow_pickle permits", chosen.pickled),
    ):
        if is_needed and engine.global_rank == 0:
            logger.warning("%s", note)
    return chosen


def look_at_contents(
    folder: Path, chosen: ChosenCheckpoint, with_optimizer: bool, allow_pickle: bool, index: int = 0, count: int = 1
) -> tuple[str | None, str | None]:
    """Compare the checksums of every `count`-th file, and read it strictly: an unreadable file is damaged.

    Return the damage, and a file that can only be read as a program.

    Raises:
        PickleRefused: a file can only be read as a program, and this is not allowed.
    """
    if chosen.read_as is None:
        return None, None
    place, manifest, damage, pickled = folder / chosen.read_as, chosen.manifest, list[str](), None
    for name in names_in(place, manifest, with_optimizer)[index::count]:
        try:
            if manifest is not None and (problem := manifest.damage(place, name)) is not None:
                damage.append(problem)
            else:
                read_strictly(place / name)
        except PickleRefused:
            if not allow_pickle:
                raise
            pickled = str(place / name)
        except (CheckpointError, OSError) as error:
            damage.append(f"{show_key(name, 4096)} cannot be read ({first_line(error.__cause__ or error)})")
    return in_short(damage), pickled


def _read_tag(latest: Path) -> str:
    """Return the tag that a file names; raise CheckpointError if it names none."""
    try:
        tag = read_bytes(latest).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{latest} cannot be read ({error})") from None
    if not tag:
        raise CheckpointError(f"{latest} is empty")
    if not tag.isprintable() or len(tag) > 4096:
        raise CheckpointError(f"{latest} names no tag: {show_value(tag)}")
    return tag


def choose_checkpoint(
    folder: Path, tag: str | None, with_optimizer: bool = True, damaged: Damaged = MappingProxyType({})
) -> ChosenCheckpoint:
    """Choose the checkpoint `tag`, or the one that `latest` names, or the newest whole one if that one is not whole.

    `latest` counts even if it names an older one: people go back in this way. Nothing changes in `folder`.

    Raises:
        CheckpointError: the requested checkpoint is not whole (the error names the missing files), or none is whole.
    """
    if tag is not None:
        chosen = _named(CheckpointPaths(folder, tag), with_optimizer, damaged)
        if not (folder / (chosen.read_as or "")).exists():  # DeepSpeed has an assertion without a text
            raise CheckpointError(f"{folder} has no checkpoint {show_value(tag)}: give the tag of another one")
        return chosen
    # `latest` counts, whatever else is there. Only if it leads nowhere, search for another one
    latest = folder / LATEST
    try:
        if not latest.is_file():
            raise CheckpointError(f"{latest} is missing")
        name = _read_tag(latest)
        chosen = _named(CheckpointPaths(folder, name), with_optimizer, damaged)
        if not (folder / (chosen.read_as or "")).exists():
            raise CheckpointError(f"{latest} names {name}, which does not exist")
        return chosen
    except (CheckpointError, OSError) as error:
        newest = _newest(folder, damaged)
        if newest is not None:
            return replace(newest, note=f"{error}: {newest.tag} is loaded, the newest whole checkpoint there")
        if not latest.is_file():
            return ChosenCheckpoint(None, None)
        raise CheckpointError(f"{error}. There is no other whole checkpoint of this engine in {folder}") from None


def _not_whole(path: Path, problem: str) -> str:
    return (
        f"the checkpoint {path} is not whole: {problem}. Name a whole one; where another program has saved it again "
        f"since, delete its {MANIFEST}"
    )


def _named(paths: CheckpointPaths, with_optimizer: bool, damaged: Damaged) -> ChosenCheckpoint:
    """Choose the checkpoint of a tag, or the folder that a killed save has left; refuse one that is not whole."""
    if paths.final.exists():
        manifest = Manifest.read(paths.final)
        problem = None if manifest is None else manifest.problem(paths.final, with_optimizer)
        problem = problem or damaged.get(paths.tag)
        if problem is not None:
            raise CheckpointError(_not_whole(paths.final, problem))
        return ChosenCheckpoint(paths.tag, paths.tag, manifest)
    # A kill came between the last two moves of a save: the new one may be whole, the older one has its name set aside
    for path in (each for each in (*paths.all_saving(), paths.replaced) if paths.tag_of(each) not in damaged):
        manifest = Manifest.read(path)
        is_stock = manifest is None and path == paths.replaced and path.exists()  # DeepSpeed's own engine has saved it
        if is_stock or (manifest is not None and manifest.problem(path, with_optimizer) is None):
            note = f"a save of {paths.final} was killed before it had its name: {path} is loaded"
            return ChosenCheckpoint(paths.tag, paths.tag_of(path), manifest, note)
    if paths.all_saving():
        raise CheckpointError(f"the save of {paths.final} was killed before all files were written; load another one")
    return ChosenCheckpoint(paths.tag, paths.tag)


def _newest(folder: Path, damaged: Damaged) -> ChosenCheckpoint | None:
    whole = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(CheckpointError, OSError):
            manifest = None if path.name in damaged else Manifest.read(path)
            if manifest is not None and manifest.is_latest and manifest.problem(path) is None:
                age = (manifest.global_steps, not path.name.startswith("."), (path / MANIFEST).stat().st_mtime)
                whole[age] = ChosenCheckpoint(manifest.tag, path.name, manifest)
    return whole[max(whole)] if whole else None


def problem_of_files(engine: PipelineEngine, folder: Path, with_optimizer: bool, is_strict: bool) -> str | None:
    """Say which file of the checkpoint in `folder` this rank would miss, or that the checkpoint has further layers.

    DeepSpeed (0.19.8) fails in assertions, most without a text, or on keys, when some layers are loaded already.
    """
    module, is_universal, where = engine.module, engine.load_universal_checkpoint(), (str(folder.parent), folder.name)
    needed = [Path(engine._get_ckpt_name(*where))]
    if is_universal or not with_optimizer:  # any rank's file tells the counters
        needed = [*map(Path, search_in(engine._get_all_ckpt_names, *where))] or needed  # noqa: SLF001 - its own search
    elif engine.zero_optimization():
        needed.append(Path(engine._get_zero_ckpt_name(*where)))  # noqa: SLF001 - its own name
    lost = [path.name for path in needed if not path.is_file()]
    if lost:
        return f"{folder} lacks {in_short(lost)}: load a checkpoint that is whole"
    if is_universal or engine.has_moe_layers or isinstance(read_states(needed[0]).get("module"), Mapping):
        return None  # the parameters are elsewhere than in files of layers
    for index, layer in ((index, layer) for _ in each_part(module) for index, layer in enumerate(module.forward_funcs)):
        if hasattr(layer, "load_state_dict") and not search_in(module.ckpt_layer_path_list, folder, index):
            return (
                f"{folder} has no file of layer {module._local_start + index} ({type(layer).__name__}): it was saved "
                "with fewer layers, or is not whole. Build the model that was saved, or load another checkpoint"
            )
    saved = [int(each[1]) + 1 for path in folder.iterdir() if (each := _LAYER_FILE.match(path.name))]
    if is_strict and max(saved, default=0) > len(module._layer_specs):
        return (
            f"{folder} has files of {max(saved)} layers, and this model has {len(module._layer_specs)}. Build the "
            "model that was saved, or load another checkpoint"
        )
    return None


# -- a failure of one rank ---------------------------------------------------------------------------------------------


def load_everywhere(engine: PipelineEngine, world: Any, load: Callable[[], Any]) -> Any:
    """Return the result of DeepSpeed's method `load` on this rank; all ranks raise an error of one rank.

    The ranks agree before they send tied weights, before they gather the weights of a universal checkpoint, and at the
    end: a rank whose load has failed agrees at the end while the others agree there. A collective over all ranks.
    """
    first, is_told = FirstError(), False

    def agree() -> None:
        nonlocal is_told
        is_told = True
        gather_results(first.raise_first, world)
        is_told = False

    def agree_then(send: Callable[[], None]) -> None:
        agree()
        send()

    with ExitStack() as stack:
        for owner, name in ((engine.module, "_synchronize_tied_weights"), (engine.optimizer, "update_lp_params")):
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, partial(agree_then, getattr(owner, name))))
        # DeepSpeed reads [ in a folder's name as a pattern, and finds no file, or files of another folder
        for owner, name in ((engine, "_get_all_ckpt_names"), (engine.module, "ckpt_layer_path_list")):
            stack.enter_context(replaced(owner, name, partial(search_in, getattr(owner, name))))
        loaded = first.keeping(load)()
    if is_told:
        first.raise_first()
    agree()
    return loaded


def search_in(search: Callable[..., list[str]], *where: Any) -> list[str]:
    """Return the files that DeepSpeed's method finds in this very folder; a number in `where` is a layer's."""
    return search(*(each if isinstance(each, int) else glob.escape(str(each)) for each in where))
