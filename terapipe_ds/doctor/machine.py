"""Check a machine for the needs of a pipeline: devices, kernels, cores, limits, launchers, killed builds, variables.

The output of `ds_report` (operators, /dev/shm) and `python -m torch.utils.collect_env` (cards, drivers, libraries) is
not repeated.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from terapipe_ds.compat.builds import build_locks, state_of
from terapipe_ds.doctor import Check, Line

_FEWEST_FILES = 4096
_DTYPES = ("float32", "bfloat16", "float16")
_QUEUES, _LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SLOW = "plain torch is slow: use another dtype, or install flash-attn"


def devices() -> Iterator[Line]:
    import torch
    from deepspeed.accelerator import get_accelerator

    name, forced = get_accelerator().device_name(), os.environ.get("DS_ACCELERATOR")
    if name == "cuda":
        old = [k for k in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(k) < (8, 0)]
        fix = f"bf16 and FlashAttention want capability 8.0: train in fp16 on device {old[0]}" if old else ""
        yield Line("note" if old else "ok", "devices", f"{torch.cuda.device_count()} of CUDA", fix)
    elif shutil.which("nvidia-smi") and not forced:
        built = torch.version.cuda or "no CUDA"
        text = f"{name}: there is an NVIDIA driver, but torch {torch.__version__} (built with {built}) finds no GPU"
        yield Line("fail", "devices", text, "nvidia-smi says whether the driver runs; install a torch with CUDA")
    else:
        why = f" (DS_ACCELERATOR={forced})" if forced else ""
        fix = "" if forced else "use a machine with GPUs"
        yield Line("note", "devices", f"{name}{why}: for tests and examples", fix)


def kernels() -> Iterator[Line]:
    """Report the kernel that computes attention in each dtype, and why a preferred one does not."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from terapipe_ds.attention.backends import backend_name, passed_over

    by_kernel: dict[tuple[str, str], list[str]] = {}
    for dtype in _DTYPES:
        q = torch.zeros(1, 1, 8, 64, dtype=getattr(torch, dtype), device=get_accelerator().device_name())
        names: dict[str, list[str]] = {}  # kernels, by the reason why they do not run
        for name, reason in passed_over(q).items():
            names.setdefault(reason, []).append(name)
        why = "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())
        by_kernel.setdefault((backend_name(q), why), []).append(dtype)
    for (name, why), dtypes in by_kernel.items():
        text = f"{name} for {', '.join(dtypes)} (head dim 64)" + (f"; {why}" if why else "")
        is_slow = name == "reference"
        yield Line("warning" if is_slow else "ok", "attention", text, _SLOW if is_slow else "")


def cores(ranks: int | None) -> Iterator[Line]:
    allowed, in_all = len(os.sched_getaffinity(0)), os.cpu_count()
    text = f"{allowed} of {in_all} for this process"
    if ranks is not None and ranks > allowed:
        fix = "start fewer ranks on this machine, or expect them to wait for each other's core"
        yield Line("warning", "cores", f"{text}, for {ranks} ranks", fix)
    else:
        yield Line("ok", "cores", text)
    threads, fix = os.environ.get("OMP_NUM_THREADS"), "export OMP_NUM_THREADS=1 on CPUs"
    if threads is None:
        yield Line("note", "OMP_NUM_THREADS", "not set: each rank takes a thread per core", fix)
    else:
        yield Line("ok", "OMP_NUM_THREADS", threads)


def limits() -> Iterator[Line]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEWEST_FILES:
        fix = f"ulimit -n {_FEWEST_FILES} or more (up to {'unlimited' if most == resource.RLIM_INFINITY else most})"
        yield Line("warning", "open files", f"ulimit -n is {files}", fix)
    else:
        yield Line("ok", "open files", f"ulimit -n is {'unlimited' if files < 0 else files}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Line("ok", "locked memory", "unlimited")
    else:
        fix = "InfiniBand wants unlimited: ulimit -l unlimited, docker --ulimit memlock=-1"
        yield Line("note", "locked memory", f"ulimit -l is {locked // 1024} KiB", fix)


def launchers() -> Iterator[Line]:
    """Report whether the launchers on the path belong to this Python."""
    here = Path(sys.executable).parent
    for name in ("deepspeed", "torchrun"):
        path = shutil.which(name)
        if path is None and (here / name).exists():
            yield Line("warning", name, f"not on the path; {here / name} is there", f"export PATH={here}:$PATH")
        elif path is None:
            yield Line("warning", name, "not on the path", "install torch and deepspeed in this environment")
        elif here.resolve() not in (Path(path).resolve().parent, Path(path).parent.resolve()):
            other = f"{path} is not of this Python ({sys.executable})"
            yield Line("warning", name, other, f"export PATH={here}:$PATH, or activate one environment")
        else:
            yield Line("ok", name, path)


def builds() -> Iterator[Line]:
    """Report the killed builds of DeepSpeed's operators, and whether others can run."""
    from deepspeed.accelerator import get_accelerator

    for lock in build_locks():
        pid, text = state_of(lock)
        text, _, fix = text.partition(". ")
        yield Line("warning" if pid is None else "note", "build lock", text, fix)
    missing = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    if get_accelerator().device_name() == "cuda" and not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        missing.append("nvcc")
    if missing:
        text = f"operators are built when they are first used, which needs {' and '.join(missing)}"
        fix = 'install it, or set "torch_adam": true in optimizer.params to do without DeepSpeed\'s Adam'
        yield Line("warning", "DeepSpeed's ops", text, fix)


def variables(environment: Mapping[str, str], on_cuda: bool) -> Iterator[Line]:
    """Report the variables of CUDA, torch's allocator and NCCL that can make a pipeline hang or slow on GPUs."""
    if on_cuda:
        yield _queues(environment.get(_QUEUES, ""))
        yield _allocator(next((environment[name] for name in _ALLOCATOR if name in environment), ""))
        yield from _nccl(environment)
        yield _loading(environment.get(_LOADING, ""))
        yield from _bound_device(environment)


def _queues(value: str) -> Line:
    if value == "32":
        return Line("ok", _QUEUES, value)
    if value == "1":
        fix = f"set {_QUEUES}=32, unless Megatron's overlap of communication needs 1"
        return Line("warning", _QUEUES, "1: streams share one queue, and schedules that hang in it are refused", fix)
    text = f"{value or 'not set: 8'}: streams share queues by chance"
    return Line("note", _QUEUES, text, f"set {_QUEUES}=32; terapipe_ds.run sets it where it is not set")


def _allocator(value: str) -> Line:
    if "expandable_segments:true" in value.lower():
        return Line("ok", _ALLOCATOR[1], value)
    text = f"{value or 'not set'}: slices of many sizes split the memory, and a retry waits for all messages"
    return Line("warning", _ALLOCATOR[1], text, f"set {_ALLOCATOR[1]}=expandable_segments:True")


def _nccl(environment: Mapping[str, str]) -> Iterator[Line]:
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if environment.get(name) == "1":
            text = "1: the host waits for each message, and computations behind it begin late"
            yield Line("warning", name, text, f"unset {name}")
    if "NCCL_MAX_CTAS" in environment:
        text = f"{environment['NCCL_MAX_CTAS']}: in place of 4 blocks for a message between stages"
        yield Line("note", "NCCL_MAX_CTAS", text, "a receive that waits occupies as many multiprocessors")


def _loading(value: str) -> Line:
    if value == "EAGER":
        return Line("ok", _LOADING, "EAGER: one batch of a kind goes by way of the host")
    text = "kernels are loaded at their first launch: the first batches of a kind go by way of the host"
    return Line("note", _LOADING, text, f"{_LOADING}=EAGER starts slower, and spares two of three")


def _bound_device(environment: Mapping[str, str]) -> Iterator[Line]:
    """Report the device that DeepSpeed's `init_distributed` binds the rank's process group to (`comm/torch.py`)."""
    if (local_rank := environment.get("LOCAL_RANK", "")) != "":
        yield Line("ok", "LOCAL_RANK", f"{local_rank}: DeepSpeed binds this rank to cuda:{local_rank}")
    elif any(environment.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS")):
        text = "not set: DeepSpeed binds every rank to cuda:0, the first device that it sees"
        yield Line("warning", "LOCAL_RANK", text, "set LOCAL_RANK=$SLURM_LOCALID, unless each rank sees one device")


def checks(ranks: int | None) -> tuple[Check, ...]:
    """Return the checks of a machine for a number of ranks; None means that it is not known."""
    both = ("torch", "deepspeed")

    def environment() -> Iterator[Line]:
        from deepspeed.accelerator import get_accelerator

        return variables(os.environ, get_accelerator().device_name() == "cuda")

    return (
        Check("devices", devices, both),
        Check("attention", kernels, both),
        Check("cores", lambda: cores(ranks)),
        Check("limits", limits),
        Check("launchers", launchers),
        Check("DeepSpeed's ops", builds, both),
        Check("environment", environment, both),
    )
