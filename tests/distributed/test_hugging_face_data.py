"""Test that batches of transformers' collators train over two stages as with the model's own loss."""

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import terapipe_ds
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import (
    MICRO_BATCHES,
    STEPS,
    differences,
    engine_of,
    train_whole,
    weights_of_all_stages,
)
from tests.hugging_face_families import VOCAB_SIZE, config_of, known
from tests.unit.models.hugging_face.sliced_model import in_fp64, whole_model

Batch = Mapping[str, Any]
LENGTHS = ((9, 14), (7, 3), (12, 12), (5, 11))  # of the texts of each micro-batch, two of them in a step
# no length above is a multiple of three slices of those
SECTION = engines.section(slices=3, granularity_tokens=2, verify="off")


def tokenizer(side: str = "right") -> Any:
    known = {f"w{i}": i for i in range(VOCAB_SIZE - 1)} | {"[PAD]": VOCAB_SIZE - 1}
    words = Tokenizer(models.WordLevel(known, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side=side)
    made.model_input_names = ["input_ids", "attention_mask"]
    return made


def texts(lengths: Sequence[int], seed: int) -> list[dict[str, list[int]]]:
    """Return samples of a data set: token ids as a tokenizer makes them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]
    return [dict(tokenizer()(" ".join(f"w{token}" for token in each))) for each in drawn]


def with_prompts(samples: Sequence[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Return the same with labels, in which the first two tokens of each do not count."""
    return [{**each, "labels": [-100, -100, *each["input_ids"][2:]]} for each in samples]


def language_modeling(samples: Sequence[Any]) -> Batch:
    return transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(list(samples))


def padded(samples: Sequence[Any]) -> Batch:
    """Pad the texts, and make int32 labels of the result; labels of padding do not count."""
    batch = transformers.DataCollatorWithPadding(tokenizer())(list(samples))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100).int()
    return batch


def to_sequences(samples: Sequence[Any]) -> Batch:
    return transformers.DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=4)(with_prompts(samples))


def shifted_before(samples: Sequence[Any]) -> Batch:
    """Return a batch with labels that are shifted already, as Trainer makes them with context parallelism."""
    batch = dict(language_modeling(samples))
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    return {**batch, "shift_labels": labels}


def flattened(samples: Sequence[Any], **options: Any) -> Batch:
    return transformers.DataCollatorWithFlattening(**options)(with_prompts(samples))


def with_all_edges(samples: Sequence[Any]) -> Batch:
    return flattened(samples, return_flash_attn_kwargs=True, return_seq_idx=True)


def with_edges_alone(samples: Sequence[Any]) -> Batch:
    return flattened(samples, return_flash_attn_kwargs=True, return_position_ids=False)


def packed_rows(samples: Sequence[Any]) -> Batch:
    """Return rows of two documents each, which begin elsewhere in each row; labels are the token ids themselves."""
    tokens = torch.tensor([sample["input_ids"][:3] * 4 for sample in samples])
    ids = torch.stack([torch.arange(12) - (torch.arange(12) >= edge) * edge for edge in (4, 7)])
    return {"input_ids": tokens, "labels": tokens, "position_ids": ids}


COLLATORS: dict[str, Callable[[Sequence[Any]], Batch]] = {
    each.__name__: each
    for each in (
        language_modeling, padded, to_sequences, shifted_before, flattened, with_all_edges, with_edges_alone,
        packed_rows,
    )
}  # fmt: skip
PACKED = ("flattened", "with_all_edges", "with_edges_alone", "packed_rows")


def own_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss of the model of transformers on its own batch; only position ids tell documents apart."""
    batch = {key: value for key, value in batch.items() if not key.startswith(("cu_seq", "max_length", "seq_idx"))}
    batch = {key: value.long() for key, value in batch.items()}
    labels = batch.pop("shift_labels", None)
    if "position_ids" in batch:  # it trains the last token of a document on the next one's first
        starts = batch["position_ids"] == 0
        batch["labels"] = batch["labels"].masked_fill(starts, -100)
    if labels is None:
        return model(**batch, use_cache=False).loss
    logits = model(**batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Drawn(list[Any]):
    """Act as a step for `engines.train`: its micro-batches come from one iterator over all steps."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__([None] * MICRO_BATCHES)
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


class Stream(IterableDataset):
    """Yield samples without a length."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def train_collated(
    collator: str, source: str = "generator", family: str = "llama", section: dict[str, Any] | None = None
) -> tuple[dict[str, float], list[str]]:
    """Return the largest errors on this rank against the model's own loss in this process; and the log on labels."""
    collate = COLLATORS[collator]
    lengths = LENGTHS if source in ("generator", "tuples") else (LENGTHS[0],) * len(LENGTHS)
    samples = [texts(each, seed) for seed, each in enumerate(lengths)]
    if collator == "with_edges_alone":
        reference = [COLLATORS["flattened"](each) for each in samples]
    else:
        reference = [collate(copy.deepcopy(each)) for each in samples]
    documents: dict[str, Any] = {"documents": 1 if source == "tuples" else "position_ids"} if collator in PACKED else {}
    with in_fp64(), engines.logged() as log:
        config = config_of(family)
        config.tie_word_embeddings = False
        module = terapipe_ds.from_config(config, num_stages=2, dtype=torch.float64)
        whole = whole_model(config, weights_of_all_stages(module))
        data = (collate(each) for each in samples)
        flat = [sample for each in samples for sample in each]
        iterator: Any = data
        if source == "tuples":
            iterator = map(module.to_tuple, data)
        elif source == "loader":
            iterator = iter(DataLoader(flat, batch_size=2, collate_fn=collate))
        elif source == "stream":
            iterator = iter(DataLoader(Stream(flat), batch_size=2, collate_fn=collate))
        with engine_of(module, {**SECTION, **documents, "verify": "first_batch", **(section or {})}) as engine:
            run = engines.train(engine, [Drawn(iterator)] * STEPS)
            names = module.checkpoint_names()
        steps = [reference[i : i + MICRO_BATCHES] for i in range(0, len(reference), MICRO_BATCHES)]
        errors = differences(run, names, *train_whole(whole, steps, loss_of=own_loss))
    return errors, [line for line in log if "labels of dict batches" in line]


def refusals(family: str, batches: Mapping[str, Batch], documents: str = "off") -> dict[str, tuple[str, str]]:
    """Return one engine's error for each of these batches; it then trains on a right one in its present state."""
    with in_fp64(), engine_of(a_module(family), {**SECTION, "documents": documents}) as engine:
        before = [parameter.detach().clone() for parameter in engine.module.parameters()]
        told = {name: engines.step_error(engine, [batch] * MICRO_BATCHES) for name, batch in batches.items()}
        assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        right = language_modeling(texts((8, 6), seed=1)) if documents == "off" else one_document()
        assert engine.train_batch(iter([right] * MICRO_BATCHES)) > 0
    return told


def shuffled_apart() -> tuple[str, str]:
    """Return the error if each rank shuffles samples of one length by a seed of its own."""
    samples = [texts((9,), seed)[0] for seed in range(8)]
    order = torch.Generator().manual_seed(torch.distributed.get_rank())
    loader = DataLoader(samples, batch_size=2, shuffle=True, generator=order, collate_fn=language_modeling)
    with engine_of(a_module(), SECTION) as engine:
        return engines.step_error(engine, list(loader))


def a_module(family: str = "llama") -> Any:
    return terapipe_ds.from_config(config_of(family), num_stages=2, dtype=torch.float64)


def one_document() -> Batch:
    return flattened(texts((8,), seed=1))


def bad_batches() -> dict[str, Batch]:
    """Return batches by the name that the refusal must contain."""
    samples = texts((9, 14), seed=3)
    right = dict(language_modeling(samples))
    tokens = right["input_ids"]
    left = dict(tokenizer("left").pad(samples, return_tensors="pt"))
    return {
        "attention_mask": {**left, "labels": left["input_ids"]},
        "token_type_ids": {**right, "token_type_ids": torch.zeros_like(tokens)},
        "special_tokens_mask": {**right, "special_tokens_mask": torch.zeros_like(tokens)},
        "num_items_in_batch": {**right, "num_items_in_batch": torch.tensor(20)},
        "inputs_embeds": {"inputs_embeds": torch.zeros(2, 14, 32), "labels": tokens},
        "pixel_values": {**right, "pixel_values": torch.zeros(2, 3, 8, 8)},
        "labels": {**right, "labels": right["labels"].double()},
        "shift_labels": {"input_ids": tokens},
        "position_ids": flattened(samples),
        "cu_seq_lens_q": with_edges_alone(samples),
        "terapipe.slices": language_modeling(texts((3, 2), seed=3)),
        "position ids": {**right, "position_ids": torch.arange(2, 16).expand(2, 14)},
    }


def train_short_slices(family: str, lengths: Sequence[int], slices: Any) -> tuple[dict[str, float], str]:
    """Return the errors of a training on sequences of these lengths; or the refusal while the engine is built."""
    with in_fp64():
        module = a_module(family)
        whole = whole_model(config_of(family), weights_of_all_stages(module))
        data = [[dict(language_modeling(texts((length,) * 2, length)))] * MICRO_BATCHES for length in lengths]
        try:
            with engine_of(module, engines.section(slices=slices, verify="off")) as engine:
                run = engines.train(engine, data)
                return differences(run, module.checkpoint_names(), *train_whole(whole, data, loss_of=own_loss)), ""
        except ValueError as error:
            return {}, str(error)


def divide_by_all_items() -> dict[str, float]:
    """Return errors of a summed loss over the mean number of labels of a micro-batch, against `num_items_in_batch`."""
    step = [dict(language_modeling(texts(lengths, seed))) for seed, lengths in enumerate(((14, 12), (3, 5)))]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total * MICRO_BATCHES / items

    def of_transformers(model: Any, batch: Batch) -> Tensor:
        return model(**batch, use_cache=False, num_items_in_batch=items).loss * MICRO_BATCHES

    with in_fp64():
        module = terapipe_ds.from_config(config_of("llama"), num_stages=2, dtype=torch.float64, loss_fn=loss_fn)
        whole = whole_model(config_of("llama"), weights_of_all_stages(module))
        with engine_of(module, {**SECTION, "loss_reduction": "sum"}) as engine:
            run = engines.train(engine, [step])
        return differences(run, module.checkpoint_names(), *train_whole(whole, [step], loss_of=of_transformers))


REFUSALS = ("BatchError", "ModelRefusedError", "TeraPipeConfigError")


@pytest.mark.sample(2)
@pytest.mark.parametrize("source", ["generator", "loader", "stream", "tuples"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_a_collators_batches(collator: str, source: str) -> None:
    """Loss, gradients and parameters of two steps. Lengths differ between steps and micro-batches of a generator."""
    errors, logs = zip(*rank_pool(2).run(train_collated, collator=collator, source=source), strict=True)
    assert not engines.violations(errors)
    told = sum(map(len, logs))
    assert told == (0 if collator == "shifted_before" or source == "tuples" else 1)


def test_each_refusal_names_the_key_on_every_rank() -> None:
    """Before anything has run; the engine trains on after it."""
    for told in rank_pool(2).run(refusals, family="llama", batches=bad_batches()):
        for name, (kind, text) in told.items():
            assert kind in REFUSALS and name in text, (name, kind, text)
        assert (
            "padding_side" in told["attention_mask"][1] and "return_token_type_ids=False" in told["token_type_ids"][1]
        )
        assert "mean over the labels of each micro-batch" in told["num_items_in_batch"][1]
        assert 'set terapipe.documents to "position_ids"' in told["cu_seq_lens_q"][1]


def test_stages_whose_loaders_shuffle_apart_are_refused() -> None:
    """Inputs of some samples would be trained on the labels of others, without a sign."""
    for kind, text in rank_pool(2).run(shuffled_apart):
        assert kind == "BatchError" and "disagree on the token ids of dict batches: ranks [0]: checksum" in text
        assert "Give the first and the last stage iterators over the same micro-batches" in text


def test_positions_of_documents_that_layers_do_not_find_are_refused() -> None:
    batch = flattened(texts((5, 4), seed=1))
    batch["position_ids"] += 2
    for told in rank_pool(2).run(refusals, family="llama", batches={"": batch}, documents="position_ids"):
        assert "ModelRefusedError" in " ".join(told[""])
        assert "not 0, 1, 2, ... in each row, or in each of its documents" in told[""][1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", known("bamba", "bloom"))
def test_documents_are_refused_where_layers_of_any_stage_mix_them(family: str) -> None:
    why = {"bamba": "states of a convolution", "bloom": "attention by code of its own"}[family]
    batches = {"flattened": flattened(texts((5, 4), seed=1)), "rows": packed_rows(texts((5, 4), seed=1))}
    for told in rank_pool(2).run(refusals, family=family, batches=batches, documents="position_ids"):
        for kind, text in told.values():
            assert kind in REFUSALS and "the rows hold several documents" in text and why in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", known("mamba2", "bloom", "llama"))
def test_slices_that_would_have_one_token_are_joined(family: str) -> None:
    """Models with states or with a cache take a single token for a step of generation."""
    run = rank_pool(2).run(train_short_slices, family=family, lengths=(5, 9, 4), slices=4)
    assert [refusal for _, refusal in run] == ["", ""]
    assert not engines.violations([errors for errors, _ in run])


@pytest.mark.parametrize("family", known("mamba2"))
def test_listed_slices_of_one_token_are_refused_before_the_first_step(family: str) -> None:
    for _, text in rank_pool(2).run(train_short_slices, family=family, lengths=(8,), slices=[4, 1, 3]):
        assert "terapipe.slices = [4, 1, 3]: a slice has 1 token" in text and "slices of 2 tokens or more" in text


@pytest.mark.full
@pytest.mark.parametrize("family", known("mamba2"))
def test_no_slice_of_one_token_is_measured(family: str) -> None:
    """The second of two slices would be one: the granularity is 64."""
    job: dict[str, Any] = {"job": train_short_slices, "family": family, "lengths": (65,), "slices": "auto"}
    run = rank_pool(2).run(engines.with_few_rounds, **job)
    assert [refusal for _, refusal in run] == ["", ""]
    assert not engines.violations([errors for errors, _ in run])


def test_a_summed_loss_can_count_as_num_items_in_batch_does() -> None:
    """Follow the docs, with micro-batches whose numbers of labels differ a lot."""
    assert not engines.violations(rank_pool(2).run(divide_by_all_items))
