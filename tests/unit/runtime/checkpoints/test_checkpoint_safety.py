"""What a resume finds in a folder, and who may save there. No rank, no engine: files alone."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.files.atomic import write_text
from terapipe_ds.runtime.checkpoints.choose import choose_checkpoint
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, checksum_of
from terapipe_ds.runtime.checkpoints.save import CheckpointPaths

FILES = ("mp_rank_00_model_states.pt", "layer_00-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
OWN, RIVAL = "00000000", "0a1b2c3d"  # ids of jobs


def save(folder: Path, tag: str, steps: int, is_latest: bool = True, finish: bool = True) -> CheckpointPaths:
    """What all ranks and then the first one do, with files that hold the number of steps."""
    place = CheckpointPaths(folder, tag, OWN)
    place.settle()
    fill(place.saving, steps)
    sizes = {name: (place.saving / name).stat().st_size for name in FILES}
    sums = {name: checksum_of(place.saving / name) for name in FILES}
    Manifest(tag=tag, global_steps=steps, is_latest=is_latest, files=sizes, checksums=sums).write(place.saving)
    if finish:
        place.commit()
        if is_latest:
            write_text(folder / "latest", tag)
    return place


def fill(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"{steps} " * steps)


def steps_of(folder: Path, tag: str | None = None) -> int:
    """By what stands in the files that a load would read; all must be of one save."""
    found = choose_checkpoint(folder, tag)
    texts = [(folder / str(found.read_as) / name).read_text() for name in FILES]
    steps = int(texts[0].split()[0])
    assert texts == [f"{steps} " * steps] * len(FILES)
    return steps


def test_what_a_user_has_put_beside_the_files_stays_and_files_of_another_layout_go(tmp_path: Path) -> None:
    place = save(tmp_path, "last", 1)
    (place.final / "notes").mkdir()
    (place.final / "notes" / "a").write_text("mine")
    name = "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    (place.final / name).write_text("of eight replicas")
    sizes = {**json.loads((place.final / MANIFEST).read_text())["files"], name: 17}
    Manifest(tag="last", global_steps=1, is_latest=True, files=sizes).write(place.final)
    save(tmp_path, "last", 2)
    assert (place.final / "notes" / "a").read_text() == "mine"
    assert not (place.final / name).exists()


def test_states_that_deepspeed_itself_had_saved_under_a_tag_go(tmp_path: Path) -> None:
    """A load would mix them with the new ones: DeepSpeed reads each file of a layer that it finds."""
    stock = ("layer_00-model_01-model_states.pt", "mp_rank_03_model_states.pt", f"bf16_{FILES[2]}")
    (tmp_path / "last" / "best").mkdir(parents=True)  # a checkpoint of another tag
    others = ("ema_model_states.pt", "notes", f"best/{FILES[0]}")
    for name in (*stock, *others):
        (tmp_path / "last" / name).touch()
    save(tmp_path, "last", 2)
    there = {str(path.relative_to(tmp_path / "last")) for path in (tmp_path / "last").rglob("*") if path.is_file()}
    assert there == {*FILES, MANIFEST, *others}


def test_latest_is_written_before_an_older_one_is_removed(tmp_path: Path) -> None:
    """A file system may refuse to remove what another program reads."""
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    place = save(tmp_path, "a", 3, finish=False)
    with mock.patch("shutil.rmtree", side_effect=OSError(errno.EBUSY, "EBUSY")), pytest.raises(OSError, match="EBUSY"):
        place.commit(is_latest=True)
    assert steps_of(tmp_path) == 3


# -- what is chosen --------------------------------------------------------------------------------------------


def test_latest_is_believed_where_it_names_a_whole_one(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save(tmp_path, f"global_step{steps}", steps)
    assert steps_of(tmp_path) == 3
    write_text(tmp_path / "latest", "global_step1")  # how people go back
    assert steps_of(tmp_path) == 1
    assert choose_checkpoint(tmp_path, None).note is None


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda folder: (folder / "c" / FILES[0]).unlink(), "mp_rank_00_model_states.pt is missing"),
    (lambda folder: (folder / "c" / FILES[1]).write_text("3"), "layer_00-model_states.pt has 1 bytes of 6"),
    (lambda folder: (folder / "c" / "layer_00-model_01-model_states.pt").touch(), "01-model_states.pt is not in"),
    (lambda folder: shutil.rmtree(folder / "c"), "names c, which does not exist"),
    (lambda folder: (folder / "latest").unlink(), "latest is missing"),
    (lambda folder: (folder / "latest").write_text(""), "latest is empty"),
    (lambda folder: (folder / "latest").write_bytes(b"\xff\xfe"), "latest cannot be read ('utf-8'"),
    (lambda folder: (folder / "latest").write_text("c\x00"), "latest names no tag"),
    (lambda folder: (folder / "latest").write_text("c" * 5000), "latest names no tag: 'ccc"),
    (lambda folder: os.truncate(folder / "c" / MANIFEST, 2**27), "more than 64 MiB"),
    (lambda folder: (folder / "c" / MANIFEST).write_text("{"), "no list of version 1"),
    (lambda folder: changed_list(folder / "c", global_steps=9), "is damaged"),
    (lambda folder: changed_list(folder / "c", files={"../x": 1}, checksums={}), "no list of version 1"),
    (lambda folder: changed_list(folder / "c", training={"x": float("inf")}, checksums={}), "no list of version 1"),
])  # fmt: skip
def test_the_newest_whole_one_is_loaded_and_it_is_said(spoil: Callable[[Path], Any], says: str, tmp_path: Path) -> None:
    for steps, tag in enumerate("xyb", start=1):
        save(tmp_path, tag, steps, is_latest=tag != "b")  # b was not to be the latest
    save(tmp_path, "c", 3)
    if "latest" in says:
        shutil.rmtree(tmp_path / "c")
    spoil(tmp_path)
    found = choose_checkpoint(tmp_path, None)
    assert found.tag == "y"
    assert found.note is not None
    assert says in found.note
    assert "y is loaded, the newest whole checkpoint" in found.note


def changed_list(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    assert document["checksums"]
    (folder / MANIFEST).write_text(json.dumps({**document, **changes}))


def test_lists_are_read_by_later_versions_that_have_more_fields(tmp_path: Path) -> None:
    class Later(Manifest):
        more: int = 1

    save(tmp_path, "a", 1)
    assert isinstance(Later.read(tmp_path / "a"), Later)


def test_a_named_one_that_is_not_whole_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    place = save(tmp_path, "b", 2)
    (place.final / FILES[0]).unlink()
    (place.final / FILES[1]).write_text("2")
    with pytest.raises(CheckpointError) as caught:
        choose_checkpoint(tmp_path, "b")
    assert f"{FILES[0]} is missing" in str(caught.value)
    assert f"{FILES[1]} has 1 bytes of 4" in str(caught.value)
    fill(CheckpointPaths(tmp_path, "c", OWN).saving, 3)
    with pytest.raises(CheckpointError, match="c was killed before all files were written"):
        choose_checkpoint(tmp_path, "c")
    (tmp_path / "a" / FILES[0]).unlink()
    with pytest.raises(CheckpointError, match="no other whole checkpoint"):
        choose_checkpoint(tmp_path, None)


def test_parameters_alone_need_no_optimizer_files(tmp_path: Path) -> None:
    place = save(tmp_path, "a", 1)
    (place.final / FILES[2]).unlink()
    assert choose_checkpoint(tmp_path, "a", with_optimizer=False).read_as == "a"
    with pytest.raises(CheckpointError, match="optim_states.pt is missing"):
        choose_checkpoint(tmp_path, "a", with_optimizer=True)


def test_what_deepspeed_has_written_is_for_deepspeed_to_judge(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, None) == choose_checkpoint(tmp_path / "no folder", None)
    assert choose_checkpoint(tmp_path, None).read_as is None
    with pytest.raises(CheckpointError, match="has no checkpoint 'nothing': give the tag of another one"):
        choose_checkpoint(tmp_path, "nothing")
    fill(tmp_path / "stock", 1)
    write_text(tmp_path / "latest", "stock")
    for tag in (None, "stock"):
        found = choose_checkpoint(tmp_path, tag)
        assert (found.tag, found.read_as, found.manifest, found.note) == ("stock", "stock", None, None)
    save(tmp_path, "stock", 2, finish=False)
    (tmp_path / "stock").rename(CheckpointPaths(tmp_path, "stock").replaced)  # a kill between the two moves
    assert steps_of(tmp_path) == 2
    (CheckpointPaths(tmp_path, "stock", OWN).saving / FILES[0]).unlink()
    assert steps_of(tmp_path) == 1
    shutil.rmtree(CheckpointPaths(tmp_path, "stock", OWN).saving)
    with pytest.raises(CheckpointError, match="stock, which does not exist. There is no other whole"):
        choose_checkpoint(tmp_path, None, damaged={".stock.replaced": "it is cut short"})


# -- who saves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_another_job_has_left_is_finished_or_removed(is_whole: bool, tmp_path: Path) -> None:
    """A job cannot tell a rival that is still saving from one that was killed: the files of two never mix."""
    rival, place = CheckpointPaths(tmp_path, "a", RIVAL), CheckpointPaths(tmp_path, "a", OWN)
    other = save(tmp_path, "a.b", 1, finish=False)
    save(tmp_path, "a", 1, finish=False).saving.rename(rival.saving)
    if not is_whole:
        (rival.saving / FILES[0]).unlink()
    place.prepare()
    assert place.all_saving() == [place.saving] and [*place.saving.iterdir()] == [] and other.saving.is_dir()
    assert place.final.exists() == is_whole


@pytest.mark.parametrize("is_there", [True, False])
def test_a_tag_that_is_a_symbolic_link_is_refused(is_there: bool, tmp_path: Path) -> None:
    save(tmp_path, "elsewhere", 1)
    (tmp_path / "a").symlink_to("elsewhere" if is_there else "nowhere")
    with pytest.raises(CheckpointError, match=r"a is a symbolic link to .*where, and the .* save with another tag"):
        CheckpointPaths(tmp_path, "a", OWN).prepare()
    assert (tmp_path / "a").is_symlink() and [*tmp_path.glob(".*")] == [] and steps_of(tmp_path, "elsewhere") == 1


@pytest.mark.parametrize("tag", ["", ".", "..", "first/..", "latest", "a\nb", "a file"])
def test_a_tag_that_names_no_folder_of_its_own_is_refused(tag: str, tmp_path: Path) -> None:
    """A save of "" would have replaced the whole folder, and one of "latest" the file of that name."""
    folder = tmp_path / "out"
    save(folder, "first", 1)
    (folder / "a file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="cannot name a folder of its own in .*out: it must be printable text"):
        CheckpointPaths(folder, tag, OWN).prepare()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_older_save_whose_times_lie_in_the_future_is_replaced(is_killed: bool, tmp_path: Path) -> None:
    """Clocks of machines and disks differ: a save compares no times."""
    save(tmp_path, "a", 1, finish=not is_killed)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, (time.time() + 3600.0,) * 2)
    CheckpointPaths(tmp_path, "a", RIVAL).prepare()
    save(tmp_path, "a", 2)
    assert steps_of(tmp_path) == 2


def test_what_cannot_be_read_now_is_not_removed(tmp_path: Path) -> None:
    place = save(tmp_path, "a", 1, finish=False)
    failing = mock.patch("terapipe_ds.runtime.checkpoints.manifest.read_bytes", side_effect=OSError(errno.EIO, "EIO"))
    with failing, pytest.raises(OSError, match="EIO"):
        place.prepare()
    assert steps_of(tmp_path, "a") == 1


@pytest.mark.parametrize("tag", ["v1.0", f"v1.{RIVAL}"])
def test_what_a_killed_save_has_left_of_another_tag_stays(tag: str, tmp_path: Path) -> None:
    left = save(tmp_path, tag, 1, finish=False).saving
    assert CheckpointPaths(tmp_path, "v1").all_saving() == []
    save(tmp_path, "v1", 2)
    assert steps_of(tmp_path, "v1") == 2 and left.is_dir()
    assert steps_of(tmp_path, tag) == 1


# -- the manifest ------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["format", "version", "tag", "global_steps", "is_latest", "training", "files"]
VALID = Manifest(tag="a", global_steps=1, is_latest=True, files={"x": 1}).model_dump()
changed = st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3).map(lambda changes: {**VALID, **changes})


@given(st.binary(max_size=40) | (json_values | changed).map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / MANIFEST).write_bytes(raw)
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        assert MANIFEST in str(error)
        return
    assert manifest is not None and json.loads(raw)["tag"] == manifest.tag
    assert manifest.problem(folder) is not None or not manifest.files
