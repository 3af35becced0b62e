"""Look at the machine: devices, links, kernels, cores, limits, launchers, and what DeepSpeed could build."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from terapipe_ds.doctor.lines import Check, Line

GIB = 2**30
_FEWEST_FILES, _LEAST_SHM = 4096, 2**30
_DTYPES = ("float32", "bfloat16", "float16")


def devices() -> Iterator[Line]:
    """Say what training would run on."""
    import torch
    from deepspeed.accelerator import get_accelerator

    name, forced = get_accelerator().device_name(), os.environ.get("DS_ACCELERATOR")
    why = f" (DS_ACCELERATOR={forced})" if forced else ""
    if name != "cuda":
        built = torch.version.cuda or "no CUDA"
        if shutil.which("nvidia-smi") and not forced:
            text = f"{name}: there is an NVIDIA driver, but torch {torch.__version__} (built with {built}) finds no GPU"
            yield Line("fail", "devices", text, "nvidia-smi says whether the driver runs; install a torch with CUDA")
        else:
            yield Line(
                "note", "devices", f"{name}{why}: for tests and examples", "" if forced else "use a machine with GPUs"
            )
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        text = f"{card.name}, {card.total_memory / GIB:.0f} GiB, compute capability {card.major}.{card.minor}"
        if (card.major, card.minor) < (8, 0):
            yield Line("note", f"device {index}", text, "bf16 and FlashAttention want 8.0 or more: train in fp16")
        else:
            yield Line("ok", f"device {index}", text)


def nccl() -> Iterator[Line]:
    """Say what carries messages."""
    import torch
    import torch.distributed as torch_dist

    if not torch_dist.is_available():
        yield Line("fail", "messages", "torch was built without torch.distributed", "install another build of torch")
    elif torch.cuda.is_available() and torch_dist.is_nccl_available():
        yield Line("ok", "messages", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    elif torch.cuda.is_available():
        yield Line("warning", "messages", "gloo: torch was built without NCCL", "install a build of torch with NCCL")
    else:
        yield Line("ok", "messages", "gloo, as there is no GPU")


def kernels() -> Iterator[Line]:
    """Say which kernel computes attention in each dtype, and why not one that is preferred to it."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from terapipe_ds.attention.backends import backend_name, passed_over

    told: dict[tuple[str, str], list[str]] = {}
    for dtype in _DTYPES:
        q = torch.zeros(1, 1, 8, 64, dtype=getattr(torch, dtype), device=get_accelerator().device_name())
        why = "; ".join(f"{name}: {reason}" for name, reason in passed_over(q).items())
        told.setdefault((backend_name(q), why), []).append(dtype)
    for (name, why), dtypes in told.items():
        text = f"{name} for {', '.join(dtypes)} (head dim 64)" + (f"; {why}" if why else "")
        yield Line("warning" if name == "reference" else "ok", "attention", text, "" if name != "reference" else SLOW)


SLOW = "plain torch is slow: use another dtype, or install flash-attn"


def cores(ranks: int | None) -> Iterator[Line]:
    """Say how many cores there are for how many ranks."""
    allowed, in_all = len(os.sched_getaffinity(0)), os.cpu_count()
    text = f"{allowed} of {in_all} for this process"
    if ranks is not None and ranks > allowed:
        yield Line("warning", "cores", f"{text}, for {ranks} ranks", "on one machine ranks wait for each other's core")
    else:
        yield Line("ok", "cores", text)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        yield Line(
            "note", "OMP_NUM_THREADS", "not set: each rank takes a thread per core", "export OMP_NUM_THREADS=1 on CPUs"
        )
    else:
        yield Line("ok", "OMP_NUM_THREADS", threads)


def limits() -> Iterator[Line]:
    """Look at what the shell and the container allow."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEWEST_FILES:
        more = "unlimited" if most == resource.RLIM_INFINITY else most
        yield Line(
            "warning", "open files", f"ulimit -n is {files}", f"ulimit -n {_FEWEST_FILES} or more (up to {more})"
        )
    else:
        yield Line("ok", "open files", f"ulimit -n is {'unlimited' if files < 0 else files}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Line("ok", "locked memory", "unlimited")
    else:
        text = f"ulimit -l is {locked // 1024} KiB"
        yield Line(
            "note", "locked memory", text, "InfiniBand wants unlimited: ulimit -l unlimited, docker --ulimit memlock=-1"
        )


def shared_memory(folder: str = "/dev/shm") -> Iterator[Line]:
    """Look at what NCCL and data loaders share."""
    if not Path(folder).is_dir():
        yield Line("warning", folder, "there is none: NCCL and data loaders share memory there", "mount a tmpfs there")
        return
    space = os.statvfs(folder)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    text = f"{free / GIB:.2f} GiB free of {size / GIB:.2f} GiB"
    if free < _LEAST_SHM:
        yield Line("warning", folder, text, "docker run --shm-size=8g, or remove what lies there")
    else:
        yield Line("ok", folder, text)


def launchers() -> Iterator[Line]:
    """Say whether the launchers on the path belong to this Python."""
    here = Path(sys.executable).parent
    for name in ("deepspeed", "torchrun"):
        path = shutil.which(name)
        if path is None and (here / name).exists():
            yield Line("warning", name, f"not on the path; {here / name} is there", f"export PATH={here}:$PATH")
        elif path is None:
            yield Line("warning", name, "not on the path", "install torch and deepspeed in this environment")
        elif Path(path).resolve().parent != here.resolve() and Path(path).parent.resolve() != here.resolve():
            other = f"{path} is not of this Python ({sys.executable})"
            yield Line("warning", name, other, f"export PATH={here}:$PATH, or activate one environment")
        else:
            yield Line("ok", name, path)


def ops() -> Iterator[Line]:
    """Say which operators DeepSpeed has built, whether it could build others, and which builds were killed."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    from terapipe_ds.compat.builds import build_locks, state_of

    for lock in build_locks():
        pid, text = state_of(lock)
        text, _, fix = text.partition(". ")
        yield Line("warning" if pid is None else "note", "build lock", text, fix)

    built = sorted(name for name, is_built in installed_ops.items() if is_built)
    missing = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    if get_accelerator().device_name() == "cuda" and not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        missing.append("nvcc")
    text = f"built ahead: {', '.join(built) or 'none'}; others are built when they are first used"
    if missing:
        without = f"{text}, which needs {' and '.join(missing)}"
        fix = 'install it, or set "torch_adam": true in optimizer.params to do without DeepSpeed\'s Adam'
        yield Line("warning", "DeepSpeed's ops", without, fix)
    else:
        yield Line("ok", "DeepSpeed's ops", text)


def checks(ranks: int | None) -> tuple[Check, ...]:
    """Return the checks of a machine that is to run so many ranks; None: not known."""
    both = ("torch", "deepspeed")
    return (
        Check("devices", devices, both),
        Check("messages", nccl, ("torch",)),
        Check("attention", kernels, both),
        Check("cores", lambda: cores(ranks)),
        Check("limits", limits),
        Check("/dev/shm", shared_memory),
        Check("launchers", launchers),
        Check("DeepSpeed's ops", ops, both),
    )
