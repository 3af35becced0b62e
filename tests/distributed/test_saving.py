"""Test the engine's additions to a checkpoint, its reports on loaded or unreadable ones, and described modules."""

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.checkpoint.constants import CHECKPOINT_PARALLEL_DIMS
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import distributed
from torch.utils._pytree import tree_map_only

from terapipe_ds.runtime.checkpoints.manifest import MANIFEST
from tests.distributed.checkpoint_states import states_of
from tests.distributed.engines import (
    LENGTH,
    batches,
    engine_of,
    error_of,
    gpt_layers,
    logged,
    raised_by,
    train,
    unchecked,
)
from tests.distributed.harness import rank_pool

OURS = unchecked(slices=3)
OTHER = unchecked(slices=[5, 10, 7, 1], schedule="terapipe")


def job_save(folder: str) -> dict[str, Any]:
    """Make the usual save, one that is not to be the latest, and three that some rank cannot make."""
    with engine_of(gpt_layers(), OURS) as engine:
        train(engine, batches(1))
        last_layer = engine.module.forward_funcs[-1].requires_grad_(False)
        engine.save_checkpoint(folder, client_state={"epoch": 7})
        engine.save_checkpoint(folder, tag="aside", save_latest=False, exclude_frozen_parameters=True)
        last_layer.requires_grad_(True)
        Path(folder, "file").touch()
        failed = {
            "tags": raised_by(lambda: engine.save_checkpoint(folder, tag=f"of rank {distributed.get_rank()}")),
            "folder": raised_by(lambda: engine.save_checkpoint(str(Path(folder, "file", "below")))),
        }
        reserved = {CHECKPOINT_PARALLEL_DIMS: 1}
        failed["key"] = raised_by(lambda: engine.save_checkpoint(folder, client_state=reserved))
        with files_end_at(1000 if distributed.get_rank() == 1 else None):
            failed["disk"] = raised_by(lambda: engine.save_checkpoint(folder))
        goes_on = train(engine, batches(1, first_seed=900)).returned
    return {"failed": failed, "goes_on": goes_on}


@contextlib.contextmanager
def files_end_at(size: int | None) -> Iterator[None]:
    """Let the system refuse to write beyond ``size`` bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def job_load(folder: str, spoilt: bool) -> dict[str, Any]:
    with logged() as lines, engine_of(gpt_layers(), OTHER if spoilt else OURS) as engine:
        named = raised_by(lambda: engine.load_checkpoint(folder, tag="aside")) if spoilt else ("", "")
        path, state = engine.load_checkpoint(folder)
        returned = train(engine, batches(1, first_seed=900)).returned
        said = [line for line in lines if "resumed" in line or "loaded" in line]
        return {"named": named, "path": path, "epoch": state["epoch"], "returned": returned, "said": said}


OF_ONE_RANK: dict[str, tuple[Any, Any]] = {  # of `load_checkpoint`; a name with a blank is of `save_checkpoint`
    "tag": ("first", "second"), "load_module_strict": (True, False), "load_optimizer_states": (True, False),
    "load_lr_scheduler_states": (True, False), "load_module_only": (False, True), "custom_load_fn": (None, print),
    "exclude_frozen_parameters ": (False, True),
}  # fmt: skip


def job_one_rank(folder: str) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]], list[Any]]:
    """Return the errors of arguments of rank 1 alone; and of loads where a file in its copy is damaged, with the tags
    that these loads take without a tag.
    """
    rank, arguments, damaged, taken = distributed.get_rank(), {}, {}, []
    mine = f"{folder}/{rank}"  # as on machines with disks of their own
    with engine_of(gpt_layers(), unchecked()) as engine:
        for tag in ("first", "second"):
            train(engine, batches(1))
            engine.save_checkpoint(f"{folder}/shared", tag=tag)
        for name, values in OF_ONE_RANK.items():
            passed = {"tag": "second"} | {name.strip(): values[rank]}
            call = engine.save_checkpoint if name.endswith(" ") else engine.load_checkpoint
            arguments[name] = raised_by(lambda: call(f"{folder}/shared", **passed))  # noqa: B023
        shutil.copytree(f"{folder}/shared", mine)
        for path in sorted(Path(mine, "second").glob("*.pt")):
            content = path.read_bytes()
            if rank == 1:
                path.write_bytes(content[: len(content) // 2] + b"another" + content[len(content) // 2 + 7 :])
            distributed.barrier()
            damaged[path.name] = raised_by(lambda: engine.load_checkpoint(mine, tag="second"))
            taken.append(Path(engine.load_checkpoint(mine)[0]).parent.name)
            path.write_bytes(content)
    return arguments, damaged, taken


def test_what_one_rank_passes_or_has_a_damaged_copy_of_is_an_error_on_all(tmp_path: Path) -> None:
    """Ranks would load other parts than one another, or numbers that no checksum has seen."""
    for arguments, damaged, taken in rank_pool(2).run(job_one_rank, folder=str(tmp_path), timeout_s=60):
        for name, (kind, text) in arguments.items():
            assert kind == "CheckpointError" and f" on {name.strip()}: ranks [0]" in text, (name, text)
        assert len(damaged) >= 9 and set(taken) == {"first"}
        for name, (kind, text) in damaged.items():
            assert kind == "CheckpointError" and f"on rank 1: {name} is damaged" in text, (name, text)


def test_a_checkpoint_says_what_it_is_made_of_and_how_it_was_trained(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = rank_pool(2).run(job_save, folder=str(folder))
    for failed in (rank["failed"] for rank in saved):
        assert {kind for kind, _ in failed.values()} == {"CheckpointError"}
        assert "on tag: ranks [0]: 'of rank 0'; ranks [1]: 'of rank 1'; give all the same" in failed["tags"][1]
        assert "rank 0 cannot save the checkpoint: NotADirectoryError" in failed["folder"][1]
        assert "rank 0 cannot save the checkpoint: KeyError: 'client_state contains reserved" in failed["key"][1]
        assert "rank 1 cannot save the checkpoint: " in failed["disk"][1]
    assert sorted(path.name for path in folder.iterdir()) == ["aside", "file", "global_step1", "latest"]
    assert (folder / "latest").read_text() == "global_step1"
    for tag in ("aside", "global_step1"):
        manifest = json.loads((folder / tag / MANIFEST).read_text())
        assert manifest["checksums"].keys() == manifest["files"].keys() and len(manifest["job"]) == 8
        assert manifest["files"] == {path.name: path.stat().st_size for path in (folder / tag).glob("*.pt")}
        assert len(manifest["files"]) >= 9  # seven layers and a file of each stage
        assert (manifest["tag"], manifest["global_steps"], manifest["is_latest"]) == (tag, 1, tag != "aside")
        assert manifest["training"]["plans"] == {str(LENGTH): {"slices": [8, 8, 7], "schedule": "seq1f1b"}}
        assert manifest["training"]["config"] == {"schedule": "seq1f1b", "schedule_options": {}, "slices": 3}
        assert manifest["training"]["profile"] is None
    assert len(of_last_layer(folder / "global_step1")) > len(of_last_layer(folder / "aside"))

    same = rank_pool(2).run(job_load, folder=str(folder), spoilt=False)
    for before, after in zip(saved, same, strict=True):
        assert after["returned"] == before["goes_on"]
        assert (after["epoch"], after["said"]) == (7, [])

    spoil(folder)
    other = rank_pool(2).run(job_load, folder=str(folder), spoilt=True)
    for before, after in zip(saved, other, strict=True):
        assert "layer_03-model_states.pt has" in after["named"][1]
        assert "global_step1" in after["path"]
        assert abs(after["returned"][0] - before["goes_on"][0]) < 1e-6
    assert other[1]["said"] == []
    chosen, planned = other[0]["said"]
    assert "aside is not whole" in chosen.replace(str(folder) + "/", "")
    assert "global_step1 is loaded, the newest whole checkpoint there" in chosen
    assert "resumed from global_step1 under another plan for 23 tokens: slices [8, 8, 7] by seq1f1b before" in planned
    assert "[5, 10, 7, 1] by terapipe now" in planned


def of_last_layer(folder: Path) -> dict[str, Any]:
    return torch.load(max(folder.glob("layer_*.pt")), weights_only=False)


def spoil(folder: Path) -> None:
    """Cut a file of the latest checkpoint short, as an interrupted copy would."""
    (folder / "latest").write_text("aside")
    path = folder / "aside" / "layer_03-model_states.pt"
    path.write_bytes(path.read_bytes()[:-1])


# -- modules that describe themselves by a method ----------------------------------------------------------------


class ByMethod(PipelineModule):
    """Describe itself as Megatron-DeepSpeed's `GPTModelPipe` does: DeepSpeed knows this name for a dict."""

    heads = 4

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return {"universal_checkpoint_version": 0.2, "terapipe_model_sizes": {"heads": self.heads}}


class OtherHeads(ByMethod):
    heads = 2


class Broken(ByMethod):
    def universal_checkpoint_info(self) -> dict[str, Any]:
        raise LookupError("no tokenizer was built")


def job_save_described(folder: str, module_class: type[PipelineModule], given: bool) -> list[float]:
    """Return the losses of the following steps."""
    with engine_of(gpt_layers(), unchecked(), module_class=module_class) as engine:
        train(engine, batches(2))
        client = {"universal_checkpoint_info": engine.module.universal_checkpoint_info()} if given else {}
        engine.save_checkpoint(folder, client_state={"epoch": 7, **client})
        return train(engine, batches(2, first_seed=900)).returned


def job_load_described(folder: str, module_class: type[PipelineModule], ours: bool = True) -> tuple[Any, list[float]]:
    with engine_of(gpt_layers(), unchecked() if ours else None, module_class=module_class) as engine:
        path, client = engine.load_checkpoint(folder)
        return (path is not None, client["epoch"]), train(engine, batches(2, first_seed=900)).returned


def job_refused(folder: str, module_class: type[PipelineModule]) -> tuple[str, str]:
    with engine_of(gpt_layers(), unchecked(), module_class=module_class) as engine:
        return raised_by(lambda: engine.load_checkpoint(folder))


def job_stock_save(folder: str) -> tuple[str, str]:
    with engine_of(gpt_layers(), None, module_class=ByMethod) as engine:
        return raised_by(lambda: engine.save_checkpoint(folder))


@pytest.mark.parametrize("given", [True, False], ids=["by the client as well", "by the method alone"])
def test_training_goes_on_where_a_method_describes_the_module(given: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    goes_on = rank_pool(2).run(job_save_described, folder=folder, module_class=ByMethod, given=given)
    ours = rank_pool(2).run(job_load_described, folder=folder, module_class=ByMethod)
    assert ours == [((True, 7), losses) for losses in goes_on]
    stock = rank_pool(2).run(job_load_described, folder=folder, module_class=ByMethod, ours=False)
    assert stock == [((True, 7), pytest.approx(losses, rel=1e-6)) for losses in goes_on]
    if given:
        for kind, text in rank_pool(2).run(job_refused, folder=folder, module_class=Broken):
            assert (kind, text) == ("LookupError", "no tokenizer was built")
        return
    for kind, text in rank_pool(2).run(job_refused, folder=folder, module_class=OtherHeads):
        assert kind == "TeraPipeConfigError" and "heads=4 there and 2 here" in text
    for _, text in rank_pool(2).run(job_stock_save, folder=str(tmp_path / "stock")):
        assert "local object" in text, "else ours need not put what the method gives in its place"


# -- damage, and files that are programs ---------------------------------------------------------------------------


def job_save_twice(folder: str, client: Any) -> list[str]:
    with logged() as lines, engine_of(gpt_layers(), OURS) as engine:
        for tag in ("first", "second"):
            train(engine, batches(1))
            engine.save_checkpoint(folder, tag=tag, client_state={"args": client})
    return [line for line in lines if "allow_pickle" in line]


def job_load_spoilt(folder: str, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the result of a load of the second checkpoint, and then of a load that may choose."""
    with logged() as lines, engine_of(gpt_layers(), unchecked(checkpoints={"allow_pickle": allow_pickle})) as engine:
        train(engine, batches(1, first_seed=400))
        before = states_of(engine)
        second = raised_by(lambda: engine.load_checkpoint(folder, tag="second"))
        changed = error_of(states_of(engine), before)
        engine.train_batch(iter(batches(1)[0]))
        chosen = raised_by(lambda: engine.load_checkpoint(folder))
        said = [line for line in lines if "is loaded" in line]
        return {"second": second, "changed": changed, "chosen": chosen, "steps": engine.global_steps, "said": said}


def test_a_client_state_of_other_types_is_told_when_it_is_saved_and_needs_permission(tmp_path: Path) -> None:
    said = rank_pool(2).run(job_save_twice, folder=str(tmp_path), client=Decimal(1))
    name = tmp_path / "first" / "mp_rank_00_model_states.pt"
    assert said[1] == [] and f"will refuse 2 of the files that were saved: {name}" in said[0][0]
    assert all("client_state" in line and "decimal.Decimal" in line for line in said[0])
    assert len(said[0]) == 2
    for rank in rank_pool(2).run(job_load_spoilt, folder=str(tmp_path)):
        for kind, text in (rank["second"], rank["chosen"]):
            assert kind == "PickleRefused" and f"{tmp_path}/second/mp_rank_0" in text and "decimal.Decimal" in text
        assert rank["changed"] == 0.0
    allowed = rank_pool(2).run(job_load_spoilt, folder=str(tmp_path), allow_pickle=True)
    for rank in allowed:
        assert (rank["second"], rank["chosen"], rank["steps"]) == (("", ""), ("", ""), 2)
    loaded = [line for line in allowed[0]["said"] if f"{tmp_path}/second/mp_rank_0" in line]
    assert len(loaded) == 2 and all("_model_states.pt is loaded as a program" in line for line in loaded)


# -- what fails on one rank alone ----------------------------------------------------------------------------------

PLACES = ("layer", "optimizer", "lr_scheduler", "checkpoint_engine")


def job_fails_on_one_rank(folder: str, place: str, rank: int, tied: bool) -> dict[str, Any]:
    """Return errors of saving and loading, of a batch after each, and of a batch after one rank has gone on alone."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    stages = distributed.get_world_size()
    with engine_of(gpt_layers(tied_embedding=tied), OURS, stages=stages, scheduler=scheduler) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(folder, tag="whole")
        found: dict[str, Any] = {}
        methods = ("commit", "load") if place == "checkpoint_engine" else ("state_dict", "load_state_dict")
        for method, act in zip(methods, (engine.save_checkpoint, engine.load_checkpoint), strict=True):
            layers = [layer for layer in engine.module.forward_funcs if isinstance(layer, torch.nn.Module)]
            owner = layers[-1] if place == "layer" else getattr(engine, place)
            fails = mock.patch.object(owner, method, side_effect=LookupError("it fails"))
            with fails if distributed.get_rank() == rank else contextlib.nullcontext():
                found[act.__name__] = raised_by(lambda: act(folder, tag="whole"))  # noqa: B023
            found[f"batch after {act.__name__}"] = raised_by(lambda: engine.train_batch(iter(batches(1)[0])))
        found["save"] = raised_by(lambda: engine.save_checkpoint(folder, tag="mixture"))
        engine.load_checkpoint(folder, tag="whole", load_module_only=True)
        found["parameters alone"] = raised_by(lambda: engine.train_batch(iter(batches(1)[0])))
        engine.load_checkpoint(folder, tag="whole")
        found["whole"] = train(engine, batches(1, first_seed=900)).returned
        return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sample(2)
def test_what_fails_on_one_rank_is_raised_on_all(place: str, ranks: int, tmp_path: Path) -> None:
    job = {"place": place, "rank": ranks - 1, "tied": place == "lr_scheduler" or (place == "layer" and ranks < 4)}
    for rank in rank_pool(ranks).run(job_fails_on_one_rank, folder=str(tmp_path), **job):
        failed = f"rank {ranks - 1} cannot save the checkpoint: LookupError: it fails"
        assert rank["save_checkpoint"] == ("CheckpointError", failed)
        assert rank["batch after save_checkpoint"] == ("", "")
        assert rank["load_checkpoint"] == ("LookupError", "it fails")
        for when in ("batch after load_checkpoint", "save", "parameters alone"):
            kind, text = rank[when]
            assert kind == "CheckpointError" and "Load one that is whole" in text and "it fails" in text
            assert ("parameters, " in text) == (when != "parameters alone") and "optimizer states" in text
        assert rank["whole"]


def job_other_steps(change: int) -> tuple[str, str]:
    with engine_of(gpt_layers(), OURS) as engine:
        train(engine, batches(1))
        engine.global_steps += change if distributed.get_rank() == 1 else 0
        return raised_by(lambda: engine.train_batch(iter(batches(1)[0])))


def test_stages_of_different_steps_do_not_train_together() -> None:
    for kind, text in rank_pool(2).run(job_other_steps, change=1):
        assert kind == "BatchError" and "global_steps 1" in text and "global_steps 2" in text
    assert rank_pool(2).run(job_other_steps, change=0) == [("", ""), ("", "")]


# -- writers that go on after a save -------------------------------------------------------------------------------


class LateWriter(TorchCheckpointEngine):
    """Write as late as a decoupled writer may: in the commit. Until then it shares the tensors of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[Any, str]] = []
        self.commit_info: Any = None

    def create(self, info: Any) -> None:
        self.commit_info = info

    def save(self, state_dict: Any, path: str) -> None:
        shared = tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), state_dict)
        self.left.append((shared, path))

    def commit(self, info: Any) -> bool:
        for state_dict, path in self.left:
            super().save(state_dict, path)
        self.left.clear()
        self.commit_info = None
        return info is not None

    def get_commit_info(self) -> Any:
        return self.commit_info

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # as DataStates: the layers' tensors are not cloned


def job_decoupled(folder: str, then: str) -> tuple[float, str, int]:
    """Return how far a loaded checkpoint is from the states at its save, `latest`, and the loaded number of steps."""
    with engine_of(gpt_layers(), OURS) as engine:
        engine.checkpoint_engine = LateWriter()
        train(engine, batches(2))
        saved = states_of(engine)
        engine.save_checkpoint(folder, tag="early")
        if then == "step":
            train(engine, batches(1, first_seed=900))
        elif then == "save":
            engine.save_checkpoint(folder, tag="late", save_latest=False)
        else:
            engine.load_checkpoint(folder)
        distributed.barrier()
        latest = Path(folder, "latest").read_text()
    with engine_of(gpt_layers(), OURS) as engine:
        engine.load_checkpoint(folder, tag="early")
        return error_of(states_of(engine), saved), latest, engine.global_steps


@pytest.mark.parametrize("then", ["step", "save", "load"])
def test_a_writer_that_goes_on_has_the_values_of_its_save(then: str, tmp_path: Path) -> None:
    """DeepSpeed's pipeline engine steps without it: its files have later values, and nothing writes `latest`."""
    assert rank_pool(2).run(job_decoupled, folder=str(tmp_path), then=then) == [(0.0, "early", 2)] * 2


# -- names of folders ----------------------------------------------------------------------------------------------


def job_names(folders: list[str], tag: str) -> list[float]:
    """Return how far each loaded checkpoint is from its save, and then how far the saves are apart."""
    with engine_of(gpt_layers(), OURS) as engine:
        saved = []
        for folder in folders:
            train(engine, batches(1))
            saved.append(states_of(engine))
            engine.save_checkpoint(folder, tag=tag)
        found = []
        for folder, states in zip(folders, saved, strict=True):
            engine.load_checkpoint(folder)
            found.append(error_of(states_of(engine), states))
        return [*found, error_of(saved[0], saved[-1])]


@pytest.mark.parametrize("tag", ["tag", "b[2]"])
def test_a_folder_is_itself_whatever_its_name(tag: str, tmp_path: Path) -> None:
    """DeepSpeed takes brackets for a pattern: it finds nothing, or loads from the other folder."""
    for *found, distance in rank_pool(2).run(job_names, folders=[f"{tmp_path}/a[1]", f"{tmp_path}/a1"], tag=tag):
        assert found == [0.0, 0.0] and distance > 0.0


def test_a_tag_may_be_a_path(tmp_path: Path) -> None:
    for found in rank_pool(2).run(job_names, folders=[f"{tmp_path}/here"], tag=f"{tmp_path}/there"):
        assert found == [0.0, 0.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]
