"""examples/index_text.py and megatron_data.py: what is written, which samples come of it, and what is refused.

Every token of the corpus is another number, so that a sample says itself where it comes from.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_examples import example

pytest.importorskip("megatron.core", reason="needs the extra megatron")

EOD = 4000
LENGTH = 16
SIZES = [3 + 7 * (i % 11) for i in range(40)]  # tokens of the documents, without the end: 3 to 73
WHOLE = (0, sum(SIZES[:32]), sum(SIZES[:36]), sum(SIZES))  # borders of the split 8,1,1, in numbers


@pytest.fixture(scope="module")
def index_text() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield example("index_text", patch)


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield example("megatron_data", patch)


def texts() -> list[list[int]]:
    numbers = iter(range(EOD))
    return [list(itertools.islice(numbers, size)) for size in SIZES]


def write(index_text: ModuleType, folder: Path, documents: Iterable[list[int]]) -> str:
    source = folder / "numbers.jsonl"
    source.write_text("\n".join(json.dumps({"text": " ".join(map(str, document))}) for document in documents))
    index_text.main([str(source), "--tokenizer", f"null:{EOD}", "--out", str(folder / "numbers"), "--force"])
    return str(folder / "numbers")


@pytest.fixture(scope="module")
def prefix(index_text: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(index_text, tmp_path_factory.mktemp("indexed"), texts())


def built(
    data: ModuleType, path: str, samples: Any = (60, 3, 3), tokenizer: str = f"null:{EOD}", **changes: Any
) -> Any:
    usual = {"seq_length": LENGTH, "split": "8,1,1", "seed": 1, "data_cache_path": None}
    usual |= {"reset_position_ids": False, "eod_mask_loss": False}
    args = SimpleNamespace(**usual | changes)
    return data.build_datasets(args, path.split(), data.build_tokenizer(tokenizer), samples, reads=True)


def rows(batches: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for (tokens, _), _ in batches for row in tokens]


def numbers_of(sample: dict[str, Tensor]) -> list[int]:
    """Without ends of documents; with the last label, which no token has."""
    return [t for t in [*sample["tokens"].tolist(), int(sample["labels"][-1])] if t != EOD]


# -- from text to .bin and .idx ----------------------------------------------------------------------------------


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(str(prefix))
    assert list(indexed.document_indices) == list(range(len(indexed) + 1)), "one sequence per document"
    return [indexed[i].tolist() for i in range(len(indexed))]


def indexed_as(text: str) -> list[int]:
    return [*text.encode(), 256]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(index_text: ModuleType, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        index_text.main([*map(str, arguments)])
    assert str(ended.value).startswith("index_text.py: error: ")
    return str(ended.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus" / "part").mkdir(parents=True)
    for name, text in {"b.txt": "second\r\n", "a.txt": "größer", "part/c.md": "third", "empty.txt": ""}.items():
        (tmp_path / "corpus" / name).write_bytes(text.encode())
    return tmp_path / "corpus"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "text"


def test_files_become_documents(
    index_text: ModuleType, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.parent.rmdir()  # the script makes it
    index_text.main([str(corpus), "--out", str(out)])
    expected = [indexed_as(text) for text in ("größer", "second\r\n", "third")]
    assert documents(out) == expected
    said = capsys.readouterr().out
    assert f"3 documents, {sum(map(len, expected))} tokens; 1 empty" in said
    assert "vocabulary 257, end of document 256" in said
    assert names(out.parent) == ["text.bin", "text.idx"]
    assert Path(f"{out}.bin").stat().st_size == 2 * sum(map(len, expected)), "two bytes for a token below 65500"


def test_lines_of_jsonl_become_documents(index_text: ModuleType, tmp_path: Path, out: Path) -> None:
    lines = [{"id": 7, "body": "ein Satz\n"}, {"body": ""}, {"body": "日本"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    index_text.main([str(tmp_path / "a.jsonl"), "--json-key", "body", "--out", str(out)])
    assert documents(out) == [indexed_as("ein Satz\n"), indexed_as("日本")]


def test_ids_beyond_two_bytes(index_text: ModuleType, tmp_path: Path, out: Path) -> None:
    (tmp_path / "ids.txt").write_text("65536 3\n99999\t0\n")
    index_text.main([str(tmp_path / "ids.txt"), "--tokenizer", "null:100000", "--out", str(out)])
    assert documents(out) == [[65536, 3, 99999, 0, 100000]]


def test_a_failure_leaves_what_was_there(index_text: ModuleType, corpus: Path, out: Path) -> None:
    index_text.main([str(corpus / "b.txt"), "--out", str(out)])
    assert "text.bin exists" in refused(index_text, corpus, "--out", out)
    (corpus / "z.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "z.jsonl:2 is no JSON" in refused(index_text, corpus, "--out", out, "--force")
    assert documents(out) == [indexed_as("second\r\n")]
    assert names(out.parent) == ["text.bin", "text.idx"]


@pytest.mark.parametrize(("text", "tokenizer", "reason"), [
    ("", "bytes", "there is no text"),
    ('["a"]', "bytes", "x.jsonl:1 has no text under 'text': give objects that have it, or another --json-key"),
    ('{"text": 3}', "bytes", "has no text under 'text'"),
    ('{"text": "\\ud800"}', "bytes", "x.jsonl:1: the tokenizer cannot take it"),
    ('{"text": "5 x"}', "null:9", "x.jsonl:1: the tokenizer cannot take it"),
    ('{"text": "5 10"}', "null:9", "token ids from 5 to 10 do not fit in a vocabulary of 10"),
    ('{"text": "5 99999999999999999999"}', "null:9", "do not fit in a vocabulary of 10"),
    ('{"text": "5"}', "null:none", "give bytes, null:N, huggingface:PATH"),
    ('{"text": "5"}', "huggingface", "give bytes, null:N, huggingface:PATH"),
    ('{"text": "5"}', "sentencepiece:no/such", "'sentencepiece:no/such' cannot be loaded: "),
])  # fmt: skip
def test_what_is_refused(
    index_text: ModuleType, tmp_path: Path, out: Path, text: str, tokenizer: str, reason: str
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    assert reason in refused(index_text, tmp_path / "x.jsonl", "--out", out, "--tokenizer", tokenizer)
    assert names(out.parent) == []


def test_other_encodings_and_paths_are_refused(index_text: ModuleType, tmp_path: Path, out: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfer")
    assert "latin.txt is not UTF-8 text" in refused(index_text, tmp_path / "latin.txt", "--out", out)
    assert "no/such does not exist" in refused(index_text, "no/such", "--out", out)


def test_a_tokenizer_without_an_end_of_document(data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(eod=None)
    monkeypatch.setattr(data.MegatronTokenizer, "from_pretrained", lambda path, metadata: loaded)
    with pytest.raises(ValueError, match="no token that ends a document"):
        data.build_tokenizer("huggingface:some/one:x")
    loaded.eod = 7
    assert data.build_tokenizer("huggingface:some/one:x") is loaded


# -- datasets ----------------------------------------------------------------------------------------------------


def test_samples_tile_the_documents(data: ModuleType, prefix: str) -> None:
    following = {a: b for text in texts() for a, b in itertools.pairwise([*text, EOD])}
    train, again, other = (built(data, prefix, seed=seed)[0] for seed in (1, 1, 2))
    assert len(train) == (WHOLE[1] + 32 - 1) // LENGTH  # 8 of 10 documents, with their ends
    seen: list[int] = []
    for sample in train:
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert len(tokens) == LENGTH and tokens[1:] == labels[:-1]
        assert all(label == following[token] for token, label in zip(tokens, labels, strict=True) if token != EOD)
        seen += [token for token in tokens if token != EOD]
    assert len(set(seen)) == len(seen), "no token twice in an epoch"
    first, same, different = (rows(data.micro_batches(each, 4, count=3)) for each in (train, again, other))
    assert first == same != different, "in the order that the seed gives"


def test_splits_share_no_document(data: ModuleType, prefix: str) -> None:
    for dataset, start, stop in zip(built(data, prefix), WHOLE[:-1], WHOLE[1:], strict=True):
        numbers = {number for sample in dataset for number in numbers_of(sample)}
        assert start <= min(numbers) <= max(numbers) < stop


@pytest.mark.parametrize("reset_position_ids", [False, True])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_positions_and_masks(data: ModuleType, prefix: str, reset_position_ids: bool, eod_mask_loss: bool) -> None:
    train = built(data, prefix, reset_position_ids=reset_position_ids, eod_mask_loss=eod_mask_loss)[0]
    ends = 0
    for (tokens, positions), (_, mask) in data.micro_batches(train, 1, count=20):
        expected, position = [], 0
        for token in tokens[0].tolist():
            expected.append(position)
            position = 0 if reset_position_ids and token == EOD else position + 1
        ends += int((tokens == EOD).sum())
        assert positions[0].tolist() == expected
        assert torch.equal(mask[0] == 0, (tokens[0] == EOD) & eod_mask_loss)
    assert ends > 3


def test_files_made_anew_are_read_anew(data: ModuleType, index_text: ModuleType, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    built(data, write(index_text, tmp_path, texts()), (20, 0, 0), data_cache_path=cache)
    prefix = write(index_text, tmp_path, [list(range(3000, 3040))] * 10)
    train = built(data, prefix, (20, 0, 0), data_cache_path=cache)[0]
    assert len(train) == (8 * 41 - 1) // LENGTH
    assert min(min(numbers_of(sample)) for sample in train) >= 3000
    assert list((tmp_path / "cache").rglob("*train-shuffle_index.npy"))


@pytest.mark.parametrize(("samples", "path", "changes", "reason"), [
    ((5, 5, 0), "", {"split": "1"}, "none of its 40 documents is for validation"),
    ((5, 0, 5), "", {"split": "998,1,1"}, "none of its 40 documents is for test"),
    ((5, 0, 0), "no/such", {}, "no/such.bin does not exist: give the path without"),
    ((5, 0, 0), "0 a 1 b", {}, "the weights"),
    ((5, 0, 0), "nan a 1 b", {}, "the weights"),
    ((5, 0, 0), "", {"tokenizer": "bytes", "eod_mask_loss": True}, "ends with token 4000, .* document is 256"),
])  # fmt: skip
def test_bad_datasets(
    data: ModuleType, prefix: str, samples: Any, path: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        built(data, path or prefix, samples, **changes)


def test_files_that_are_no_index(data: ModuleType, prefix: str, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"x.{suffix}").write_text("something else, and long enough for a header")
    with pytest.raises(ValueError, match=r"x.idx is no index of .*x.bin"):
        built(data, str(tmp_path / "x"))
    (tmp_path / "x.idx").write_bytes(Path(f"{prefix}.idx").read_bytes())
    with pytest.raises(ValueError, match=r"x.idx lists \d+ bytes, .*x.bin has 44"):
        built(data, str(tmp_path / "x"))


# -- micro-batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_replicas", "size"), [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_replicas_share_the_dataset_in_its_order(data: ModuleType, prefix: str, num_replicas: int, size: int) -> None:
    train = built(data, prefix)[0]
    whole = [tuple(train[i]["tokens"].tolist()) for i in range(24)]
    share = {"num_replicas": num_replicas, "count": 3}
    drawn = [rows(data.micro_batches(train, size, replica_id=r, **share)) for r in range(num_replicas)]
    for round_id, replica, row in itertools.product(range(3), range(num_replicas), range(size)):
        sample = (round_id * num_replicas + replica) * size + row  # Megatron's sequential sampler
        assert drawn[replica][round_id * size + row] == whole[sample]


def test_the_end_of_the_data(data: ModuleType, prefix: str) -> None:
    train = built(data, prefix)[0]
    end = len(train) - 9
    assert len(rows(data.micro_batches(train, 2, num_replicas=2, first_sample=end))) == 4
    for count, first in ((3, end), (None, 10**6)):
        with pytest.raises(ValueError, match=f"the data has {len(train)} samples. Give --data-path more text"):
            data.micro_batches(train, 2, num_replicas=2, first_sample=first, count=count)


def test_workers_read_the_same(data: ModuleType, prefix: str) -> None:
    valid = built(data, prefix)[1]
    assert rows(data.micro_batches(valid, 1, count=3, num_workers=1)) == rows(data.micro_batches(valid, 1, count=3))


def test_a_token_that_the_tokenizer_does_not_have(data: ModuleType, prefix: str) -> None:
    with pytest.raises(ValueError, match="the vocabulary is 257: give the --tokenizer of the files"):
        list(data.micro_batches(built(data, prefix, tokenizer="bytes")[0], 1))
