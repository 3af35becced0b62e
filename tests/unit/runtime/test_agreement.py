"""What ranks tell one another: values, results, and errors that reach every rank."""

import itertools
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.agreement import (
    COMPARED_SECTIONS,
    ErrorsUnwrapped,
    RaisedEverywhere,
    digest,
    from_rank_0,
    gather,
    gather_results,
    refuse_everywhere,
    require_equal_configs,
    share,
)
from tests.unit.runtime.rank_threads import Ranks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(agreement, "torch_dist", ranks := Ranks(3))
    return ranks


class WithoutItsArgs(Exception):
    """Pickle writes it, and cannot read it again."""

    def __init__(self, *, stage: int) -> None:
        super().__init__(f"stage {stage}")


def fail(error: Exception) -> Any:
    raise error


class TestValues:
    def test_in_the_order_of_ranks(self, ranks: Ranks) -> None:
        assert ranks.run(lambda rank: gather(10 * rank)) == [[0, 10, 20]] * 3
        assert ranks.run(lambda rank: gather(rank, (0, 2)) if rank != 1 else None) == [[0, 2], None, [0, 2]]

    def test_on_the_cpu_where_the_ranks_talk_by_devices(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        made = mock.Mock(return_value=(0, 1, 2))
        for name, function in (("get_backend", lambda: "nccl"), ("new_group", made)):
            monkeypatch.setattr(ranks, name, function, raising=False)
        assert ranks.run(lambda rank: gather(rank, (0, 1, 2))) == [[0, 1, 2]] * 3
        assert not made.called, "a group on the CPU is given"
        agreement._on_the_host(ranks.group.WORLD)  # threads would each make one
        assert [ranks.run(gather) for _ in range(2)] == [[[0, 1, 2]] * 3] * 2
        made.assert_called_once_with(backend="gloo")

    def test_only_rank_0_is_asked(self, ranks: Ranks) -> None:
        asked: list[int] = []
        assert ranks.run(lambda rank: from_rank_0(lambda: asked.append(rank) or 7)) == [7] * 3
        assert asked == [0]


class TestErrors:
    @pytest.mark.parametrize(("error", "kind", "text"), [
        (ValueError("no plan"), ValueError, "no plan"),
        (KeyError("layer"), KeyError, "'layer'"),
        (WithoutItsArgs(stage=3), RuntimeError, "rank 0: WithoutItsArgs: stage 3"),
        (TypeError(lambda: 0), RuntimeError, "rank 0: TypeError: <function"),
    ])  # fmt: skip
    def test_an_error_of_rank_0_is_raised_everywhere(
        self, error: Exception, kind: Any, text: str, ranks: Ranks
    ) -> None:
        for act in (from_rank_0, gather_results):
            own, *others = ranks.run(lambda rank, act=act: act(lambda: fail(error) if rank == 0 else None))
            assert own is error and all(type(other) is kind and text in str(other) for other in others)

    def test_the_first_rank_that_fails_is_told(self, ranks: Ranks) -> None:
        errors = {1: OSError("disk"), 2: ValueError("other")}
        results = ranks.run(lambda rank: gather_results(None if rank not in errors else lambda: fail(errors[rank])))
        assert [type(each) for each in results] == [OSError] * 3
        assert results[1] is errors[1] and results[0].__notes__ == ["on rank 1"]

    def test_a_refusal_names_the_rank(self, ranks: Ranks) -> None:
        for error in ranks.run(lambda rank: refuse_everywhere("no copies" if rank == 2 else None)):
            assert isinstance(error, TeraPipeConfigError) and str(error) == "on rank 2: no copies"
        assert ranks.run(lambda rank: refuse_everywhere(None)) == [None] * 3

    @pytest.mark.parametrize("error", [StopIteration(), ValueError("x"), SystemExit(1)])
    def test_a_user_gets_the_error_itself(self, error: BaseException) -> None:
        error.__cause__ = cause = KeyError("why")
        with pytest.raises(type(error)) as caught, ErrorsUnwrapped():
            raise RaisedEverywhere(error)
        assert caught.value is error and error.__cause__ is cause


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_shares_sum_up_to_zero_for_equal_digests_only(values: list[int]) -> None:
    numbers = [digest("some", value) for value in values]
    total = sum(share(number, index, len(numbers)) for index, number in enumerate(numbers))
    assert (total == 0) == (len(set(values)) == 1)
    assert all(0 <= number < 2**40 for number in numbers)


# -- ranks with different configs --------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "terapipe": {"enabled": True, "slices": 4},
}


def check(monkeypatch: pytest.MonkeyPatch, *configs: dict[str, Any]) -> Ranks:
    ranks = Ranks(len(configs))
    monkeypatch.setattr(agreement, "torch_dist", ranks)
    monkeypatch.setattr(agreement, "_meetings", itertools.repeat(1))
    errors = ranks.run(lambda rank: require_equal_configs(configs[rank]))
    assert len({(type(error), str(error)) for error in errors}) == 1, "all ranks say the same"
    if errors[0] is not None:
        raise errors[0]
    return ranks


def test_equal_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    reordered = dict(reversed(CONFIG.items())) | {"optimizer": {"params": {"lr": 1e-3}, "type": "Adam"}}
    own = {**CONFIG, "csv_monitor": {"enabled": True}, "wall_clock_breakdown": True}  # which ranks may have
    assert check(monkeypatch, CONFIG, reordered, own).calls == [[]] * 3, "the store is enough"


@pytest.mark.parametrize("section", COMPARED_SECTIONS)
def test_everything_that_decides_on_messages_is_compared(monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    other = {**CONFIG, section: {"enabled": True, "other": 1}}
    with pytest.raises(TeraPipeConfigError, match=rf"\n  {section}: ranks \[0\]: .*; ranks \[1\]: "):
        check(monkeypatch, CONFIG, other)


@pytest.mark.parametrize("section", [None, {}, {"enabled": False}])
def test_without_an_enabled_section_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, section: Any) -> None:
    config = {**CONFIG, "terapipe": section}
    check(monkeypatch, config, {**config, "gradient_clipping": 0.5})


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = agreement._compared(CONFIG)
    assert Version(ours["version of torch"]).public == Version(torch.__version__).public  # which may name its build
    assert ours["version of python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    theirs = {**ours, "version of deepspeed": "0.0.1", "version of megatron-core": "not at all"}
    values = {"ours": ours, "theirs": theirs}
    monkeypatch.setattr(agreement, "_compared", lambda raw: values[raw["whose"]])
    with pytest.raises(TeraPipeConfigError) as caught:
        check(monkeypatch, {**CONFIG, "whose": "ours"}, {**CONFIG, "whose": "theirs"})
    lines = str(caught.value).splitlines()[1:]
    assert lines[0] == f"  version of deepspeed: ranks [0]: {ours['version of deepspeed']}; ranks [1]: 0.0.1"
    assert lines[1].startswith("  version of megatron-core: ranks [0]: ")
    assert len(lines) == 2
