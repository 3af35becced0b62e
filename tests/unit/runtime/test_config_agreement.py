"""Ranks with different configs: the comparison, with ranks that are threads."""

import itertools
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.agreement import COMPARED_SECTIONS, require_equal_configs
from tests.unit.runtime.rank_threads import Ranks

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
def test_without_an_enabled_section_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, Any] | None
) -> None:
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
