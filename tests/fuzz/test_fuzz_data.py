"""Text, .jsonl, .bin and .idx files, and the options of datasets."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds import compat
from terapipe_ds.models.megatron_data.needs import MegatronDataError
from terapipe_ds.models.megatron_data.options import DataOptions
from tests.fuzz.damage import numbers, spoilt, spoilt_bytes, texts, values
from tests.fuzz.outcome import accepted, cases

pytestmark = pytest.mark.skipif(not compat.has_megatron(), reason="needs megatron-core: terapipe_ds[megatron]")

LINES = b'{"text": "some words", "id": 1}\n{"text": "other words"}\n\n{"text": ""}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Valid .bin and .idx files of four documents, as bytes."""
    from terapipe_ds.models.megatron_data.text_index import write_index
    from terapipe_ds.models.megatron_data.tokenizers import ByteTokenizer

    folder = tmp_path_factory.mktemp("made")
    files = [folder / f"{number}.txt" for number in range(4)]
    for number, file in enumerate(files):
        file.write_text("a text of some words " * (number + 1))
    write_index(folder / "made", files, ByteTokenizer())
    return (folder / "made.bin").read_bytes(), (folder / "made.idx").read_bytes()


@cases(60, 3000)
@given(data=spoilt_bytes(LINES), suffix=st.sampled_from([".jsonl", ".txt"]), kind=st.sampled_from(["bytes", "null:8"]))
def test_text_files(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str, kind: str) -> None:
    from terapipe_ds.models.megatron_data.text_index import write_index
    from terapipe_ds.models.megatron_data.tokenizers import build_tokenizer

    folder = tmp_path_factory.getbasetemp()
    file = folder / f"fuzzed{suffix}"
    file.write_bytes(data)
    before = {path.name for path in folder.iterdir()}
    for name in ("out.bin", "out.idx"):
        (folder / name).unlink(missing_ok=True)
    tokenizer = build_tokenizer(kind)
    written = accepted("text file", MegatronDataError, lambda: write_index(folder / "out", [file], tokenizer))
    if written is None:
        assert {path.name for path in folder.iterdir()} <= before, "nothing is left behind"
    elif kind == "bytes":
        documents = [data] if suffix == ".txt" else [
            json.loads(line)["text"].encode() for line in data.split(b"\n") if line.strip()
        ]  # fmt: skip
        wanted = [[*text, 256] for text in documents if text]
        tokens = numpy.fromfile(folder / "out.bin", dtype=numpy.uint16).tolist()
        assert tokens == [token for document in wanted for token in document]
        assert written.num_documents == len(wanted)


def by_hand(data: bytes, index: bytes) -> list[int]:
    """The lengths of the documents that the two files hold, read by the format's description alone."""
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}[code]
    lengths = struct.unpack(f"<{sequences}i", index[34 : 34 + 4 * sequences])
    pointers = struct.unpack(f"<{sequences}q", index[34 + 4 * sequences : 34 + 12 * sequences])
    at = 0
    for length, pointer in zip(lengths, pointers, strict=True):
        assert length >= 0
        assert pointer == at
        at += length * size
    assert at <= len(data)
    assert documents >= 1
    return list(lengths)


@st.composite
def spoilt_index(draw: st.DrawFn, index: bytes) -> bytes:
    """Bytes spoilt anywhere, or one number of the header or the tables replaced by another."""
    if draw(st.booleans()):
        return draw(spoilt_bytes(index))
    places = [(9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q"), (34, "<i"), (50, "<q"), (82, "<q")]
    place, form = draw(st.sampled_from(places))
    most = {"<Q": 2**64 - 1, "<B": 255, "<i": 2**31 - 1, "<q": 2**63 - 1}[form]
    number = draw(st.integers(0, 9) | st.integers(0, most) | st.just(most))
    return index[:place] + struct.pack(form, number) + index[place + struct.calcsize(form) :]


@cases(80, 3000)
@given(data=st.data())
def test_index_files(tmp_path_factory: pytest.TempPathFactory, made: tuple[bytes, bytes], data: Any) -> None:
    from terapipe_ds.models.megatron_data.datasets import _check_files
    from terapipe_ds.models.megatron_data.tokenizers import ByteTokenizer

    prefix: Path = tmp_path_factory.getbasetemp() / "fuzzed-index"
    tokens = data.draw(st.just(made[0]) | spoilt_bytes(made[0]))
    index = data.draw(st.just(made[1]) | spoilt_index(made[1]))
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)
    options = DataOptions(str(prefix), 8, split="100,0,0")
    found = accepted(
        "index files", MegatronDataError, lambda: _check_files(options, ByteTokenizer(), (3, 0, 0)), str(prefix)
    )
    if found is not None:
        assert [array.tolist() for array in found] == [by_hand(tokens, index)]


OPTIONS = {
    "data_path": ["0.7", "books", "0.3", "code"], "sequence_length": 64, "split": "949,50,1", "seed": 1234,
    "reset_position_ids": False, "eod_mask_loss": False, "drop_last_partial_validation_sequence": True,
    "cache_path": None,
}  # fmt: skip
_splits = st.sampled_from(["1,0,0", "0,0,0", "1", "", ",", "1,2,3,4", "nan,1,1", "1e5,1", "9" * 400 + ",1,1", "-1,2,0"])
_paths = st.lists(st.sampled_from(["0.5", "nan", "-1", "inf", "a", "b", "", " ", "0"]), max_size=4) | texts


@cases(100, 3000)
@given(
    spoilt(OPTIONS) | st.builds(lambda split: {**OPTIONS, "split": split}, _splits | texts | values)
    | st.builds(lambda path: {**OPTIONS, "data_path": path}, _paths | numbers)
)  # fmt: skip
def test_options_of_datasets(options: Any) -> None:
    if not isinstance(options, dict) or not {"data_path", "sequence_length"} <= set(options) <= set(OPTIONS):
        return  # a call that Python itself refuses
    made = accepted("data options", MegatronDataError, lambda: DataOptions(**options))
    if made is not None:
        assert sum(made.shares()) == pytest.approx(1.0)
        prefixes, weights = made.blend()
        assert prefixes
        assert weights is None or (len(weights) == len(prefixes) and all(0 < w < float("inf") for w in weights))
