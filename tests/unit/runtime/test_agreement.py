"""Ranks with different configs: the comparison, with the other ranks played by a stand-in."""

from __future__ import annotations

from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.agreement import COMPARED_SECTIONS, require_equal_configs

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "terapipe": {"enabled": True, "slices": 4},
}


class Ranks:
    """torch.distributed with ranks whose configs are all known."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        self.configs = configs
        self.asked = 0

    def is_initialized(self) -> bool:
        return bool(self.configs)

    def get_world_size(self) -> int:
        return len(self.configs)

    def new_group(self, backend: str) -> str:
        assert backend == "gloo", "the accelerator has no device yet"
        return "on the CPU"

    def destroy_process_group(self, group: str) -> None:
        assert group == "on the CPU"

    def all_gather_object(self, everyone: list[Any], mine: Any, group: str) -> None:
        assert group == "on the CPU"
        self.asked += 1
        everyone[:] = [agreement._compared(config) for config in self.configs]
        assert mine in everyone


def check(monkeypatch: pytest.MonkeyPatch, *configs: dict[str, Any]) -> Ranks:
    """Every rank compares."""
    ranks = Ranks(list(configs))
    monkeypatch.setattr(agreement, "torch_dist", ranks)
    messages = set()
    for config in configs:
        try:
            require_equal_configs(config)
        except TeraPipeConfigError as error:
            messages.add(str(error))
        else:
            messages.add("")
    assert len(messages) == 1, "all ranks say the same"
    if messages != {""}:
        raise TeraPipeConfigError(messages.pop())
    return ranks


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def test_equal_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    reordered = dict(reversed(CONFIG.items())) | {"optimizer": {"params": {"lr": 1e-3}, "type": "Adam"}}
    assert check(monkeypatch, CONFIG, reordered, CONFIG).asked == 3


def test_both_sides_are_shown_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    other = changed(terapipe={"enabled": True, "slices": 8})
    with pytest.raises(TeraPipeConfigError) as caught:
        check(monkeypatch, CONFIG, other, CONFIG)
    assert str(caught.value).splitlines()[1:] == [
        '  terapipe: ranks [0, 2]: {"enabled": true, "slices": 4}; ranks [1]: {"enabled": true, "slices": 8}'
    ]
    assert "every rank must be given the same one" in str(caught.value)


@pytest.mark.parametrize("section", COMPARED_SECTIONS)
def test_everything_that_decides_on_messages_is_compared(monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    other = changed(**{section: {"enabled": True, "other": 1}})
    with pytest.raises(TeraPipeConfigError, match=rf"\n  {section}: ranks \[0\]: .*; ranks \[1\]: "):
        check(monkeypatch, CONFIG, other)


def test_every_difference_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = changed(gradient_clipping=0.5, bf16={"enabled": True})
    with pytest.raises(TeraPipeConfigError) as caught:
        check(monkeypatch, CONFIG, other)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "bf16", "gradient_clipping"
    ]  # fmt: skip


def test_a_rank_without_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {key: value for key, value in CONFIG.items() if key != "terapipe"}
    with pytest.raises(TeraPipeConfigError, match=r"terapipe: ranks \[0\]: null; ranks \[1\]: "):
        check(monkeypatch, without, CONFIG)


def test_what_ranks_may_have_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, CONFIG, changed(csv_monitor={"enabled": True}, steps_per_print=1, wall_clock_breakdown=True))


@pytest.mark.parametrize("section", [None, {}, {"enabled": False}])
def test_without_an_enabled_section_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, Any] | None
) -> None:
    check(monkeypatch, changed(terapipe=section), changed(terapipe=section, gradient_clipping=0.5))


@pytest.mark.parametrize("configs", [[], [CONFIG]])
def test_a_single_process_asks_nobody(monkeypatch: pytest.MonkeyPatch, configs: list[dict[str, Any]]) -> None:
    ranks = Ranks(configs)
    monkeypatch.setattr(agreement, "torch_dist", ranks)
    require_equal_configs(CONFIG)
    assert ranks.asked == 0
