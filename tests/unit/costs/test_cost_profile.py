import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.costs.profile import (
    CostSample,
    LayerProfile,
    LayerProfiles,
    LinkSample,
    Overhead,
    PartProfile,
    Profile,
    ProfileError,
    ProfileKey,
)

VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.8"}
KEY = ProfileKey("5f2c", "tiny, 4 layers", "cpu", "fp32", 2, 1, 2, False, 1024, "cpu_flash", VERSIONS)
SAMPLES = (CostSample(256, 0, 0.01, 0.02, 0.05, 0.04, 5), CostSample(256, 512, 0.013, 0.029, 0.01, 0.02, 5))


def one_part(part_id: int, **changes: Any) -> Profile:
    part = PartProfile(part_id, SAMPLES, step_s=0.004)
    return Profile(dataclasses.replace(KEY, **changes), (part,), (LinkSample(256, 1e-4, part_id, 0.1, 9),))


def document(profile: Profile | None = None) -> dict[str, Any]:
    return json.loads((profile or one_part(0)).to_json())


def test_the_file_says_what_it_is_and_holds_plain_numbers() -> None:
    written = document()
    assert (written["format"], written["version"]) == ("terapipe_ds.profile", 2)
    assert set(written) == {"format", "version", "key", "parts", "links", "pipeline_stages", "layers", "state_ranks"}
    assert written["parts"][0]["samples"][1] == {
        "tokens": 256, "prefix": 512, "forward_s": 0.013, "backward_s": 0.029, "forward_spread": 0.01,
        "backward_spread": 0.02, "repeats": 5, "weight_s": None, "attention_s": None,
    }  # fmt: skip
    (link,) = written["links"]
    assert link == {"tokens": 256, "send_s": 1e-4, "part_id": 0, "spread": 0.1, "repeats": 9, "num_bytes": None}
    assert written["key"]["versions"] == {"deepspeed": "0.19.8", "torch": "2.13.0"}


@pytest.mark.parametrize(
    "path",
    [
        "parts.0.overheads",
        "parts.0.memory",
        "pipeline_stages",
        "state_ranks",
        "key.layers_fingerprint",
        "links.0.num_bytes",
    ],
)
def test_what_is_not_known_may_be_missing(path: str) -> None:
    shorter = document()
    delete_at(shorter, path)
    assert Profile.from_json(json.dumps(shorter)) == one_part(0)


def test_what_came_later_is_kept() -> None:
    memory = {"static_bytes": 2**70, "slice_bytes_per_token": 1.5, "weight": None}
    part = dataclasses.replace(one_part(0).parts[0], memory=memory, overheads=(Overhead(256, 0.0, 1e-3),))
    kinds = LayerProfile(SAMPLES, 7, 5, 64.0, memory), LayerProfile(SAMPLES, 0, 0, 0.5)
    layers = LayerProfiles(kinds, (0, 1, 0), (0, 3))
    link = LinkSample(256, 1e-4, 0, num_bytes=4096)
    parts = {"parts": (part,), "links": (link,), "pipeline_stages": 2, "layers": layers}
    profile = dataclasses.replace(one_part(0, num_stages=4), **parts)
    assert Profile.from_json(profile.to_json()) == profile


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("what stood here before")
    one_part(0).save(path)
    assert Profile.load(path) == one_part(0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read the profile .*none\.json.*give the file"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="give a folder that exists"):
        one_part(0).save(tmp_path / "none" / "profile.json")


def at(where: Any, path: str) -> tuple[Any, str]:
    *above, last = path.split(".")
    for step in above:
        where = where[int(step)] if step.isdigit() else where[step]
    return where, last


def delete_at(where: Any, path: str) -> None:
    holder, last = at(where, path)
    del holder[last]


SAMPLE = {"tokens": 256, "prefix": 0, "forward_s": 0.01, "backward_s": 0.02}
KIND = {"samples": [SAMPLE], "parameters": 7, "trained_parameters": 7, "output_bytes_per_token": 64}
LAYERS = {"kinds": [KIND], "kind_of": [0, 0], "bounds": [0, 2]}


@pytest.mark.parametrize(("path", "value", "message"), [
    ("format", "something", "is not a profile.*give the file"),
    ("version", 3, "version 3, this package reads 2: update terapipe_ds"),
    ("version", 1, "version 1, this package reads 2: measure again and replace it"),
    ("version", 0, "version 0.*measure again"),
    ("extra", 1, "the file has an unknown key 'extra'"),
    ("parts", [], "parts = .*: expected at least 1 item"),
    ("key.micro_batch", 0, "key.micro_batch = 0: expected greater than or equal to 1"),
    ("key.sequence_length", 100, "sequence_length = 100: expected what was measured, 768"),
    ("key.surprise", 1, "key has an unknown key 'surprise'"),
    ("pipeline_stages", 3, "pipeline_stages = 3: expected 1 to the number of parts, 2"),
    ("layers", LAYERS | {"kind_of": [0, 1]}, "kind_of = 1: expected an index of the 1 kinds"),
    ("layers", LAYERS | {"bounds": [0, 1]}, "expected rising layer numbers, 0 to 2"),
    ("layers", LAYERS | {"bounds": [0, 1, 2]}, r"layers.bounds = \[0, 1, 2\]: expected 1 part"),
    ("layers", LAYERS | {"kinds": [KIND | {"trained_parameters": 8}]}, "trained_parameters = 8: expected .* to 7"),
    ("layers", LAYERS | {"kinds": [KIND | {"samples": [SAMPLE | {"prefix": 900}]}]}, "expected what was .* 1156"),
    ("parts.0.overheads", [{"tokens": 8, "forward_s": 0.0, "backward_s": -1.0}], "backward_s = -1.0"),
    ("parts.0.memory", {"static_bytes": -1}, "memory.static_bytes.* = -1: expected greater than or equal to 0"),
    ("parts.0.step_s", 0.0, "step_s = 0.0: expected greater than 0"),
    ("parts.0.samples.0.forward_s", math.nan, r"parts\[0\].samples\[0\].forward_s = nan: expected a finite"),
    ("parts.0.samples.0.backward_s", True, "backward_s = True"),
    ("parts.0.samples.0.tokens", 1.5, "tokens = 1.5: expected a valid integer"),
    ("parts.0.samples.0.weight_s", 0.5, "weight_s = 0.5: expected at most the whole backward"),
    ("parts.0.samples.0.prefix", 512, r"\(tokens, prefix\) = \(256, 512\) occurs twice"),
    ("links.0.send_s", -1e-4, r"links\[0\].send_s = -0.0001"),
])  # fmt: skip
def test_bad_fields(path: str, value: Any, message: str) -> None:
    wrong = document()
    holder, last = at(wrong, path)
    holder[last] = value
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.from_json(json.dumps(wrong), "profile x.json")
    assert str(caught.value).startswith("profile x.json")


@pytest.mark.parametrize(
    "path", ["key", "parts", "key.device", "parts.0.samples", "parts.0.samples.1.prefix", "links.0.send_s"]
)
def test_missing_keys(path: str) -> None:
    wrong = document()
    delete_at(wrong, path)
    with pytest.raises(ProfileError, match=f"lacks {path.split('.')[-1]}; measure again"):
        Profile.from_json(json.dumps(wrong))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '"text"', "[" * 100_000, b"\xff\xfe\x00", '{"key": 1, "key": 2}']
)
def test_what_is_no_profile_at_all(text: str | bytes) -> None:
    with pytest.raises(ProfileError, match="measure again|give the file"):
        Profile.from_json(text)


def test_twice_the_same_link_or_part() -> None:
    part = PartProfile(0, SAMPLES)
    with pytest.raises(ValueError, match="part_id = 0 occurs twice"):
        Profile(KEY, (part, part))
    with pytest.raises(ValueError, match=r"links: \(tokens, part_id\) = \(8, None\) occurs twice"):
        Profile(KEY, (part,), (LinkSample(8, 0.1), LinkSample(8, 0.2)))


CHANGES = {
    "model_fingerprint": "ffff", "device": "NVIDIA H100", "dtype": "bf16", "micro_batch": 4, "tensor_parallel": 2,
    "num_stages": 4, "activation_checkpointing": True, "attention_backend": "sdpa", "sequence_length": 2048,
    "versions": {"torch": "2.14.0", "deepspeed": "0.19.8"},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_one_line_for_what_differs(name: str) -> None:
    expected = dataclasses.replace(KEY, **{name: CHANGES[name]})
    with pytest.raises(ProfileError) as caught:
        one_part(0).require(expected)
    head, line = str(caught.value).split("\n  ")
    assert "does not belong to this run" in head and line.startswith(f"{name}: the profile has ") and "measure" in line
    shown = [str(v) for v in (getattr(KEY, name), CHANGES[name])]
    if name == "versions":
        shown = ["torch 2.13.0", "torch 2.14.0"]
    assert all(text in line for text in shown)
    one_part(0).require(expected, ignore=(name,))


def test_what_is_no_mismatch() -> None:
    one_part(0).require(KEY)
    one_part(0).require(dataclasses.replace(KEY, model="another description"))
    one_part(0).require(dataclasses.replace(KEY, sequence_length=512))  # a longer one serves a shorter one
    with pytest.raises(ProfileError) as caught:
        one_part(0).require(dataclasses.replace(KEY, **CHANGES))
    assert len(str(caught.value).splitlines()) == 1 + len(CHANGES)
    fields = {field.name for field in dataclasses.fields(ProfileKey)}
    assert fields - {"model", "layers_fingerprint"} == set(CHANGES)  # the latter says less than model_fingerprint
