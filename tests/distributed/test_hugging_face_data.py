"""Test that batches of transformers' collators train over two stages as with the model's own loss."""

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_data import (
    COLLATORS,
    bad_batches,
    divide_by_all_items,
    evaluate,
    flattened,
    packed_rows,
    refusals,
    shuffled_apart,
    texts,
    train_collated,
    train_on_training_data,
    train_short_slices,
)

REFUSALS = ("BatchError", "ModelRefusedError", "TeraPipeConfigError")


@pytest.mark.sample(4)
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
    batch = {"": flattened(texts((5, 4), seed=1), position_ids_start=2)}
    for told in rank_pool(2).run(refusals, family="llama", batches=batch, documents="position_ids"):
        assert "ModelRefusedError" in " ".join(told[""])
        assert "not 0, 1, 2, ... in each row, or in each of its documents" in told[""][1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "why"), [("bamba", "states of a convolution"), ("bloom", "attention by code of its own")]
)
def test_documents_are_refused_where_layers_of_any_stage_mix_them(family: str, why: str) -> None:
    batches = {"flattened": flattened(texts((5, 4), seed=1)), "rows": packed_rows(texts((5, 4), seed=1))}
    for told in rank_pool(2).run(refusals, family=family, batches=batches, documents="position_ids"):
        for kind, text in told.values():
            assert kind in REFUSALS and "the rows hold several documents" in text and why in text


@pytest.mark.parametrize("compute_loss", [True, False])
def test_evaluation_with_labels_and_without(compute_loss: bool) -> None:
    assert max(rank_pool(2).run(evaluate, compute_loss=compute_loss)) <= (1e-6 if compute_loss else 1e-10)


def test_training_data_and_collate_fn_of_initialize() -> None:
    for pairs in rank_pool(2).run(train_on_training_data):
        assert all(loss == other for loss, other in pairs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "slices"), [("mamba2", 4), ("bloom", 4), ("llama", 4)])
def test_slices_that_would_have_one_token_are_joined(family: str, slices: int) -> None:
    """Models with states or with a cache take a single token for a step of generation."""
    run = rank_pool(2).run(train_short_slices, family=family, lengths=(5, 9, 4), slices=slices)
    assert [refusal for _, refusal in run] == ["", ""]
    assert not engines.violations([errors for errors, _ in run])


def test_listed_slices_of_one_token_are_refused_before_the_first_step() -> None:
    for _, text in rank_pool(2).run(train_short_slices, family="mamba2", lengths=(8,), slices=[4, 1, 3]):
        assert "terapipe.slices = [4, 1, 3]: a slice has 1 token" in text and "slices of 2 tokens or more" in text


def test_a_summed_loss_can_count_as_num_items_in_batch_does() -> None:
    """Follow the docs, with micro-batches whose numbers of labels differ a lot."""
    assert not engines.violations(rank_pool(2).run(divide_by_all_items))
