import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.costs.devices import FILE, DeviceError, device_card, device_cards
from terapipe_ds.costs.model_sizes import model_size
from terapipe_ds.costs.utilisation import Utilisation

GIB = 2**30 / 1e9  # of cards whose memory counts as decimal gigabytes, rather less than more than they have
# Dense FLOP/s in TFLOP/s, GB/s and GiB, from the data sheets named in the cards.
SHEETS = {
    "v100-16gb": (15.7, None, 125, None, 900, 16),
    "v100-32gb": (15.7, None, 125, None, 900, 32),
    "a100-40gb": (19.5, 156, 312, 312, 1555, 40),
    "a100-80gb": (19.5, 156, 312, 312, 2039, 80),
    "h100-sxm": (67, 494.7, 989.4, 989.4, 3350, 80),
    "h200": (67, 494.7, 989.4, 989.4, 4800, 140),  # sold as 141 GB
    "h800": (67, 494.7, 989.4, 989.4, 3350, 80),
    "b200": (75, 1125, 2250, 2250, 8000, 180 / GIB),
    "gb200": (80, 1250, 2500, 2500, 8000, 186 / GIB),
    "mi355x": (157.3, None, 2516.6, 2516.6, 8000, 288 / GIB),
    "mi300x": (163.4, 653.7, 1307.4, 1307.4, 5300, 192 / GIB),
    "l40s": (91.6, 183, 362, 362, 864, 48 / GIB),
    "rtx-4090": (82.6, 82.6, 165.2, 165.2, 1008, 24 / GIB),
    "a10": (31.2, 62.5, 125, 125, 600, 24 / GIB),
    "a10g": (35, 35, 70, 70, 600, 24 / GIB),
    "t4": (8.1, None, 65, None, 320, 16 / GIB),
}


@pytest.mark.parametrize("name", SHEETS)
def test_cards_against_data_sheets(name: str) -> None:
    card = device_card(name)
    peaks = [card.peak_flops[dtype] for dtype in ("fp32", "tf32", "fp16", "bf16")]
    assert [peak and round(peak / 1e12, 1) for peak in peaks] == list(SHEETS[name][:4])
    assert card.memory_bandwidth_bytes_per_s == SHEETS[name][4] * 1e9
    assert card.memory_bytes / 2**30 == pytest.approx(SHEETS[name][5], rel=1e-3)


def test_every_number_has_a_source() -> None:
    assert set(device_cards()) == {*SHEETS, "cpu-core"}
    for card in device_cards().values():
        assert card.source and card.node_link.source and card.network_link.source
        assert card.node_link.bandwidth_bytes_per_s > card.network_link.bandwidth_bytes_per_s
        assert "assumption" in card.source or card.kernel_source  # efficiencies are no vendor's figures, and say so
        assert card.name == "cpu-core" or (card.host_link and card.host_link.source and card.host_memory_bytes)
        peak = card.attention_backward_efficiency or card.attention_efficiency
        assert peak <= card.attention_efficiency <= card.matmul_efficiency or card.name == "b200"
    names = [n for c in device_cards().values() for n in (c.name, *c.aliases)]
    assert len({name.lower() for name in names}) == len(names)
    assert json.loads(FILE.read_text())["format"] == "terapipe_ds.devices"


def test_names() -> None:
    assert device_card("V100") is device_card("v100-16gb")
    assert [device_card(n).name for n in ("a100", "h100", "cpu")] == ["a100-80gb", "h100-sxm", "cpu-core"]
    with pytest.raises(
        DeviceError, match="unknown device 'h300'; did you mean 'h[128]00'. Known: v100-16gb, v100-32gb"
    ):
        device_card("h300")
    with pytest.raises(DeviceError, match="unknown device None"):
        device_card(None)  # type: ignore[arg-type]


def test_dtypes() -> None:
    v100, h100, core = device_card("v100"), device_card("h100"), device_card("cpu")
    assert [card.resolve_dtype("auto") for card in (h100, v100, core)] == ["bf16", "fp16", "fp32"]
    assert [h100.resolve_dtype(name) for name in ("float32", "half", "bfloat16")] == ["fp32", "fp16", "bf16"]
    for card, dtype, listed in ((v100, "bf16", "fp32, fp16, or auto"), (core, "fp16", "give one of fp32, or auto")):
        with pytest.raises(DeviceError, match=f"dtype = '{dtype}': .*has no such arithmetic.*{listed}"):
            card.resolve_dtype(dtype)
    with pytest.raises(DeviceError, match="dtype = 16"):
        h100.resolve_dtype(16)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("kernel_floor_s", 0.0, "kernel_floor_s = 0.0: expected greater than 0"),
    ("matmul_efficiency", 1.5, "matmul_efficiency = 1.5: expected less than or equal to 1"),
    ("node_link", {"bandwidth_bytes_per_s": 1e9, "latency_s": float("inf")}, "node_link.latency_s = inf: expected"),
    ("network_link", {"latency_s": 1.0}, "network_link lacks bandwidth_bytes_per_s"),
    ("peak_flops", {"tf32": 1e12}, "peak_flops = {'tf32': 1"),
    ("peak_flops", {"fp64": 1e12}, "peak_flops = {'fp64': 1"),
    ("surprise", 1, "has an unknown key 'surprise'"),
])  # fmt: skip
def test_bad_cards(tmp_path: Path, field: str, value: Any, message: str) -> None:
    card, path = json.loads(FILE.read_text())["devices"][1], tmp_path / "card.json"
    path.write_text(json.dumps(card | {field: value}))
    with pytest.raises(DeviceError, match=f"card.json: .*{message}.*; give .*docs/strategy.md has an example"):
        device_card(str(path))


def test_a_number_of_bytes_may_have_an_exponent(tmp_path: Path) -> None:
    card, path = json.loads(FILE.read_text())["devices"][1], tmp_path / "card.json"
    path.write_text(json.dumps(card | {"memory_bytes": 80e9}))
    assert device_card(str(path)).memory_bytes == 80_000_000_000
    path.write_text(json.dumps(card | {"memory_bytes": 80.5}))
    with pytest.raises(DeviceError, match="memory_bytes = 80.5: expected a valid integer"):
        device_card(str(path))


def test_a_card_of_ones_own_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="kernel_floor_s"):
        dataclasses.replace(device_card("h100"), kernel_floor_s=0.0)


@pytest.mark.parametrize(("mfu", "warns"), [(0.42, False), (0.44, True)])
def test_a_share_of_the_peak_that_nobody_has_published_is_a_warning(mfu: float, warns: bool) -> None:
    size, card = model_size("llama-3-8b"), device_card("h100")
    seconds = 4 * size.training_flops(8192) / (2 * mfu * 989.4e12)  # of four sequences on two devices
    use = Utilisation.of(size, card, "bf16", (4, 8192), seconds, 2)
    assert use.mfu == pytest.approx(mfu) and use.tokens_per_s_per_device == pytest.approx(4 * 8192 / seconds / 2)
    assert any(line.startswith("warning: above all published runs") for line in use.lines(card)) is warns
