"""Text and chats as batches for models of transformers: read, rendered, cut, packed or padded.

Of a chat only what the assistant says counts for the loss. Batches are dicts as Hugging Face's collators make them,
with labels that are not shifted. Which rows a step takes follows from its number and the seed alone.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from text_data import lines_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

IGNORE_INDEX = -100
END = "<|end|>"  # of a document, in tokenizers that are trained here
# For tokenizers that have no template. The marks around what the assistant says are transformers' own.
SIMPLE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['content'] is not string %}{{ raise_exception('content is no text') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
Batch = dict[str, Tensor]
Entry = Mapping[str, Any]


class Document(NamedTuple):
    """Tokens, and for each of them itself as a label, or IGNORE_INDEX where it does not count."""

    tokens: list[int]
    labels: list[int]

    @property
    def prompt(self) -> list[int]:
        """Return what comes before the first token that counts; of text, in which all count, its first tokens."""
        before = next(place for place, label in enumerate(self.labels) if label != IGNORE_INDEX)
        return self.tokens[: before or min(16, -(-len(self.tokens) // 2))]


Row = list[Document]


# -- reading ---------------------------------------------------------------------------------------------------


def read_entries(files: Iterable[Path]) -> Iterator[Entry]:
    """Yield {"text": ...} for a text file, and each line of a .jsonl file: that, or {"messages": [...]}.

    Raises:
        ValueError: a line is something else, or a file is no UTF-8 text.
    """
    for file in files:
        if file.suffix != ".jsonl":
            yield {"text": "".join(_lines_of(file))}
            continue
        for number, line in enumerate(_lines_of(file), 1):
            if line.strip():
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{file}, line {number} is no JSON: {error}") from error
                yield _checked(entry, f"{file}, line {number}")


def _lines_of(file: Path) -> Iterator[str]:
    return (line.replace("\r\n", "\n") for line in lines_of(file))


def _checked(entry: Any, where: str) -> Entry:
    wanted = 'give {"messages": [{"role": ..., "content": ...}, ...]} or {"text": ...} in each line'
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        keys = ", ".join(map(repr, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{where} has {keys}: {wanted}")
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise ValueError(f'{where}: "text" is a {type(entry["text"]).__name__}: {wanted}')
        return entry
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise ValueError(f'{where}: some of "messages" lacks "role" or "content": {wanted}')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f'{where}: no message has the role "assistant", so that there is nothing to train on')
    return entry


def documents_of(
    entries: Iterable[Entry], tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[list[Document], str]:
    """Return documents of at most `length` tokens, and what became of those that are longer.

    Long text is cut into several documents. A chat loses its end, and is left out where no answer remains.

    Raises:
        ValueError: there is nothing to train on.
    """
    documents, cut, left_out = list[Document](), 0, 0
    for entry in entries:
        if "text" in entry:
            tokens = with_end(tokenizer(entry["text"])["input_ids"], tokenizer)
            pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            documents += [Document(piece, piece) for piece in pieces if len(piece) > 1]
            continue
        for chat in chat_documents(entry["messages"], tokenizer):
            short = Document(chat.tokens[:length], chat.labels[:length])
            if all(label == IGNORE_INDEX for label in short.labels[1:]):
                left_out += 1
            else:
                cut += len(chat.tokens) > length
                documents.append(short)
    if len(documents) < 2:
        raise ValueError(
            f"--data has {len(documents)} documents of at most {length} tokens, which are too few to train and to "
            f"evaluate on ({left_out} chats have no answer among their first tokens): give more text, or another "
            "--sequence-length"
        )
    return documents, f"{cut} chats cut at {length} tokens, {left_out} left out for having no answer before"


def with_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text with the mark of its end, where the tokenizer has one."""
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


# -- chats -----------------------------------------------------------------------------------------------------


def chat_documents(messages: list[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Return a chat as one document in which the assistant's tokens count.

    Which these are the template says itself, where it has a mask of what is generated. Otherwise an answer is what its
    chat has and the prompt before it has not. Some templates write an answer in another way once messages follow it.
    Then the chat becomes one document for each answer, which ends with it, as in generation.

    A tokenizer without a template gets a simple one.
    """
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE_TEMPLATE
    if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
        made = _rendered(messages, tokenizer, return_assistant_tokens_mask=True)
        return [_counting(made["input_ids"], made["assistant_masks"])]

    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for place in answers:
        prompt = _rendered(messages[:place], tokenizer, add_generation_prompt=True)["input_ids"] if place else []
        so_far = _rendered(messages[: place + 1], tokenizer)["input_ids"]
        spans.append((so_far, _common(prompt, so_far)))
    whole = _rendered(messages, tokenizer)["input_ids"]
    if all(whole[: len(so_far)] == so_far for so_far, _ in spans):
        counts = {place for so_far, start in spans for place in range(start, len(so_far))}
        return [_counting(whole, [place in counts for place in range(len(whole))])]
    return [_counting(so_far, [place >= start for place in range(len(so_far))]) for so_far, start in spans]


def _rendered(
    messages: list[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Mapping[str, Any]:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except Exception as error:  # of the template's own: it may want messages in a certain order
        raise ValueError(f"the chat template of the tokenizer takes no such chat ({error}): {messages}") from error


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens the two begin with that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _counting(tokens: list[int], counts: Sequence[bool | int]) -> Document:
    labels = [token if is_counted else IGNORE_INDEX for token, is_counted in zip(tokens, counts, strict=True)]
    return Document(list(tokens), labels)


# -- rows and batches ------------------------------------------------------------------------------------------


def split(documents: Sequence[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on, mixed, and the held-out ones: at least one of each."""
    mixed = random.Random(seed).sample(documents, len(documents))
    held_out = min(max(1, round(len(mixed) * share)), len(mixed) - 1)
    return mixed[held_out:], mixed[:held_out]


def packed(documents: Iterable[Document], length: int, open_rows: int = 64) -> list[Row]:
    """Return rows of whole documents with at most `length` tokens: each goes into the first row with room for it.

    Of the rows only the last `open_rows` are tried.
    """
    rows, room = list[Row](), list[int]()
    for document in documents:
        size, first = len(document.tokens), max(0, len(rows) - open_rows)
        place = next((i for i in range(first, len(rows)) if room[i] >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(document)
        room[place] -= size
    return rows


def batch_of(rows: Sequence[Row], length: int, multiple: int, pad: int, with_positions: bool) -> Batch:
    """Return rows of at most `length` tokens, padded at their ends to a `multiple` or to `length`.

    Position ids start anew in each document.
    """
    longest = max(sum(len(document.tokens) for document in row) for row in rows)
    shape = (len(rows), min(-(-longest // multiple) * multiple, length))
    batch = {
        "input_ids": torch.full(shape, pad),
        "labels": torch.full(shape, IGNORE_INDEX),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    if with_positions:
        batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
    for index, row in enumerate(rows):
        start = 0
        for document in row:
            stop = start + len(document.tokens)
            values = (document.tokens, document.labels, 1, torch.arange(stop - start))
            for tensor, value in zip(batch.values(), values, strict=False):
                tensor[index, start:stop] = torch.as_tensor(value)
            start = stop
    return batch


def training_rows(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    """Yield the rows without end, in each epoch in another order."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


def batches(
    rows: Iterator[Row], micro_batch_size: int, *, replica_id: int, num_replicas: int, **options: Any
) -> Iterator[Batch]:
    """Yield the micro-batches of a data-parallel replica: of `micro_batch_size * num_replicas` rows it takes its own.

    `options` are those of `batch_of`.
    """
    first = replica_id * micro_batch_size
    while drawn := list(itertools.islice(rows, micro_batch_size * num_replicas)):
        yield batch_of(drawn[first : first + micro_batch_size], **options)


# -- a stream --------------------------------------------------------------------------------------------------


class TextStream(IterableDataset):
    """Rows of text files, which are read and tokenized as they are needed, without end.

    Args:
        held_out: give each `held_out_every`-th row, which is not trained on, and not the others.
        first_row: skip the rows before; a resumed run goes on there.
        replica_id: give the rows of this data-parallel replica alone, one in `num_replicas`.
    """

    held_out_every = 20

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        held_out: bool = False,
        first_row: int = 0,
        replica_id: int = 0,
        num_replicas: int = 1,
    ) -> None:
        super().__init__()
        self.files, self.tokenizer, self.length, self.held_out = files, tokenizer, length, held_out
        self.rows_taken = slice(first_row + replica_id, None, num_replicas)

    def __iter__(self) -> Iterator[Batch]:
        taken = self.rows_taken
        for row in itertools.islice(self._rows(), taken.start, taken.stop, taken.step):
            tokens = torch.tensor(row)
            yield {"input_ids": tokens, "labels": tokens}

    def _rows(self) -> Iterator[list[int]]:
        while True:
            number = -1
            for number, row in enumerate(self._epoch()):
                if (number % self.held_out_every == 0) == self.held_out:
                    yield row
            if number < 1:
                raise ValueError(
                    f"{', '.join(map(str, self.files))}: too little text for two rows of {self.length} tokens: "
                    "give more --data, or a shorter --sequence-length"
                )

    def _epoch(self) -> Iterator[list[int]]:
        tokens: list[int] = []
        for file in self.files:
            for pieces in _documents_in(file):
                for piece in pieces:
                    tokens += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
                    for start in range(0, len(tokens) - self.length + 1, self.length):
                        yield tokens[start : start + self.length]
                    tokens = tokens[len(tokens) // self.length * self.length :]
                tokens = with_end(tokens, self.tokenizer)


def _documents_in(file: Path) -> Iterator[Iterable[str]]:
    """Yield the documents of a file in pieces: a text file is one, and each line of a .jsonl file."""
    if file.suffix != ".jsonl":
        yield _lines_of(file)
        return
    for entry in read_entries([file]):
        if "text" not in entry:
            raise ValueError(f'{file} has chats: give {{"text": ...}} in each line, or train by finetune_hf.py')
        yield [entry["text"]]


# -- a model and a tokenizer of our own ------------------------------------------------------------------------


def tiny_llama(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Return the config of a Llama of about a million weights, for the tokens of a tokenizer."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that is trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def texts_of(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield what entries say."""
    for entry in entries:
        yield from [entry["text"]] if "text" in entry else (str(m["content"]) for m in entry["messages"])
