"""Test which engine `deepspeed.initialize` builds with the plugin, and an unchanged script under the launcher."""

import contextlib
import json
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed.elastic.utils.distributed import get_free_port

import terapipe_ds
from tests.distributed.engines import (
    batches,
    config,
    engine_of,
    error_of,
    fp32_layers,
    pipeline_module,
    raised_by,
    section,
    step_error,
)
from tests.distributed.harness import rank_pool
from tests.distributed.launcher import launch


@contextlib.contextmanager
def registered() -> Iterator[None]:
    terapipe_ds.register()
    try:
        yield
    finally:
        terapipe_ds.unregister()


def initialize(model: torch.nn.Module, ds_config: dict[str, Any]) -> Any:
    """Yield the engine that `deepspeed.initialize` builds, without any argument of ours."""
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


def job_registration() -> dict[str, Any]:
    """Return the type of the engine, and how far its training is from that without the plugin."""
    found: dict[str, Any] = {}

    def run(terapipe: dict[str, Any] | None) -> dict[str, Any]:
        engine = initialize(
            pipeline_module(fp32_layers()), config(**({} if terapipe is None else {"terapipe": terapipe}))
        )
        losses = [float(engine.train_batch(iter(batch))) for batch in batches(2)]
        weights = [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        assert isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine, PipelineEngine)
        return {"type": f"{type(engine).__module__}.{type(engine).__name__}", "result": [losses, weights]}

    plain = run(None)
    with registered():
        found["enabled"] = run(section())
        found["no section"] = run(None)
        found["switched off"] = run(section(enabled=False))
    found["after unregister()"] = run(None)
    return {name: (each["type"], error_of(each["result"], plain["result"])) for name, each in found.items()}


def job_other_engines() -> dict[str, Any]:
    """Build engines that ours must leave alone or refuse."""
    found: dict[str, Any] = {}
    enabled = config(terapipe=section())
    found["unread"] = unread_sections(enabled)
    with registered():
        with mock.patch("deepspeed.utils.groups.mpu", None):  # left there by the pipeline of an earlier job
            engine = initialize(torch.nn.Linear(2, 2), config())
        found["no pipeline"] = type(engine) is deepspeed.DeepSpeedEngine
        engine.destroy()
        four_layers = [LayerSpec(torch.nn.Linear, 2, 2) for _ in range(4)]
        model = DualPipeVModule(layers=four_layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        engine = initialize(model, config(gradient_accumulation_steps=4))
        found["DualPipeV without section"] = type(engine) is DualPipeVEngine
        engine.destroy()
        partition_activations = mock.patch.object(ds_checkpointing, "PARTITION_ACTIVATIONS", True)
        with partition_activations:
            found["partition_activations"] = raised_by(lambda: initialize(pipeline_module(fp32_layers()), enabled))[1]
        stock = config(terapipe=section(enabled=False, documents="position_ids"))
        found["documents"] = raised_by(lambda: initialize(pipeline_module(fp32_layers()), stock))[1]
    with engine_of(fp32_layers(), section()) as engine, partition_activations:
        found["partition_activations later"] = step_error(engine)[1]
    return found


def unread_sections(enabled: dict[str, Any]) -> dict[str, str]:
    """Return the error if an engine of another class is built with an enabled section."""
    found: dict[str, str] = {}

    class Mine(PipelineEngine):
        """An engine class of a project's own."""

    def build(kind: type, model: Any, ds_config: dict[str, Any]) -> None:
        kind(args=None, model=model, config=ds_config, config_class=DeepSpeedConfig(ds_config, mpu=model.mpu()))

    misspelt = config(terapipe={"enabled": False, "slice": 4})
    with registered():
        with mock.patch("deepspeed.utils.groups.mpu", None):
            for name, ds_config in (("no pipeline", enabled), ("misspelt", misspelt)):
                found[name] = raised_by(lambda: initialize(torch.nn.Linear(2, 2), ds_config))[1]  # noqa: B023

        class Derived(deepspeed.PipelineEngine):  # type: ignore[name-defined, misc]
            """One that is derived from the name that is bound to ours."""

        for kind in (Mine, Derived, PipelineEngine):
            found[kind.__name__] = raised_by(lambda: build(kind, pipeline_module(fp32_layers()), enabled))[1]  # noqa: B023
    with mock.patch.object(deepspeed, "PipelineEngine", Mine), registered():
        found["bound before"] = raised_by(lambda: initialize(pipeline_module(fp32_layers()), enabled))[1]
    found["not registered"] = raised_by(lambda: initialize(pipeline_module(fp32_layers()), enabled))[1]
    mixed = [*OTHERS, *fp32_layers()[:1]]  # ours are on the last stage
    found["one layer of ours"] = raised_by(lambda: initialize(pipeline_module(mixed), enabled))[1]
    initialize(pipeline_module(OTHERS), enabled).destroy()  # nothing tells us of it
    return found


OTHERS = [LayerSpec(torch.nn.Linear, 2, 2) for _ in range(2)]


class TestRegistration:
    def test_which_engine_deepspeed_initialize_builds(self) -> None:
        ours = "terapipe_ds.runtime.engine.engine.TeraPipeEngine"
        for rank in rank_pool(2).run(job_registration):
            kind, error = rank.pop("enabled")
            assert kind == ours and error <= 1e-4
            stock = ("deepspeed.runtime.pipe.engine.PipelineEngine", 0.0)
            assert rank == dict.fromkeys(("no section", "switched off", "after unregister()"), stock)

    def test_other_models_and_what_cannot_be_sliced(self) -> None:
        for rank in rank_pool(2).run(job_other_engines):
            assert rank["no pipeline"] is True
            unread = rank["unread"]
            assert "terapipe.slice = 4: unknown key; did you mean terapipe.slices?" in unread.pop("misspelt")
            assert "The model is a Linear and not a PipelineModule" in unread["no pipeline"]
            for name in ("not registered", "one layer of ours"):
                assert "terapipe_ds.register() was not called" in unread[name].lower()
            for name in ("Mine", "Derived", "PipelineEngine", "bound before"):
                assert "an engine class of its own" in unread[name]
            assert len(unread) == 7 and all("does not read the section" in text for text in unread.values())
            assert rank["DualPipeV without section"] is True
            assert "terapipe.documents = 'position_ids': DeepSpeed's own engine mixes documents" in rank["documents"]
            for name in ("partition_activations", "partition_activations later"):
                assert re.search("partition_activations.*to false", rank[name])


# -- the launcher --------------------------------------------------------------------------------------------

SCRIPT = """
    import argparse
    import json
    import os
    import sys

    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        parser.add_argument("--steps", type=int)
        parser.add_argument("--out")
        deepspeed.add_config_arguments(parser)
        args = parser.parse_args()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
        deepspeed.init_distributed("gloo")
        layers = gpt_layers(GPTConfig(vocab_size=16, hidden_size=16, num_layers=2, num_heads=2))
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=gpt_loss)
        engine = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))[0]
        tokens = torch.arange(2 * 25).reshape(2, 25) % 7
        losses = [
            engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])])).item() for _ in range(args.steps)
        ]
        report = {"engine": type(engine).__name__, "local_rank": args.local_rank, "losses": losses}
        report |= {"argv": sys.argv, "path": sys.path[0], "stock": isinstance(engine, deepspeed.PipelineEngine)}
        with open(os.path.join(args.out, f"rank{engine.global_rank}.json"), "w") as file:
            json.dump(report, file)
"""


class TestLauncher:
    def test_an_unchanged_script_trains_in_slices(self, tmp_path: Path) -> None:
        script, ds_config = tmp_path / "train.py", tmp_path / "config.json"
        script.write_text(textwrap.dedent(SCRIPT))
        options = {"gradient_accumulation_steps": 1, "terapipe": section()}
        ds_config.write_text(json.dumps(config(**options)))
        arguments = ["--steps", "2", "--out", str(tmp_path), "--deepspeed_config", str(ds_config)]
        address = ["--master_addr", "127.0.0.1", "--master_port", str(get_free_port())]
        options = ["--num_gpus", "2", *address, "--module", "terapipe_ds.run", str(script)]
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        exit_code, output, _ = launch([*options, *arguments], tmp_path, **variables)
        assert exit_code == 0, output[-4000:]
        reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
        for rank, report in enumerate(reports):
            assert report["engine"] == "TeraPipeEngine"
            assert report["stock"] is True
            assert report["local_rank"] == rank
            assert report["argv"] == [str(script), f"--local_rank={rank}", *arguments]
            assert report["path"] == str(tmp_path)
            assert report["losses"] == reports[0]["losses"]
            assert math.isfinite(report["losses"][-1])
            assert report["losses"][-1] < report["losses"][0]
