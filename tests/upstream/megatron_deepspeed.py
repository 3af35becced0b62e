"""Train the patched Megatron-DeepSpeed with slices and without, save, and resume from one to the other.

    python -m tests.upstream.megatron_deepspeed SOURCE [--cases NAME ...] [--keep FOLDER]

SOURCE is a git repository of Megatron-DeepSpeed with the commit that `patches/README.md` names. That commit is copied
out, patched, and run as upstream's users would run it. Upstream's tool makes the data from text and a tokenizer that
are generated here, and its `pretrain_gpt.py` trains a small GPT on CPU ranks. Every case trains 9 steps in one go with
slices, and 9 without (the same patched tree without the section). It also trains and saves 6 steps with slices; from
there 3 more follow with slices, and 3 without. All losses, and the parameters at the end, are compared.

Exit codes: 0 all equal, 1 a difference, 2 it cannot be run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "megatron_deepspeed.patch"
NEEDED = ("transformers", "six", "regex", "nltk", "pybind11")
STEPS, SAVED = 9, 6
LENGTH = 64
TIMEOUT_S = 600
LEAST_DIFFERENCE = 1e-4  # between the losses of any two steps of a run, relative
SECTION = {"enabled": True, "schedule": "seq1f1b", "slices": [20, 7, 24, 13], "sequence_dim": 1}


class CannotRun(Exception):
    """Say what is missing here, and what to do."""


class Failed(Exception):
    """Report that a program of upstream ended with an error."""


@dataclass(frozen=True)
class Case:
    """Describe one way to train.

    Args:
        limit: the largest relative difference of losses and parameters between a run with slices and one without. Two
            runs with the same slices must agree in every bit.
        step: the relative distance of neighbouring numbers in the dtype of the saved parameters. Rounding may give
            either of them, and twice that is allowed.
    """

    name: str
    limit: float
    tensor: int = 1
    step: float = 0.0
    arguments: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=lambda: SECTION)


CASES = (
    Case("fp32", 2e-6),
    Case("fp32, 4 equal slices", 2e-6, section={**SECTION, "slices": 4}),
    Case(
        "bf16, ZeRO-1", 2e-3, step=2**-7, arguments=("--bf16", "--zero-stage", "1"),
        config={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Case("fp32, 2 tensor-parallel ranks", 2e-6, tensor=2),
)  # fmt: skip


# -- what is trained -----------------------------------------------------------------------------------------------


def copy_patched(source: Path, folder: Path) -> None:
    """Copy the commit that `patches/README.md` names, not the work tree of `source`, and apply the patch."""
    found = re.search(r"`deepspeedai/Megatron-DeepSpeed` ([0-9a-f]{40})", (PATCH.parent / "README.md").read_text())
    assert found is not None, "patches/README.md names no commit"
    git = ["git", "-C", str(source), "archive", "--format=tar", found[1]]
    archive = subprocess.run(git, capture_output=True)
    if archive.returncode:
        raise CannotRun(
            f"{source} is no git repository with the commit {found[1]} of deepspeedai/Megatron-DeepSpeed: "
            f"{archive.stderr.decode().strip()}"
        )
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    apply = ["git", "-c", "core.autocrlf=false", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(apply, cwd=folder, check=True, env={**os.environ, "GIT_DIR": "/nowhere"})
    shutil.copy(PATCH.with_name("terapipe_patch.py"), folder)


def require_packages(upstream: Path) -> None:
    """Require the packages that upstream imports, and put a stand-in for `torchvision` where none can be imported.

    Upstream imports its vision models with everything else. A wheel of torchvision for CUDA fails to import beside a
    torch for CPUs.

    Raises:
        CannotRun: other packages are missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        install = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise CannotRun(f"upstream needs packages that are not here: {install}")
    works = subprocess.run([sys.executable, "-c", "import torchvision.datasets"], capture_output=True)
    if works.returncode:
        shutil.copy(Path(__file__).parent / "stand_ins" / "torchvision.py", upstream)


def make_data(upstream: Path, folder: Path) -> list[str]:
    """Make text, a byte-pair tokenizer and upstream's indexed data; return the arguments that name them."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    space = "\u0120"  # how GPT-2's tokenizer writes a space
    merges = [(space, "t"), ("h", "e"), (space + "t", "he")]
    tokens = ["<|endoftext|>", *letters, space, ".", *("".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    draw = random.Random(7)
    words = ["the", *("".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(40))]
    with (folder / "text.jsonl").open("w") as lines:
        for _ in range(60):
            lines.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 60))) + "."}) + "\n")
    tokenizer = [
        "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", f"{folder}/vocab.json",
        "--merge-file", f"{folder}/merges.txt",
    ]  # fmt: skip
    tool = [
        sys.executable, str(upstream / "tools/preprocess_data.py"), "--input", f"{folder}/text.jsonl",
        "--output-prefix", f"{folder}/data", "--append-eod", "--workers", "1", *tokenizer,
    ]  # fmt: skip
    run(tool, folder, "preprocess", upstream)
    return ["--data-path", f"{folder}/data_text_document", *tokenizer]


def run(command: Sequence[str], folder: Path, name: str, upstream: Path) -> None:
    """Run `command` with its output in a file of `folder`; the end of the output is shown where it fails."""
    paths = [str(upstream), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        # upstream's Makefile asks `python3` for pybind11
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=upstream)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks then
            code = process.wait()
    if code:
        said, _, _ = log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing/api.py")
        told = "\n".join(said.splitlines()[-40:])
        raise Failed(f"{name} ended with {code}:\n{told}")


# -- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Hold a run: the engine that trained, the loss of each step, and the last parameters by file and name."""

    engine: str
    losses: dict[int, float]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Runs:
    """Make the runs of one case."""

    case: Case
    upstream: Path
    folder: Path
    data: Sequence[str]

    def train(self, name: str, sliced: bool, load: str | None = None, until: int = STEPS) -> Trained:
        """Start `pretrain_gpt.py` once, from what the run `load` saved, until step `until`, at which it saves."""
        folder, tensor = self.folder / name, self.case.tensor
        folder.mkdir(parents=True)
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 100}
        # clipping is 1.0 unless set, and DeepSpeed's own fp32 norm leaves out later stages
        config |= {"gradient_clipping": 0.0, **self.case.config}
        if sliced:
            config["terapipe"] = self.case.section
        (folder / "config.json").write_text(json.dumps(config))
        arguments = [
            *self.data, "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", "2",
            "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", str(LENGTH),
            "--max-position-embeddings", str(LENGTH), "--micro-batch-size", "1", "--global-batch-size", "4",
            "--train-iters", str(STEPS), "--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style", "cosine",
            "--lr-warmup-iters", "2", "--weight-decay", "0.1", "--clip-grad", "0.0", "--init-method-std", "0.1",
            # a bias of keys has a gradient of rounding alone, which Adam would divide by its own size
            "--adam-eps", "1e-4",
            "--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--log-interval", "1", "--eval-interval", "1000",
            "--eval-iters", "1", "--split", "90,5,5", "--num-workers", "0", "--seed", "11", "--save-interval", "1000",
            "--make-vocab-size-divisible-by", "8", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-async-tensor-model-parallel-allreduce",
            "--distributed-backend", "gloo", "--save", f"{folder}/saved", "--zero-stage", "0", *self.case.arguments,
            "--deepspeed", "--deepspeed_config", f"{folder}/config.json",
        ]  # fmt: skip
        if load is not None:
            arguments += ["--load", f"{self.folder / load}/saved"]
        if until != STEPS:
            arguments += ["--exit-interval", str(until)]
        losses = folder / "losses.json"
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * tensor),
            str(Path(__file__).with_name("megatron_deepspeed_rank.py")), str(losses),
            str(self.upstream / "pretrain_gpt.py"),
        ]  # fmt: skip
        run([*launch, *arguments], self.folder, name, self.upstream)
        told = json.loads(losses.read_text())
        return Trained(
            told["engine"], {int(step): loss for step, loss in told["losses"].items()}, dict(_parameters(folder))
        )


def _parameters(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("saved/global_step*/layer_*.pt")):
        for name, value in torch.load(path, map_location="cpu", weights_only=False).items():
            if torch.is_tensor(value):
                yield f"{path.name}/{name}", value.double()


# -- comparisons ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Hold the largest relative differences of two runs and what is allowed; 0 means equal in every bit."""

    what: str
    losses: float
    parameters: float
    limit: float
    parameter_limit: float

    @property
    def holds(self) -> bool:
        return self.losses <= self.limit and self.parameters <= self.parameter_limit

    def __str__(self) -> str:
        verdict = "equal" if self.holds else "DIFFERENT"
        allowed = f"allowed {self.limit:.0e} and {self.parameter_limit:.0e}"
        return f"  {self.what:<44} losses {self.losses:.1e}   parameters {self.parameters:.1e}   {allowed}   {verdict}"


def compare(
    what: str, run: Trained, reference: Trained, limit: float, ended: bool = True, step: float = 0.0
) -> Comparison:
    """Compare `run` with the same steps of `reference`; with `ended`, at the same step, the parameters as well."""
    losses = max(_relative(loss, reference.losses.get(step, math.nan)) for step, loss in run.losses.items())
    parameters = 0.0
    if ended:
        assert run.parameters.keys() == reference.parameters.keys(), (what, list(run.parameters)[:3])
        largest = max(float(value.abs().max()) for value in reference.parameters.values())
        errors = [float((run.parameters[name] - value).abs().max()) for name, value in reference.parameters.items()]
        parameters = max(errors) / largest
    return Comparison(what, losses, parameters, limit, max(limit, 2 * step))


def _relative(value: float, reference: float) -> float:
    """Return the relative difference; infinity where one of them is no finite number, so that the check fails."""
    difference = abs(value - reference) / abs(reference)
    return difference if math.isfinite(difference) else math.inf


def check(case: Case, upstream: Path, folder: Path, data: Sequence[str]) -> bool:
    """Make all runs of a case, print their differences, and return whether all are within the limits."""
    runs = Runs(case, upstream, folder, data)
    everyone = {
        "stock": runs.train("stock", sliced=False),
        "sliced": runs.train("sliced", sliced=True),
        "saved at 6": runs.train("saved", sliced=True, until=SAVED),
        "sliced from 6": runs.train("saved-sliced", sliced=True, load="saved"),
        "stock from 6": runs.train("saved-stock", sliced=False, load="saved"),
    }
    stock, sliced, saved, with_slices, without = everyone.values()
    print(f"{case.name}: slices {case.section['slices']}, {2 * case.tensor} ranks")
    for name, run in everyone.items():
        steps = " ".join(f"{run.losses[step]:.7f}" if step in run.losses else " " * 9 for step in range(1, STEPS + 1))
        print(f"  {name:<14} {run.engine:<15} {steps}")
    comparisons = [
        compare("9 steps with slices / 9 of stock", sliced, stock, case.limit, step=case.step),
        compare("the first 6 / those of 9, with slices", saved, sliced, 0.0, ended=False),
        compare("resumed with slices / 9 steps with slices", with_slices, sliced, 0.0),
        compare("resumed with stock / 9 steps of stock", without, stock, case.limit, step=case.step),
    ]
    print(*comparisons, sep="\n", flush=True)
    return all(comparison.holds for comparison in comparisons) & _means_something(everyone)


def _means_something(runs: Mapping[str, Trained]) -> bool:
    """Return whether the runs can be compared, and say what is wrong with them.

    Each run must be of the expected engine and have taken the expected steps. No two steps may have about the same
    loss, because a step too many or too few would not be seen then."""
    steps = {"at": range(1, SAVED + 1), "from": range(SAVED + 1, STEPS + 1)}
    wrong = []
    for name, run in runs.items():
        engine = "PipelineEngine" if name.startswith("stock") else "TeraPipeEngine"
        expected = next((steps[word] for word in steps if f" {word} " in name), range(1, STEPS + 1))
        if (run.engine, sorted(run.losses)) != (engine, list(expected)):
            print(f"  {name}: {run.engine} took the steps {sorted(run.losses)}: WRONG")
            wrong.append(name)
    losses = sorted(runs["stock"].losses.values())
    alike = [low for low, high in itertools.pairwise(losses) if high - low < LEAST_DIFFERENCE * high]
    if alike:
        print(f"  two steps have about the same loss, {alike[0]}: the comparison would not see a step too many")
    return not wrong and not alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a git repository of Megatron-DeepSpeed")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="these only")
    parser.add_argument("--keep", type=Path, help="keep everything in this new folder, logs of all runs included")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=options.keep is None)
            upstream = folder / "upstream"
            copy_patched(options.source, upstream)
            require_packages(upstream)
            data = make_data(upstream, folder)
        except (CannotRun, Failed, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        equal = []
        for number, case in enumerate(chosen):
            try:
                equal.append(check(case, upstream, folder / f"case{number}", data))
            except Failed as error:
                print(f"{case.name}: {error}", flush=True)
                equal.append(False)
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
