"""Measure the levers of long context: the peak bytes of each rank, while one lever after the other is added.

`python -m studies.levers` prints the tables of docs/tutorials/long_context.md. Two stages train a tiny GPT; each rank
counts the bytes of all tensors within a step (`MemoryPeak`), less those that would be in the host's memory on GPUs.
All rows compute the same loss. A new lever is a new entry of `LEVERS`. With sequence ranks there are four processes,
whose recorders of bytes take several GB each at 16,384 tokens; take fewer tokens there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from studies.memory import live_bytes
from studies.options import list_of, study_parser, write_report
from terapipe_ds.bench.ranks import (
    Workload,
    finish_rank,
    gpt_config,
    machine,
    micro_batches,
    prepare_rank,
    progress_bar,
    spawn_ranks,
)
from terapipe_ds.files.atomic import write_text

EXAMPLES = """  python -m studies.levers --rows 0,1,2,3,4,5
  python -m studies.levers --rows 5,6,7 --sequence-length 2048 --slices 8 --json levers.json"""
STAGES = 2


@dataclass(frozen=True)
class Setup:
    """Hold the levers that are on: the keys of the section, the loss, the sequence ranks, and the optimizer's place."""

    section: tuple[tuple[str, Any], ...] = (("slices", 1),)
    keeps_logits: bool = True
    sequence_ranks: int = 1
    optimizer_on_host: bool = False

    def but(self, section: dict[str, Any] | None = None, **changes: Any) -> Setup:
        """Return this setup with other keys and fields."""
        return replace(self, section=tuple((dict(self.section) | (section or {})).items()), **changes)


LEVERS: dict[str, dict[str, Any]] = {
    "none: whole sequences, the loss keeps logits": {},
    "a loss without logits": {"keeps_logits": False},
    "slices": {"section": {"slices": "SLICES"}},
    '`"recompute": "full"`': {"section": {"recompute": "full"}},
    '`"keep_attention": true`': {"section": {"keep_attention": True}},
    '`"offload_activations": true`': {"section": {"offload_activations": True}},
    "two sequence ranks per stage": {"sequence_ranks": 2},
    "`offload_optimizer` of DeepSpeed": {"optimizer_on_host": True},
}
"""Lever that a row adds to the row above -> changes of the setup."""


def setups(slices: int) -> dict[str, Setup]:
    """Return the setup of each row."""
    rows, setup = {}, Setup()
    for name, changes in LEVERS.items():
        setup = setup.but(**changes)
        rows[name] = setup.but({"slices": slices} if dict(setup.section)["slices"] == "SLICES" else None)
    return rows


# -- in each rank ----------------------------------------------------------------------------------------------------


def rank_main(rank: int, rendezvous: str, work: Workload, vocabulary: int, setup: Setup, out: str) -> None:
    """Train two steps, and leave the peak bytes of each stage and the loss of the second one in `out`."""
    prepare_rank(rank, STAGES * setup.sequence_ranks, rendezvous)
    import torch.distributed as torch_dist

    from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

    engine = _engine(work, vocabulary, setup)
    data = micro_batches(work, work.accumulation, vocabulary)
    with MemoryPeak():  # what this step leaves counts when the next one drops it
        engine.train_batch(iter(data))
    torch_dist.barrier()
    engine.slice_store.pool.drop_free()
    before = live_bytes() - host_bytes(engine, setup.optimizer_on_host)
    with MemoryPeak() as peak:
        loss = float(engine.train_batch(iter(data)))
    own = {"stage_id": engine.stage_id, "bytes": before + peak.grown_bytes, "loss": loss}
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, own)
    if rank == 0:
        write_text(out, json.dumps(everyone))
    finish_rank([engine])


def _engine(work: Workload, vocabulary: int, setup: Setup) -> Any:
    """Return the engine of a setup; ZeRO-1 in every row, since DeepSpeed's offload of the optimizer needs it."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology

    import terapipe_ds
    from terapipe_ds.models.gpt import gpt_layers, gpt_loss

    topology = ProcessTopology(["pipe", "data", "sequence"], [STAGES, 1, setup.sequence_ranks])
    gpt = gpt_config(work, {"vocab_size": vocabulary})
    module = PipelineModule(gpt_layers(gpt), topology=topology, loss_fn=_plain if setup.keeps_logits else gpt_loss)
    zero: dict[str, Any] = {"stage": 1, "reduce_bucket_size": 10**6}
    settings = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": zero | ({"offload_optimizer": {"device": "cpu"}} if setup.optimizer_on_host else {}),
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "terapipe": {"enabled": True, "schedule": "seq1f1b", "verify": "off", **dict(setup.section)},
    }
    return terapipe_ds.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def _plain(logits: Any, labels: Any) -> Any:
    """Return the mean cross entropy, as a loss function of a user computes it."""
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def host_bytes(engine: Any, optimizer_on_host: bool) -> int:
    """Return the bytes that a GPU's host would hold: offloaded activations; Adam's weights, gradients and states."""
    offload = engine._stage.offload
    activations = 0 if offload is None else offload.buffers.reserved_bytes
    if not optimizer_on_host:
        return int(activations)
    zero, adam = engine.optimizer, engine.optimizer.optimizer
    weights = [parameter for group in adam.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
    buffers = [zero.temp_grad_buffer_for_cpu_offload, *zero.accumulated_grads_in_cpu.values()]
    buffers += zero.param_buffer_of_bit16_for_cpu_offload_groups
    states = [value for state in adam.state.values() for value in state.values() if hasattr(value, "nbytes")]
    return int(activations + sum(tensor.nbytes for tensor in (*weights, *gradients, *buffers, *states)))


# -- in the parent ---------------------------------------------------------------------------------------------------


def measure(work: Workload, vocabulary: int, setup: Setup) -> tuple[list[int], float]:
    """Return the largest bytes of the ranks of each stage, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "bytes.json")
        spawn_ranks(rank_main, STAGES * setup.sequence_ranks, work, vocabulary, setup, out)
        ranks = json.loads(Path(out).read_text())
    peaks = [max(own["bytes"] for own in ranks if own["stage_id"] == stage_id) for stage_id in range(STAGES)]
    return peaks, ranks[0]["loss"]


def table(rows: dict[str, list[int]]) -> str:
    """Return the rows as Markdown, with the ratio of each row's largest stage to the largest stage of the row above."""
    lines = ["| added lever | first stage, MB | last stage, MB | larger stage / row above |", "|---|---|---|---|"]
    before = 0
    for name, peaks in rows.items():
        share = f"{max(peaks) / before:.2f}" if before else "-"
        lines.append(f"| {name} | {' | '.join(f'{peak / 1e6:.1f}' for peak in peaks)} | {share} |")
        before = max(peaks)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure all rows and print the table."""
    parser = study_parser("levers", __doc__, writes="machine, workload and all bytes", examples=EXAMPLES)
    sizes = {"sequence_length": 16384, "slices": 16, "accumulation": 2, "hidden": 32, "layers": 4, "heads": 2}
    for name, usual in (sizes | {"vocabulary": 8192}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=usual, help="(default: %(default)s)")
    parser.add_argument(
        "--rows", type=list_of(int), metavar="N[,N...]", help="rows of the table, from 0 (default: all)"
    )
    arguments: argparse.Namespace = parser.parse_args(argv)
    work = Workload(
        STAGES,
        arguments.accumulation,
        arguments.sequence_length,
        1,
        arguments.hidden,
        arguments.layers,
        arguments.heads,
    )
    rows, losses, todo = {}, {}, setups(arguments.slices)
    todo = {name: todo[name] for row, name in enumerate(todo) if arguments.rows is None or row in arguments.rows}
    bar = progress_bar(0, len(todo), "rows")
    for name, setup in todo.items():
        rows[name], losses[name] = measure(work, arguments.vocabulary, setup)
        bar.update()
    bar.close()
    print(table(rows))
    print(f"\nlosses: {min(losses.values()):.6f} to {max(losses.values()):.6f}")
    facts = {"vocabulary": arguments.vocabulary, "slices": arguments.slices}
    write_report(arguments.json, machine=machine(), workload=asdict(work) | facts, bytes=rows, losses=losses)


if __name__ == "__main__":
    main()
