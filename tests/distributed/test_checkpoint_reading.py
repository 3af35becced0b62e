"""A checkpoint that cannot be read, and a module that describes itself by a method: the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.pipe import PipelineModule

from tests.distributed.engines import batches, engine_of, gpt_layers, raised_by, section, train
from tests.distributed.harness import rank_pool


class ByMethod(PipelineModule):
    """As Megatron-DeepSpeed's `GPTModelPipe`: DeepSpeed knows this name as that of a dict."""

    heads = 4

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return {"universal_checkpoint_version": 0.2, "terapipe_model_sizes": {"heads": self.heads}}


class OtherHeads(ByMethod):
    heads = 2


class Broken(ByMethod):
    def universal_checkpoint_info(self) -> dict[str, Any]:
        raise LookupError("no tokenizer was built")


def job_save(folder: str, module_class: type[PipelineModule], given: bool) -> list[float]:
    """The losses of the steps that follow."""
    with engine_of(gpt_layers(), section(), module_class=module_class) as engine:
        train(engine, batches(2))
        client = {"universal_checkpoint_info": engine.module.universal_checkpoint_info()} if given else {}
        engine.save_checkpoint(folder, client_state={"epoch": 7, **client})
        return train(engine, batches(2, first_seed=900)).returned


def job_load(folder: str, module_class: type[PipelineModule], ours: bool = True) -> tuple[Any, list[float]]:
    with engine_of(gpt_layers(), section() if ours else None, module_class=module_class) as engine:
        path, client = engine.load_checkpoint(folder)
        return (path is not None, client["epoch"]), train(engine, batches(2, first_seed=900)).returned


def job_refused(folder: str, module_class: type[PipelineModule]) -> tuple[str, str]:
    with engine_of(gpt_layers(), section(), module_class=module_class) as engine:
        return raised_by(lambda: engine.load_checkpoint(folder))


def job_stock_save(folder: str) -> tuple[str, str]:
    with engine_of(gpt_layers(), None, module_class=ByMethod) as engine:
        return raised_by(lambda: engine.save_checkpoint(folder))


@pytest.mark.parametrize("given", [True, False], ids=["by the client as well", "by the method alone"])
def test_training_goes_on_where_a_method_describes_the_module(given: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for _, text in rank_pool(2).run(job_stock_save, folder=str(tmp_path / "stock")):
        assert "pickle" in text, "else ours need not put what the method gives in its place"
    goes_on = rank_pool(2).run(job_save, folder=folder, module_class=ByMethod, given=given)
    ours = rank_pool(2).run(job_load, folder=folder, module_class=ByMethod)
    assert ours == [((True, 7), losses) for losses in goes_on]
    stock = rank_pool(2).run(job_load, folder=folder, module_class=ByMethod, ours=False)
    assert stock == [((True, 7), pytest.approx(losses, rel=1e-6)) for losses in goes_on]
    for kind, text in rank_pool(2).run(job_refused, folder=folder, module_class=OtherHeads):
        assert kind == "TeraPipeConfigError" and "heads=4 there and 2 here" in text
    for kind, text in rank_pool(2).run(job_refused, folder=folder, module_class=Broken):
        assert (kind, text) == ("LookupError", "no tokenizer was built")


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"])
@pytest.mark.sample(1)
def test_a_file_that_cannot_be_read_is_told_on_every_rank(name: str, tmp_path: Path) -> None:
    """Of the size that was written, so that the list of files says nothing."""
    rank_pool(2).run(job_save, folder=str(tmp_path), module_class=PipelineModule, given=False)
    (path,) = tmp_path.glob(f"*/{name}")
    path.write_bytes(path.read_bytes()[::-1])
    for kind, text in rank_pool(2).run(job_refused, folder=str(tmp_path), module_class=PipelineModule):
        assert kind == "CheckpointError" and f"{path} cannot be read" in text and "Load another checkpoint" in text
