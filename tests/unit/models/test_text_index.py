"""`terapipe index`: what it writes, read back by megatron-core itself; what it refuses; the tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from terapipe_ds import compat
from terapipe_ds.cli import main
from terapipe_ds.models.megatron_data import text_index
from terapipe_ds.models.megatron_data.needs import MegatronDataError
from terapipe_ds.models.megatron_data.text_index import find_files, write_index
from terapipe_ds.models.megatron_data.tokenizers import ByteTokenizer, TokenizerError, build_tokenizer

needs_megatron = pytest.mark.skipif(not compat.has_megatron(), reason="needs megatron-core: terapipe_ds[megatron]")
BYTES_EOD = 256


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(str(prefix))
    bounds = indexed.document_indices
    assert list(bounds) == list(range(len(indexed) + 1)), "one sequence per document"
    return [indexed[i].tolist() for i in range(len(indexed))]


def indexed_as(text: bytes) -> list[int]:
    return [*text, BYTES_EOD]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "part").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "part" / "up").symlink_to(folder)
    for name, text in {
        "b.txt": b"second\n",
        "a.txt": "größer".encode(),
        "part/c.md": b"\xff\xfe not UTF-8",
        "empty.txt": b"",
        "image.bin": b"PNG\0\0",
        ".hidden/d.txt": b"hidden",
        ".e.txt": b"hidden too",
    }.items():
        (folder / name).write_bytes(text)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "text"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["index", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("terapipe index: error: ")
    return error


@needs_megatron
class TestCommand:
    def test_files_become_documents(self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["index", str(corpus), "--out", str(out)]) == 0
        captured = capsys.readouterr()
        expected = [indexed_as(text) for text in ("größer".encode(), b"second\n", b"\xff\xfe not UTF-8")]
        assert documents(out) == expected
        assert captured.err == ""
        assert f"3 documents, {sum(map(len, expected))} tokens; 1 empty" in captured.out
        assert "vocabulary 257, end of document 256" in captured.out
        assert names(out.parent) == ["text.bin", "text.idx"]
        assert Path(f"{out}.bin").stat().st_size == 2 * sum(map(len, expected)), "two bytes for a token below 65500"

    def test_files_given_are_taken_in_their_order(self, corpus: Path, out: Path) -> None:
        main(["index", str(corpus / "b.txt"), str(corpus / "image.bin"), "--out", str(out)])
        assert documents(out) == [indexed_as(b"second\n"), indexed_as(b"PNG\0\0")]

    def test_lines_of_jsonl_become_documents(self, tmp_path: Path, out: Path) -> None:
        lines = [{"id": 7, "body": "ein Satz\n"}, {"body": ""}, {"body": "日本"}]
        text = "\n\n".join(json.dumps(line) for line in lines)
        (tmp_path / "a.jsonl").write_text(text)
        assert main(["index", str(tmp_path / "a.jsonl"), "--json-key", "body", "--out", str(out)]) == 0
        assert documents(out) == [indexed_as(b"ein Satz\n"), indexed_as("日本".encode())]

    def test_ids_beyond_two_bytes(self, tmp_path: Path, out: Path) -> None:
        (tmp_path / "ids.txt").write_text("65536 3\n99999\t0\n")
        assert main(["index", str(tmp_path / "ids.txt"), "--tokenizer", "null:100000", "--out", str(out)]) == 0
        assert documents(out) == [[65536, 3, 99999, 0, 100000]]

    def test_force_replaces_both_files(self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["index", str(corpus), "--out", str(out)])
        assert "text.bin exists" in refused(capsys, corpus / "b.txt", "--out", out)
        assert main(["index", str(corpus / "b.txt"), "--out", str(out), "--force"]) == 0
        assert documents(out) == [indexed_as(b"second\n")]

    def test_a_failure_leaves_what_was_there(
        self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["index", str(corpus / "b.txt"), "--out", str(out)])
        (corpus / "z.jsonl").write_text('{"text": "fine"}\n{"text": \n')
        assert "z.jsonl:2 is no JSON" in refused(capsys, corpus, "--out", out, "--force")
        assert documents(out) == [indexed_as(b"second\n")]
        assert names(out.parent) == ["text.bin", "text.idx"]

    @pytest.mark.parametrize(
        ("text", "options", "reason"),
        [
            ("", (), "no text in 1 files"),
            ('["a"]', (), "x.jsonl:1 holds ['a']"),
            ('{"body": "a", "n": 3}', (), "no text under 'text': give a --json-key that has (here: 'body')"),
            ('{"text": 3}', (), "(here: none)"),
            ('{"text": "\\ud800"}', (), "has half a character"),
            ('{"text": "5 x"}', ("--tokenizer", "null:9"), "x.jsonl:1: the tokenizer cannot take it"),
            ('{"text": "5 10"}', ("--tokenizer", "null:9"), "do not fit in a vocabulary of 10"),
            ('{"text": "5 -1"}', ("--tokenizer", "null:9"), "token ids from -1 to 9"),
            ('{"text": "5 99999999999999999999"}', ("--tokenizer", "null:9"), "the tokenizer cannot take it"),
            ('{"text": "5"}', ("--tokenizer", "null:none"), "give the number of token ids"),
            ('{"text": "5"}', ("--tokenizer", "sentencpiece:a"), "did you mean sentencepiece:FILE?"),
            ('{"text": "5"}', ("--tokenizer", "huggingface"), "give one of bytes, huggingface:NAME"),
            ('{"text": "5"}', ("--out", "no/such/folder/x"), "no/such/folder is no directory"),
        ],
    )
    def test_what_is_refused(
        self, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], text: str, options: Any, reason: str
    ) -> None:
        (tmp_path / "x.jsonl").write_text(text)
        assert reason in refused(capsys, tmp_path / "x.jsonl", "--out", out, *options)
        assert names(out.parent) == []

    def test_paths_without_text(self, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no/such does not exist" in refused(capsys, "no/such", "--out", out)
        (tmp_path / "binary.dat").write_bytes(b"\0")
        assert "no text in" in refused(capsys, tmp_path, "--out", out)

    def test_bytes_of_another_encoding_need_the_byte_tokenizer(
        self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = refused(capsys, corpus / "part", "--tokenizer", "null:9", "--out", out)
        assert "c.md is not UTF-8 text" in error
        assert "--tokenizer bytes" in error

    def test_a_document_too_long_for_the_index(
        self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text_index, "MAX_DOCUMENT_TOKENS", 7)
        assert "b.txt has 8 tokens, more than 7" in refused(capsys, corpus / "b.txt", "--out", out)

    def test_progress_counts_every_byte(self, corpus: Path, out: Path) -> None:
        (corpus / "z.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}')
        files, sizes = find_files([corpus]), list[int]()
        write_index(out, files, ByteTokenizer(), on_bytes=sizes.append)
        assert sum(sizes) == sum(file.stat().st_size for file in files)


class TestWithoutMegatron:
    def test_the_command_says_what_to_install(
        self, corpus: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compat, "has_megatron", lambda: False)
        assert "pip install 'terapipe_ds[megatron]'" in refused(capsys, corpus, "--out", out)
        assert names(out.parent) == []

    def test_so_does_writing(self, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "has_megatron", lambda: False)
        with pytest.raises(MegatronDataError, match="pip install"):
            write_index(out, find_files([corpus]), ByteTokenizer())


class TestTokenizers:
    def test_bytes(self) -> None:
        tokenizer = build_tokenizer()
        assert (tokenizer.vocab_size, tokenizer.eod) == (257, BYTES_EOD)
        assert list(tokenizer.tokenize("aé\0")) == [97, 0xC3, 0xA9, 0]
        assert ByteTokenizer().detokenize(numpy.array([97, 256, 0xC3, 0xA9, 0xFF])) == "aé�"

    @pytest.mark.parametrize(
        ("name", "package"),
        [("huggingface:gpt2", "transformers"), ("sentencepiece:a.model", "sentencepiece"), ("tiktoken:a", "tiktoken")],
    )
    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
        asked: list[str] = []
        monkeypatch.setattr(compat, "is_installed", lambda module: bool(asked.append(module)))
        with pytest.raises(TokenizerError, match=f"needs {package}: pip install {package}"):
            build_tokenizer(name)
        assert asked == [package]

    @needs_megatron
    @pytest.mark.parametrize(("eod", "refusal"), [(7, None), (None, "no token that ends a document")])
    def test_megatron_loads_what_it_knows(
        self, monkeypatch: pytest.MonkeyPatch, eod: int | None, refusal: str | None
    ) -> None:
        from megatron.core.tokenizers import MegatronTokenizer

        class Loaded:
            def __init__(self, tokenizer_path: str, metadata_path: dict[str, str]) -> None:
                self.source = (tokenizer_path, metadata_path["library"])
                self.eod = eod

        monkeypatch.setattr(compat, "is_installed", lambda module: True)
        monkeypatch.setattr(MegatronTokenizer, "from_pretrained", Loaded)
        if refusal is None:
            assert build_tokenizer("huggingface:some/one:x").source == ("some/one:x", "huggingface")  # type: ignore[attr-defined]
        else:
            with pytest.raises(TokenizerError, match=refusal):
                build_tokenizer("huggingface:some/one")

    @needs_megatron
    def test_what_megatron_fails_at_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "is_installed", lambda module: True)
        with pytest.raises(TokenizerError, match=r"'sentencepiece:no/such' cannot be loaded: ValueError: .*no/such"):
            build_tokenizer("sentencepiece:no/such")

    @needs_megatron
    def test_null(self) -> None:
        tokenizer = build_tokenizer("null:9")
        assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
        assert tokenizer.tokenize("3 8") == [3, 8]
