"""The Hugging Face examples: what they read, which tokens count, how rows are packed and shared out, refusals."""

import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from transformers import LlamaConfig, MambaConfig, PreTrainedTokenizerFast

from tests.unit.test_examples import EXAMPLES, ROOT, example

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is a slice?"},
    {"role": "assistant", "content": "A range of tokens."},
    {"role": "user", "content": "And a stage?"},
    {"role": "assistant", "content": "A place in the pipeline."},
]
# as many models have it, without a mask of what is generated
MARKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# the last answer alone is written with a thought, and the prompt of generation begins one
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(hm){% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>(ponder{% endif %}"
)


@pytest.fixture
def hf_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("hf_data", monkeypatch)


@pytest.fixture
def tokenizer(hf_data: ModuleType) -> PreTrainedTokenizerFast:
    entries = hf_data.read_entries([EXAMPLES / "data/chats.jsonl"])
    return hf_data.train_tokenizer(hf_data.texts_of(entries), 512)


# -- chats -----------------------------------------------------------------------------------------------------


def counted(document: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The runs of tokens that count."""
    assert all(label in (token, -100) for token, label in zip(document.tokens, document.labels, strict=True))
    runs = itertools.groupby(document.labels, lambda label: label != -100)
    return [tokenizer.decode(list(labels)) for counts, labels in runs if counts]


def test_of_a_chat_the_answers_count(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    """By the simple template, whose mask transformers reads, and by the prefixes of one without."""
    (simple,) = hf_data.chat_documents(CHAT, tokenizer)
    assert counted(simple, tokenizer) == ["A range of tokens.<|end|>", "A place in the pipeline.<|end|>"]
    assert tokenizer.decode(simple.tokens).startswith("system:\nBe short.\n\nuser:\nWhat is a slice?\n\nassistant:\n")
    assert tokenizer.decode(simple.prompt).endswith("What is a slice?\n\nassistant:\n")
    tokenizer.chat_template = MARKS
    (marked,) = hf_data.chat_documents(CHAT, tokenizer)
    assert counted(marked, tokenizer) == counted(simple, tokenizer)
    assert tokenizer.decode(marked.tokens).count("<user>") == 2


def test_an_answer_that_changes_later_ends_a_document(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKS
    first, second = hf_data.chat_documents(CHAT, tokenizer)
    assert [len(counted(each, tokenizer)) for each in (first, second)] == [1, 1]
    assert counted(first, tokenizer)[0].endswith("hm)A range of tokens.<|end|>")
    assert counted(second, tokenizer)[0].endswith("hm)A place in the pipeline.<|end|>")
    assert tokenizer.decode(second.tokens).count("hm)") == 1  # as it is when the second is generated


def test_a_tokenizer_without_marks_of_an_end(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    (document,) = hf_data.chat_documents(CHAT, tokenizer)
    assert counted(document, tokenizer) == ["A range of tokens.", "A place in the pipeline."]
    assert hf_data.with_end([1, 2], tokenizer) == [1, 2]


def test_what_the_template_does_not_take(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('begin with a user') }}"
    with pytest.raises(ValueError, match="takes no such chat .begin with a user.: .*Be short"):
        hf_data.chat_documents(CHAT, tokenizer)
    tokenizer.chat_template = None  # the simple one would train on Python's brackets
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a slice?"}]}, CHAT[2]]
    with pytest.raises(ValueError, match="takes no such chat .content is no text.: .*What is"):
        hf_data.chat_documents(parts, tokenizer)


# -- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "message"), [
    ('{"conversations": []}', """line 2 has 'conversations': give {"messages": """),
    ('["messages"]', "line 2 has list: give"),
    ('{"messages": []', "line 2 is no JSON"),
    ('{"messages": [{"role": "user"}]}', 'line 2: some of "messages" lacks "role" or "content"'),
    ('{"messages": [{"role": "user", "content": "?"}]}', 'line 2: no message has the role "assistant"'),
    ('{"text": 5}', 'line 2: "text" is a int'),
])  # fmt: skip
def test_a_line_that_is_no_chat(line: str, message: str, hf_data: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(ValueError) as caught:
        list(hf_data.read_entries([file]))
    assert str(caught.value).startswith(f"{file}, ") and message in str(caught.value)


def test_files_without_text(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="--data has 0 documents of at most 64 tokens.*give more text"):
        hf_data.documents_of(hf_data.read_entries([tmp_path / "empty.txt"]), tokenizer, 64)
    with pytest.raises(ValueError, match="picture.txt is not UTF-8 text"):
        list(hf_data.read_entries([tmp_path / "picture.txt"]))


def test_long_texts_and_chats_are_cut(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    text = (ROOT / "README.md").read_text()
    documents, _ = hf_data.documents_of([{"text": text}], tokenizer, 100)
    tokens = [token for document in documents for token in document.tokens]
    assert tokens == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert max(len(document.tokens) for document in documents) == 100
    (whole,) = hf_data.chat_documents(CHAT, tokenizer)
    begin = next(place for place, label in enumerate(whole.labels) if label != -100)
    cut, remark = hf_data.documents_of([{"messages": CHAT}] * 2, tokenizer, begin + 2)
    assert [each.labels[begin:] for each in cut] == [whole.tokens[begin : begin + 2]] * 2
    assert remark.startswith("2 chats cut")
    with pytest.raises(ValueError, match="2 chats have no answer among their first tokens"):
        hf_data.documents_of([{"messages": CHAT}] * 2, tokenizer, begin)


# -- rows ------------------------------------------------------------------------------------------------------


def documents_of_lengths(hf_data: ModuleType, *lengths: int) -> list[Any]:
    first = itertools.accumulate((0, *lengths))
    return [
        hf_data.Document(list(range(a + 1, a + n + 1)), [-100, *range(a + 2, a + n + 1)])
        for a, n in zip(first, lengths, strict=False)
    ]


def test_packed_rows_hold_whole_documents(hf_data: ModuleType) -> None:
    documents = documents_of_lengths(hf_data, 60, 50, 30, 40, 64, 4, 10)
    rows = hf_data.packed(documents, 64)
    assert sorted(map(tuple, (d.tokens for row in rows for d in row))) == [tuple(d.tokens) for d in documents]
    assert [[len(d.tokens) for d in row] for row in rows] == [[60, 4], [50, 10], [30], [40], [64]]
    assert [len(row) for row in hf_data.packed(documents, 64, open_rows=1)] == [1, 1, 1, 1, 1, 2]


def test_a_batch_is_padded_on_the_right(hf_data: ModuleType) -> None:
    a, b, c = documents_of_lengths(hf_data, 5, 3, 34)
    batch = hf_data.batch_of([[a, b], [c]], length=40, multiple=32, pad=7, with_positions=True)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(2, 40)}  # 64, but for the length
    assert batch["input_ids"][0].tolist() == [*a.tokens, *b.tokens, *[7] * 32]
    assert batch["labels"][0].tolist() == [*a.labels, *b.labels, *[-100] * 32]
    assert batch["attention_mask"].sum(1).tolist() == [8, 34]
    assert batch["position_ids"][0, :8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    alone = hf_data.batch_of([[a]], length=40, multiple=32, pad=7, with_positions=False)
    assert alone.keys() == {"input_ids", "labels", "attention_mask"} and alone["input_ids"].shape == (1, 32)


def test_rows_are_shared_out_and_come_once_in_each_epoch(hf_data: ModuleType) -> None:
    rows = [[document] for document in documents_of_lengths(hf_data, *range(2, 10))]

    def draw(replica: int, replicas: int, size: int) -> list[list[int]]:
        share = {"replica_id": replica, "num_replicas": replicas, "length": 64, "multiple": 1, "pad": 0}
        share["with_positions"] = False
        drawn = hf_data.batches(hf_data.training_rows(rows, seed=1), size, **share)
        return [batch["input_ids"][:, 0].tolist() for batch in itertools.islice(drawn, 4)]

    alone, first, second = draw(0, 1, size=4), draw(0, 2, size=2), draw(1, 2, size=2)
    assert alone == [a + b for a, b in zip(first, second, strict=True)]
    epochs = [sorted(alone[0] + alone[1]), sorted(alone[2] + alone[3])]
    assert epochs == [sorted(document.tokens[0] for (document,) in rows)] * 2
    assert alone[:2] != alone[2:]


def test_a_share_is_held_out(hf_data: ModuleType) -> None:
    documents = documents_of_lengths(hf_data, *[3] * 20)
    training, held_out = hf_data.split(documents, 0.1, seed=1)
    assert (len(training), len(held_out)) == (18, 2)
    assert sorted(training + held_out) == documents
    assert [len(part) for part in hf_data.split(documents[:2], 0.9, seed=1)] == [1, 1]


# -- a stream --------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_it_was(hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    def rows(count: int, **which: Any) -> list[list[int]]:
        stream = hf_data.TextStream([ROOT / "README.md"], tokenizer, 32, **which)
        return [entry["input_ids"].tolist() for entry in itertools.islice(stream, count)]

    whole = list(hf_data.TextStream([ROOT / "README.md"], tokenizer, 32)._epoch())
    training, held_out = rows(len(whole) - -(-len(whole) // 20)), rows(-(-len(whole) // 20), held_out=True)
    assert [row for i, row in enumerate(whole) if i % 20] == training
    assert whole[::20] == held_out
    text = "".join(tokenizer.decode(row) for row in whole)
    assert (ROOT / "README.md").read_text().startswith(text) and len(text) > 3000
    assert rows(len(training) + 5)[len(training) :] == training[:5]  # the second epoch is as the first
    assert rows(10, first_row=6) == training[6:16]
    assert rows(4, first_row=6, replica_id=1, num_replicas=2) == training[7:15:2]
    with pytest.raises(ValueError, match="too little text for two rows of 100000 tokens: give more --data"):
        next(iter(hf_data.TextStream([ROOT / "README.md"], tokenizer, 100_000)))


def test_a_stream_reads_the_texts_of_json_lines(
    hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """JSON may hold the separators U+2028 and U+0085, at which str.splitlines would cut a line; a BOM may be first."""
    file, texts = tmp_path / "text.jsonl", [f"{'a stage sends ' * n}\u2028and\x85waits" for n in range(1, 20)]
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    file.write_text(lines, encoding="utf-8-sig")
    assert list(hf_data.texts_of(hf_data.read_entries([file]))) == texts
    tokens = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = list(hf_data.TextStream([file], tokenizer, 32)._epoch())
    assert rows == [tokens[start : start + 32] for start in range(0, len(tokens) - 31, 32)] and len(rows) > 10


@pytest.mark.parametrize(("name", "content", "message"), [
    ("latin.txt", "one\ntwo caf\xe9 three", "latin.txt is not UTF-8 text: .* in line 2"),
    ("chats.jsonl", json.dumps({"messages": CHAT}), "chats.jsonl has chats: .*finetune_hf.py"),
])  # fmt: skip
def test_a_stream_of_other_things_than_text(
    name: str, content: str, message: str, hf_data: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        next(iter(hf_data.TextStream([tmp_path / name], tokenizer, 2)))


# -- scripts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "config"), [
    ("", "hf_tiny"),
    ("--lora 4", "hf_tiny"),
    ("--model x", "finetune_hf"),
    ("--model x --lora 4", "finetune_hf_lora"),
])  # fmt: skip
def test_each_case_has_its_config(options: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune_hf = example("finetune_hf", monkeypatch)
    expected = json.loads((ROOT / f"configs/{config}.json").read_text())
    assert finetune_hf.parse_arguments(options.split()).ds_config == expected
    expected["terapipe"]["documents"] = "position_ids"
    assert finetune_hf.parse_arguments([*options.split(), "--pack"]).ds_config == expected


def test_a_folder_of_adapters_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    finetune_hf, expected = example("finetune_hf", monkeypatch), (ROOT / "configs/finetune_hf_lora.json").read_text()
    assert finetune_hf.parse_arguments(["--model", str(tmp_path)]).ds_config == json.loads(expected)
    with pytest.raises(SystemExit, match="2"):
        finetune_hf.parse_arguments(["--model", str(tmp_path), "--lora", "4"])
    assert "has adapters, and the run goes on with these: leave out --lora" in capsys.readouterr().err
    assert [finetune_hf.parse_arguments(words).out for words in ([], ["--lora=4"])] == [
        "out/finetune_hf", "out/finetune_hf_lora"
    ]  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        finetune_hf.parse_arguments(["--lora", "4", "--out", str(tmp_path)])
    assert "has a whole model: transformers would put the adapters onto it" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ("--stages 3", "2 ranks do not divide by --stages 3"),
    (f"--pack --deepspeed_config {ROOT}/configs/stock.json", "--pack needs an enabled terapipe section"),
    ("--deepspeed_config nowhere.json", "nowhere.json cannot be read"),
    ("--held-out 0", "--held-out is a share between 0 and 1"),
])  # fmt: skip
def test_options_that_cannot_be(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        example("finetune_hf", monkeypatch).parse_arguments(options.split())
    assert message in capsys.readouterr().err


def test_rows_fit_the_positions_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    row_length = example("finetune_hf", monkeypatch).row_length
    model = LlamaConfig(max_position_embeddings=512)
    assert [row_length(asked, model) for asked in (None, 100, 512)] == [512, 100, 512]
    assert [row_length(asked, MambaConfig()) for asked in (None, 5000)] == [1024, 5000]
    with pytest.raises(ValueError, match="--sequence-length 600 must be from 2 to the model's positions, 512"):
        row_length(600, model)


def test_a_tokenizer_of_another_model(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune_hf = example("finetune_hf", monkeypatch)
    data = [{"messages": CHAT}] * 4
    assert finetune_hf.Data(finetune_hf.parse_arguments([]), data, tokenizer, LlamaConfig(vocab_size=512)).size == 3
    with pytest.raises(ValueError, match=r"the tokenizer gives token \d+, and the model has 100"):
        finetune_hf.Data(finetune_hf.parse_arguments([]), data, tokenizer, LlamaConfig(vocab_size=100))


def test_a_name_is_downloaded_once_on_each_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    finetune_hf, calls = example("finetune_hf", monkeypatch), list[tuple[str, bool]]()

    def download(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append((name, local_files_only))
        if name == "no/such":
            raise OSError("cannot be reached\nat all")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(finetune_hf.deepspeed.comm, "barrier", lambda: calls.append(("barrier", True)))
    for rank, expected in (("0", [("a/model", False)]), ("1", [])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        calls.clear()
        assert finetune_hf.model_folder("a/model") == tmp_path
        assert calls == [*expected, ("barrier", True), ("a/model", True)]
    with pytest.raises(ValueError, match="--model no/such is no folder, and cannot be downloaded: cannot be reached$"):
        finetune_hf.model_folder("no/such")
    assert finetune_hf.model_folder(str(tmp_path)) == tmp_path


def test_the_chats_are_chats(hf_data: ModuleType) -> None:
    entries = list(hf_data.read_entries([EXAMPLES / "data/chats.jsonl"]))
    assert len(entries) >= 40 and all(entry["messages"][-1]["role"] == "assistant" for entry in entries)
    assert torch.tensor([len(entry["messages"]) for entry in entries]).float().mean() > 2  # some have several turns
