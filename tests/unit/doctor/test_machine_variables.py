"""Variables that can make a pipeline hang or slow on GPUs."""

import pytest

from terapipe_ds.doctor.machine import variables

BEST = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_MODULE_LOADING": "EAGER",
}


def verdicts(environment: dict[str, str]) -> dict[str, str]:
    return {line.name: line.verdict for line in variables(environment, on_cuda=True) if line.verdict != "ok"}


def test_the_best_ones_and_a_machine_without_a_gpu() -> None:
    assert verdicts(BEST) == {} and len(list(variables(BEST, on_cuda=True))) == 3
    assert list(variables({}, on_cuda=False)) == []


def test_none_is_set() -> None:
    assert verdicts({}) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "note",
        "PYTORCH_CUDA_ALLOC_CONF": "warning",
        "CUDA_MODULE_LOADING": "note",
    }


@pytest.mark.parametrize(("name", "value", "verdict"), [
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warning"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "note"),
    ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", "warning"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "warning"),
    ("NCCL_MAX_CTAS", "16", "note"),
    ("CUDA_MODULE_LOADING", "LAZY", "note"),
])  # fmt: skip
def test_one_of_them_is_not(name: str, value: str, verdict: str) -> None:
    assert verdicts({**BEST, name: value}) == {name: verdict}
    (line,) = (line for line in variables({**BEST, name: value}, on_cuda=True) if line.name == name)
    assert line.fix and (value in line.found or name == "CUDA_MODULE_LOADING")


@pytest.mark.parametrize("ranks", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "16"}])
def test_ranks_that_are_all_bound_to_the_first_device(ranks: dict[str, str]) -> None:
    """DeepSpeed takes 0 where LOCAL_RANK is not set: so do jobs of `srun`."""
    assert verdicts({**BEST, **ranks}) == {"LOCAL_RANK": "warning"}
    bound = {**BEST, **ranks, "LOCAL_RANK": "1"}
    assert verdicts(bound) == {} and any("cuda:1" in line.found for line in variables(bound, on_cuda=True))
    assert verdicts({**BEST, **dict.fromkeys(ranks, "1")}) == {}


def test_the_allocators_new_name_is_read() -> None:
    environment = {**BEST, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    del environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert verdicts(environment) == {}
