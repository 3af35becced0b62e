"""Prepare a job to go on from its last checkpoint with another number of devices, stages or replicas.

    python examples/resume_elsewhere.py --save-dir run --out elsewhere -- --devices 8 --model gpt3-1b --device h200

What follows `--` goes to `terapipe strategy`, which chooses stages, replicas, micro-batches, schedule and slices for
the devices that are left. The sequences of a step stay as many and as long as they were, so that a program whose data
follow from `engine.global_steps` goes on with the same sequences in the same steps. Run this before each start: it
converts nothing if the layout has not changed since the checkpoint.

Written are `ds.json`, the configuration of the checkpoint with the new strategy; `strategy.json`, which it names; and,
beside the checkpoint, a universal one. Parameters, moments and steps of the optimizer move, if it was saved with
ZeRO stage 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from terapipe_ds.config.strategy_file import section_of
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson, read_json
from terapipe_ds.planner.strategy import Strategy
from terapipe_ds.runtime.checkpoints.choose import choose_checkpoint
from terapipe_ds.runtime.checkpoints.manifest import CheckpointError, Manifest
from terapipe_ds.runtime.checkpoints.strict_pickles import read_states

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PRECISIONS = ("fp16", "bf16", "bfloat16")
DEGREES = ("tensor_parallel", "sequence_parallel_size")  # of the old layout; the strategy has the new ones


@dataclass(frozen=True)
class Saved:
    """What is known of a checkpoint.

    Attributes:
        folder: where its files are; of a save that was killed late, under another name than its tag.
        grid: the degrees by axis, as in `Strategy.grid`.
        batch: the sequences of a step, of all replicas together.
        tokens: of the longest sequence that the job has run.
    """

    tag: str
    folder: Path
    config: dict[str, Any]
    grid: dict[str, int]
    batch: int
    tokens: int

    @classmethod
    def last(cls, save_dir: Path) -> Saved:
        """Read the last whole checkpoint: the one that a resume under the old layout would load."""
        try:
            chosen = choose_checkpoint(save_dir, None)
        except CheckpointError as error:
            end_with(str(error))
        if chosen.tag is None or chosen.read_as is None:
            end_with(f"no checkpoint in {save_dir}: give the folder that save_checkpoint was given")
        if chosen.note is not None:
            print(f"note: {chosen.note}")
        folder = save_dir / chosen.read_as
        manifest = Manifest.read(folder)  # None: DeepSpeed's own engine has saved it
        training = manifest.training if manifest is not None else {}
        states = read_states(folder / "mp_rank_00_model_states.pt")
        config, degrees = config_of(states["ds_config"]), states["checkpoint_parallel_dimensions"]
        # checkpoints of older versions lack the entry
        sequence = training.get("sequence_ranks", config.get("sequence_parallel_size") or 1)
        replicas = states["dp_world_size"] // sequence
        if (stage := config.get("zero_optimization", {}).get("stage", 0)) != 1:
            end_with(
                f"{folder} was saved with ZeRO stage {stage}: only ZeRO stage 1 saves what can move to another layout. "
                "Parameters alone move by load_checkpoint(..., load_module_only=True), or go on with the same layout"
            )
        return cls(
            tag=chosen.tag,
            folder=folder,
            config=config,
            grid={"pipe": degrees["pp_degree"], "data": replicas, "model": degrees["tp_degree"]}
            | ({"sequence": sequence} if sequence > 1 else {}),
            batch=config.get(SIZES[0]) or config[SIZES[1]] * config.get(SIZES[2], 1) * replicas,
            tokens=max(map(int, training.get("plans", {})), default=0),
        )


def config_of(given: Any) -> dict[str, Any]:
    """Return the configuration that a job gave DeepSpeed, which keeps a path as a path."""
    try:
        return given if isinstance(given, dict) else read_json(str(given), "the configuration of the checkpoint,")
    except (CommandError, OSError) as error:
        end_with(f"the checkpoint was saved with the configuration {given}, which cannot be read: {error}; put it back")


def plan(saved: Saved, options: list[str], out: Path) -> Strategy:
    """Find a strategy for the devices that are left, with as many sequences per step and the precision as before."""
    asked = {key: saved.config[key] for key in PRECISIONS if key in saved.config} | {"train_batch_size": saved.batch}
    question, answer = out / "question.json", out / "strategy.json"
    write_text(question, json.dumps(asked))
    # the optimizer stays where the checkpoint's configuration has it
    offloaded = (saved.config["zero_optimization"].get("offload_optimizer") or {}).get("device") or "none"
    command = [sys.executable, "-m", "terapipe_ds", "strategy", "--config", str(question)]
    if DeepSpeedJson(saved.config).precision is None:  # else the planner takes the dtype of the device
        command += ["--dtype", "fp32"]
    command += ["--offload-optimizer", "no" if offloaded == "none" else "yes"]
    if saved.tokens and not any(option.startswith("--sequence-length") for option in options):
        command += ["--sequence-length", str(saved.tokens)]
    if subprocess.run([*command, "--strategy-out", str(answer), *options], check=False).returncode != 0:
        end_with("terapipe strategy has found none, for the reason above")
    question.unlink()
    # the states that move are those of ZeRO stage 1, whatever the planner would save on its sums
    strategy = Strategy.from_json(answer.read_bytes()).model_copy(update={"zero_stage": 1})
    write_text(answer, strategy.to_json() + "\n")
    return strategy


def new_config(saved: Saved, strategy: Strategy, path: Path, is_universal: bool) -> dict[str, Any]:
    """Return the configuration of the checkpoint with the sizes of the strategy; optimizer and the like stay."""
    config = {key: value for key, value in saved.config.items() if key not in ("checkpoint", *DEGREES)}
    if "pipeline" in config:
        config["pipeline"] = {**config["pipeline"], "stages": strategy.grid["pipe"]}
    sizes = saved.batch, strategy.micro_batch_size, strategy.accumulation
    section = {key: value for key, value in config.get("terapipe", {}).items() if key not in section_of(strategy)}
    section |= {"enabled": True, "strategy": str(path.resolve())}
    checkpoint = {**saved.config.get("checkpoint", {}), "load_universal": is_universal}
    return {**config, **dict(zip(SIZES, sizes, strict=True)), "terapipe": section, "checkpoint": checkpoint}


def convert(saved: Saved, save_dir: Path) -> Path:
    """Write the universal checkpoint and name it in `latest_universal`, when it is whole."""
    final = save_dir / f"{saved.tag}_universal"
    making = final.with_name(f".{final.name}.converting")
    for folder in (making, final):
        shutil.rmtree(folder, ignore_errors=True)
    latest = save_dir / "latest_universal"
    latest.unlink(missing_ok=True)  # the converter names what it makes before it is whole
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    places = ["--input_folder", str(saved.folder), "--output_folder", str(making)]
    done = subprocess.run([*command, *places], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        end_with(f"ds_to_universal has failed:\n{done.stdout}{done.stderr}")
    making.rename(final)
    write_text(latest, final.name, durable=True)
    return final


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--save-dir", required=True, type=Path, metavar="DIR", help="the folder with the checkpoints")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where ds.json and strategy.json go")
    parser.add_argument("plan", nargs="+", metavar="PLAN_OPTION", help="after --: options of `terapipe strategy`")
    args = parser.parse_args()
    for taken in ("--config", "--strategy-out", "--global-batch", "--json", "--offload-optimizer"):
        if any(option == taken or option.startswith(f"{taken}=") for option in args.plan):
            parser.error(f"{taken}: this comes from the checkpoint; leave it out")
    if not any(option.startswith("--devices") for option in args.plan):
        parser.error("--devices is missing after --: say how many there are now")
    return args


def end_with(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def main() -> None:
    args = parse_arguments()
    saved = Saved.last(args.save_dir)
    args.out.mkdir(parents=True, exist_ok=True)
    strategy = plan(saved, args.plan, args.out)
    moves = strategy.grid != saved.grid
    config = new_config(saved, strategy, args.out / "strategy.json", is_universal=moves)
    before, after = (
        " x ".join(f"{size} {axis}" for axis, size in grid.items()) for grid in (saved.grid, strategy.grid)
    )
    if moves:
        print(f"\n{saved.tag} was saved by {before}, and {after} will go on: {convert(saved, args.save_dir)}")
    else:
        print(f"\n{saved.tag} was saved by {before}, and as many go on: nothing to convert")
    write_text(args.out / "ds.json", json.dumps(config, indent=2) + "\n")
    print(
        f"start with --deepspeed_config {os.path.relpath(args.out / 'ds.json')}; before a later start, run this again"
    )


if __name__ == "__main__":
    main()
