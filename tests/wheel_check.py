"""Install the wheel into an empty environment and use it from a folder outside of the repository.

    make wheel-check
    python -m tests.wheel_check dist/terapipe_ds-0.1.0-py3-none-any.whl

The environment has the wheel alone; torch, DeepSpeed and what else it depends on are read from the environment that
runs this, because downloading them again would take longer than all checks. Copies of `examples/` and `configs/` lie
in the folder, as a user would take them. Exit code 1 where a command fails.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
WHERE = "import terapipe_ds, sys; print(terapipe_ds.__version__, terapipe_ds.__file__)"


def dependencies() -> list[str]:
    """Return the folders from which torch and the other dependencies are imported here, without the repository."""
    own = [str(Path(path).resolve()) for path in sys.path if path and Path(path).is_dir()]
    purelib = sysconfig.get_path("purelib")
    return [path for path in dict.fromkeys([purelib, *own]) if "site-packages" in path]


def make_environment(folder: Path, wheel: Path) -> Path:
    """Return the interpreter of a new environment that holds the wheel and reads its dependencies from here."""
    venv.EnvBuilder(with_pip=True).create(folder)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*install, "--disable-pip-version-check"], check=True, timeout=LIMIT_S)
    purelib = next((folder / "lib").glob("python*/site-packages"))
    (purelib / "dependencies.pth").write_text("\n".join(dependencies()) + "\n")
    return python


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def commands(python: Path) -> dict[str, list[str]]:
    """Return what a user would run first; the launcher is DeepSpeed's, with two ranks."""
    terapipe = str(python.parent / "terapipe")
    launch = [str(python), "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
    model = ["--model", "gpt3-1b", "--device", "v100", "--sequence-length", "2048"]
    finetune = ["examples/finetune_hf.py", "--steps", "3", "--sequence-length", "128", "--eval-rows", "2"]
    return {
        "where the package is": [str(python), "-c", WHERE],
        "terapipe doctor": [terapipe, "doctor"],
        "terapipe plan": [terapipe, "plan", *model, "--stages", "4", "--micro-batches", "2"],
        "terapipe show": [terapipe, "show", "--schedule", "seq1f1b", "--stages", "2", "--slices", "2"],
        "quickstart": [*launch, free_port(), "examples/quickstart.py"],
        "Hugging Face": [*launch, free_port(), *finetune, "--new-tokens", "4"],
    }


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the commands: nothing that leads back to the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept |= {"PATH": f"{folder / 'venv/bin'}:{kept['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), **kept}


def run(name: str, command: list[str], folder: Path) -> str | None:
    """Return what went wrong in one command, if anything did."""
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), timeout=LIMIT_S, text=True, capture_output=True, check=False
    )
    said = done.stdout + done.stderr
    print(f"{'ok' if done.returncode == 0 else 'FAILED':6s} {name:22s} {time.monotonic() - begin:5.1f} s", flush=True)
    if done.returncode == 0 and name == "where the package is" and str(folder) not in done.stdout:
        return f"{name}: not the wheel's: {done.stdout}"
    return f"{name}: exit {done.returncode}\n{said[-3000:]}" if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name).resolve()
        python = make_environment(folder / "venv", wheel)
        for source in ("examples", "configs"):
            shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        problems = [problem for key, words in commands(python).items() if (problem := run(key, words, folder))]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
