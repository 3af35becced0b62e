"""Test that every rank refuses ranks that shuffle apart or have different models, but accepts copies of the same."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import terapipe_ds
from terapipe_ds.models import gpt
from terapipe_ds.models.gpt import gpt_loss
from tests.distributed import engines
from tests.distributed.harness import rank_pool

# -- data ----------------------------------------------------------------------------------------------------


def loader(seed: int, classes: bool = False) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(engines.VOCAB_SIZE, (16, engines.LENGTH + 1), generator=generator)
    pairs = TensorDataset(text[:, :-1], text[:, 0] if classes else text[:, 1:])
    return iter(DataLoader(pairs, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed)))


def replaced_labels(seed: int, value: int | None) -> Iterator[Any]:
    """Put labels of one value, or none, in place of the labels that the first stage does not need."""
    for inputs, labels in loader(seed):
        yield inputs, (None if value is None else torch.full_like(labels, value)) if _stage() == 0 else labels


def augmented(seed: int) -> Iterator[Any]:
    """Return inputs that each rank changes by random numbers of its own, and labels that are the same."""
    for inputs, labels in loader(seed):
        yield (inputs + _stage()) % engines.VOCAB_SIZE, labels


def _stage() -> int:
    return torch.distributed.get_rank() // (torch.distributed.get_world_size() // 2)


DATA: dict[str, Callable[[], Any]] = {
    "alike": lambda: loader(5),
    "shuffled apart": lambda: loader(_stage()),
    "zeros on the first stage": lambda: replaced_labels(5, 0),
    "none on the first stage": lambda: replaced_labels(5, None),
    "ignored on the first stage": lambda: replaced_labels(5, engines.IGNORE_INDEX),
    "augmented": lambda: augmented(5),
    "replicas apart": lambda: loader(torch.distributed.get_rank() % 2),
}


def job_data(terapipe: dict[str, Any], names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with engines.engine_of(engines.gpt_layers("float32"), terapipe) as engine:
            data = DATA[name]()
            found[name] = engines.raised_by(lambda: engine.train_batch(data))[1]  # noqa: B023
    with engines.engine_of(engines.gpt_layers("float32"), terapipe) as engine:
        data = DATA["shuffled apart"]()
        found["evaluated"] = engines.raised_by(lambda: engine.eval_batch(data))[1]
    return found


class TestTuples:
    @pytest.mark.parametrize("schedule", ["seq1f1b", "chimera-seq"])
    def test_stages_that_shuffle_apart_are_refused(self, schedule: str) -> None:
        names = [name for name in DATA if name != "replicas apart"]
        for found in rank_pool(2).run(job_data, terapipe=engines.section(schedule=schedule, verify="off"), names=names):
            for name in ("shuffled apart", "evaluated"):
                assert "disagree on the labels of tuple batches: ranks [0]" in found[name]
                assert "Probably each rank shuffles" in found.pop(name)
            if schedule == "chimera-seq":  # both stages need all labels
                found = {name: text for name, text in found.items() if "first stage" not in name}
            assert set(found.values()) == {""}

    def test_replicas_may_differ_and_their_stages_may_not(self) -> None:
        names = ["replicas apart", "shuffled apart"]
        for found in rank_pool(4).run(job_data, terapipe=engines.section(verify="off"), names=names):
            assert found["replicas apart"] == ""
            assert "ranks [0]: checksum" in found["shuffled apart"]


# -- models --------------------------------------------------------------------------------------------------


class Layer(torch.nn.Identity):
    """A class that each rank defines."""


class Wide(torch.nn.Module):
    """Return its input, and have most parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1 << 20))

    def forward(self, x: Tensor) -> Tensor:
        return x


def other_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made_here(rank: int) -> tuple[Any, Any]:
    """Define a function and a class anew on each rank, with constants whose text depends on the process."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        assert "mean" in {"sum", "mean", "none"}
        return gpt_loss(logits, labels)

    return loss, type("Layer", (torch.nn.Identity,), {"at": id(loss) + rank})


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scale * gpt_loss(logits, labels)


LOSSES: dict[str, Callable[[int], Any]] = {  # by rank
    "the same": lambda rank: gpt_loss,
    "a lambda": lambda rank: lambda logits, labels: gpt_loss(logits, labels),
    "a partial": lambda rank: functools.partial(gpt_loss),
    "an object": lambda rank: Scaled(1.0),
    "a method": lambda rank: Scaled(1.0).__call__,
    "defined here": lambda rank: made_here(rank)[0],
    "another function": lambda rank: (gpt_loss, other_loss)[rank],
    "another lambda": lambda rank: (lambda x, y: gpt_loss(x, y), lambda x, y: other_loss(x, y))[rank],
    "none": lambda rank: (None, gpt_loss)[rank],
}


def layers_on(name: str, rank: int) -> list[Any]:
    layers = engines.gpt_layers("float32")
    if name == "one more":
        return [*layers[:-1], *[LayerSpec(Layer)] * rank, layers[-1]]
    if name == "another class":
        return [*layers[:-1], LayerSpec((torch.nn.Identity, Layer)[rank]), layers[-1]]
    return [*layers[:-1], LayerSpec(made_here(rank)[1]), lambda x: x, layers[-1]]


def job_models() -> dict[str, str]:
    rank, terapipe, found = torch.distributed.get_rank(), engines.section(verify="off"), {}
    for name, loss in LOSSES.items():
        with_loss = {"loss_fn": loss(rank)}
        found[name] = engines.raised_by(lambda: trained(engines.gpt_layers("float32"), terapipe, **with_loss))[1]  # noqa: B023
    cut = engines.pipeline_module(
        [LayerSpec(Wide), *engines.gpt_layers("float32")], partition_method=("uniform", "parameters")[rank]
    )
    text = engines.raised_by(lambda: terapipe_ds.lay_out(cut, engines.config(terapipe=terapipe)))[1]
    # a module also knows its method if an earlier test of this process has called `register`
    found["another partition"] = re.sub(r" \(partition_method '\w+'\)", "", text)
    for name in ("one more", "another class", "layers defined here"):
        layers = layers_on(name, rank)
        found[name] = engines.raised_by(lambda: trained(layers, terapipe))[1]  # noqa: B023
        found[f"{name}, lay_out"] = engines.raised_by(
            lambda: terapipe_ds.lay_out(engines.pipeline_module(layers), engines.config(terapipe=terapipe))  # noqa: B023
        )[1]
    return found


class Own(torch.nn.Module):
    """Keep values that a program may give each rank, beside those that decide what the layer computes."""

    def __init__(self, config: Any = None, **settings: Any) -> None:
        super().__init__()
        self.config, self.at = config, settings or object()
        self.window = object() if config is None else 4  # ranks cannot compare objects
        self.local_rank = torch.distributed.get_rank()
        self.cache, self.home = f"caches/rank{self.local_rank}", f"cpu:{self.local_rank}"

    def forward(self, x: Tensor) -> Tensor:
        return x


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


REPLICAS: dict[str, Callable[[int], Any]] = {  # by rank
    "bias": lambda rank: LayerSpec(torch.nn.Linear, 16, 16, bias=bool(rank)),
    "dropout": lambda rank: LayerSpec(torch.nn.Dropout, (0.1, 0.2)[rank]),
    "frozen": lambda rank: LayerSpec(torch.nn.Linear, 16, 16).build().requires_grad_(rank > 0),
    "partial": lambda rank: functools.partial(F.dropout, p=(0.1, 0.2)[rank]),
    "closure": lambda rank: scaled_by((1.0, 2.0)[rank]),
    "config": lambda rank: LayerSpec(
        Own, [gpt.GPTConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, dropout=0.1 * rank)]
    ),
    "accepted": lambda rank: LayerSpec(Own, config=None, **({"a": 1} if rank else {})),
    "seeds": lambda rank: LayerSpec(Own, config={"seed": rank, "log_file": f"{rank}"}),
}
OF_REPLICAS = {
    "bias": "layer 6: ranks [0]: torch.nn.modules.linear.Linear, weight [16, 16] torch.float32; ranks [1]: torch.nn.",
    "dropout": "layer 6: p: ranks [0]: 0.1; ranks [1]: 0.2",
    "frozen": "layer 6: ranks [0]: torch.nn.modules.linear.Linear, weight [16, 16] torch.float32 frozen, ",
    "partial": "layer 6: p: ranks [0]: 0.1; ranks [1]: 0.2",
    "closure": "layer 6: factor: ranks [0]: 1.0; ranks [1]: 2.0",
    "config": "layer 6: config.0.dropout: ranks [0]: 0.0; ranks [1]: 0.1",
    "loss": "loss_fn: scale: ranks [0]: 1.0; ranks [1]: 2.0",
}


def job_replicas() -> dict[str, str]:
    """Return the error for each layer, and each loss, that two replicas have built by themselves."""
    rank, found, layers = torch.distributed.get_rank(), {}, engines.gpt_layers("float32")
    for name, layer in REPLICAS.items():
        own = [*layers[:-1], layer(rank), layers[-1]]
        found[name] = engines.raised_by(lambda: trained(own, engines.unchecked(), stages=1))[1]  # noqa: B023
    other = [*layers[:3], LayerSpec(torch.nn.Dropout, p=0.1 * rank), *layers[3:]]  # the second stage does not build it
    found["stages"] = engines.raised_by(lambda: trained(other, engines.unchecked()))[1]
    loss = {"loss_fn": Scaled(1.0 + rank), "stages": 1}
    return {**found, "loss": engines.raised_by(lambda: trained(layers, engines.unchecked(), **loss))[1]}


def job_default_dtypes() -> str:
    """Return the error if one rank has another default dtype while its engine is built."""
    module = engines.pipeline_module(engines.gpt_layers("float32"))
    torch.set_default_dtype((torch.float32, torch.float64)[torch.distributed.get_rank()])
    try:
        ds_config = engines.config(terapipe=engines.section())
        return engines.raised_by(lambda: terapipe_ds.initialize(model=module, config=ds_config))[1]
    finally:
        torch.set_default_dtype(torch.float32)


def job_autocast(ranks: tuple[int, ...]) -> str:
    """Return the error if `ranks` train under autocast."""
    with engines.engine_of(engines.fp32_layers(), engines.unchecked(), stages=1) as engine:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.distributed.get_rank() in ranks):
            return engines.raised_by(lambda: engine.train_batch(iter(engines.batches(1)[0])))[1]


def change(engine: Any, setting: str) -> None:
    if setting == "learning rates":
        engine.optimizer.param_groups[0]["lr"] *= 10
    elif setting == "trained parameters":
        next(engine.module.parameters()).requires_grad_(False)
    else:
        engine.step_label_counts = [30.0, 30.0]


def job_changes(setting: str, ranks: tuple[int, ...], **options: Any) -> list[str]:
    """Return the errors of two batches, with a change on `ranks` between them."""
    section = engines.unchecked(loss_reduction="mean_of_step")
    with engines.engine_of(engines.fp32_layers(), section, stages=1, **options) as engine:
        texts = []
        for batch in engines.batches(2):
            texts.append(engines.raised_by(lambda: engine.train_batch(iter(batch)))[1])  # noqa: B023
            if torch.distributed.get_rank() in ranks:
                change(engine, setting)
        return texts


OPTIMIZERS: dict[str, tuple[Any, Any]] = {  # of a program, by rank; the text of the second
    "SGD with [{": (torch.optim.Adam, torch.optim.SGD),
    "'betas': (0.5, 0.9)": (torch.optim.Adam, functools.partial(torch.optim.Adam, betas=(0.5, 0.9))),
    "'weight_decay': 0.1": (torch.optim.AdamW, functools.partial(torch.optim.AdamW, weight_decay=0.1)),
}


def job_optimizers(is_alike: bool) -> dict[str, str]:
    """Return the error for each pair of optimizers; each of two replicas makes one of a pair."""
    found = {}
    for name, classes in OPTIMIZERS.items():
        module = engines.pipeline_module(engines.fp32_layers(), 1)
        optimizer = classes[is_alike or torch.distributed.get_rank()](module.parameters(), lr=0.01)
        initialize = {"model_parameters": None, "optimizer": optimizer}
        with engines.started(module, engines.unchecked(), initialize=initialize) as engine:
            found[name] = engines.step_error(engine)[1]
    return found


class Divided(torch.nn.Module):
    """Be a layer whose tensor-parallel ranks have shares of different sizes, and a bias on the first alone."""

    def __init__(self, dtype: torch.dtype = torch.float32, eps: float = 1e-5) -> None:
        super().__init__()
        rank = torch.distributed.get_rank()
        self.share, self.eps, self.has_bias = torch.nn.Parameter(torch.ones(4 + rank, dtype=dtype)), eps, rank == 0
        self.register_parameter("bias", torch.nn.Parameter(torch.ones(4)) if self.has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return x


def job_shares() -> dict[str, str]:
    """Return the error for layers of two tensor-parallel ranks: like one another, and with another setting on one."""
    rank, found = torch.distributed.get_rank(), {}
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    for name, options in {"alike": {}, "dtype": {"dtype": torch.float64}, "eps": {"eps": 1e-2}}.items():
        layers = [LayerSpec(Divided, **(options if rank else {})), *engines.fp32_layers()]
        module = engines.pipeline_module(layers, None, topology=topology)
        ds_config = engines.config(terapipe=engines.unchecked())
        found[name] = engines.raised_by(lambda: terapipe_ds.lay_out(module, ds_config))[1]  # noqa: B023
    return found


OF_ONE_RANK: dict[str, Any] = {  # replicas or stages would train apart, or DeepSpeed fail on one rank
    "scheduler": engines.WARMUP,
    "gradient_predivide_factor": 4.0,
    "gradient_allreduce_op": "sum",
    "bfloat16": {"enabled": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "checkpoint": {"load_universal": True},
    "zero_allow_untested_optimizer": True,
}


def job_settings() -> dict[str, str]:
    """Return the error for each setting that only the second rank has."""
    rank, found = torch.distributed.get_rank(), {}
    for key, value in OF_ONE_RANK.items():
        own = {key: value} if rank else {}
        found[key] = engines.raised_by(lambda: trained(engines.fp32_layers(), engines.unchecked(), **own))[1]  # noqa: B023
    return found


def trained(layers: list[Any], terapipe: dict[str, Any], **options: Any) -> None:
    with engines.engine_of(layers, terapipe, **options) as engine:
        assert engines.step_error(engine) == ("", "")


DIFFER = {
    "another function": "loss_fn: ranks [0]: terapipe_ds.models.gpt.gpt_loss",
    "another lambda": "loss_fn: ranks [0]: tests.distributed.test_same_on_all_ranks.<lambda>",
    "none": "loss_fn: ranks [0]: builtins.NoneType; ranks [1]: terapipe_ds.models.gpt.gpt_loss",
    "another partition": "the first layers of the stages: ranks [0]: [0, 4, 8]; ranks [1]: [0, 1, 8]",
    "one more": "the number of layers: ranks [0]: 7 layers; ranks [1]: 8 layers",
    "another class": "layer 6: ranks [0]: torch.nn.modules.linear.Identity; ranks [1]: ",
}


def job_grids() -> list[str]:
    """Return the error of rank 1 with another number of stages, of one with another topology, and of none."""
    is_other, layers = torch.distributed.get_rank() == 1, engines.fp32_layers()
    topology = PipeModelDataParallelTopology(num_pp=1 + is_other, num_mp=2 - is_other, num_dp=1)
    given: list[dict[str, Any]] = [{"num_stages": 2 - is_other}, {"topology": topology}, {"num_stages": 2}]
    terapipe_ds.register()
    try:
        return [engines.raised_by(lambda: PipelineModule(layers, **each))[1] for each in given]  # noqa: B023
    finally:
        terapipe_ds.unregister()


class TestModels:
    def test_a_grid_of_one_rank_is_an_error_on_all(self) -> None:
        for stages, topology, nothing in rank_pool(2).run(job_grids, timeout_s=30):
            assert "ranks [0]: pipe 2, data 1; ranks [1]: pipe 1, data 2; give all of them the same" in stages
            assert "ranks [0]: pipe 1, data 1, model 2; ranks [1]: pipe 2, data 1, model 1; give" in topology
            assert nothing == ""

    def test_what_differs_is_said_on_every_rank(self) -> None:
        for found in rank_pool(2).run(job_models):
            for name, text in DIFFER.items():
                assert text in found.pop(name), name
            for name in ("one more", "another class"):
                assert DIFFER[name] in found.pop(f"{name}, lay_out")
            assert {name for name, text in found.items() if text} == set(), found

    def test_replicas_compare_the_settings_of_layers(self) -> None:
        for found in rank_pool(2).run(job_replicas):
            for name, text in OF_REPLICAS.items():
                assert text in found.pop(name), name
            assert {name: text for name, text in found.items() if text} == {}

    def test_a_setting_of_one_rank_is_an_error_on_all(self) -> None:
        for found in rank_pool(2).run(job_settings):
            assert [key for key, text in found.items() if f"\n  {key}: ranks [0]: null; ranks [1]: " not in text] == []

    def test_an_optimizer_of_one_rank_is_an_error_on_all(self) -> None:
        assert rank_pool(2).run(job_optimizers, is_alike=True) == [dict.fromkeys(OPTIMIZERS, "")] * 2
        for found in rank_pool(2).run(job_optimizers, is_alike=False):
            for name, text in found.items():
                assert "the ranks disagree on the settings of stage 0: " in text and name in text.split("ranks [1]")[1]

    def test_tensor_parallel_ranks_compare_all_but_their_shares(self) -> None:
        for found in rank_pool(2).run(job_shares):
            assert found.pop("alike") == ""
            assert "layer 0: share: ranks [0]: torch.float32; ranks [1]: torch.float64" in found["dtype"]
            assert "layer 0: eps: ranks [0]: 1e-05; ranks [1]: 0.01" in found["eps"]

    def test_a_default_dtype_of_one_rank_is_an_error_on_all(self) -> None:
        text = "torch.get_default_dtype(): ranks [0]: torch.float32; ranks [1]: torch.float64"
        assert all(text in found for found in rank_pool(2).run(job_default_dtypes))

    def test_autocast_of_one_rank_is_an_error_on_all(self) -> None:
        assert rank_pool(2).run(job_autocast, ranks=(0, 1)) == ["", ""]
        for found in rank_pool(2).run(job_autocast, ranks=(1,)):
            assert "torch.autocast off; ranks [1]: " in found and found.count("torch.autocast torch.bfloat16") == 1

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("options", [{}, engines.ZERO1])
    @pytest.mark.parametrize("setting", ["learning rates", "trained parameters", "step_label_counts"])
    def test_a_setting_that_one_replica_changes_is_an_error_on_all(self, setting: str, options: dict[str, Any]) -> None:
        """Replicas would train apart, or hang."""
        if setting != "trained parameters" or not options:  # DeepSpeed's ZeRO wants a gradient of each
            assert rank_pool(2).run(job_changes, setting=setting, ranks=(0, 1), **options) == [["", ""]] * 2
        for first, second in rank_pool(2).run(job_changes, setting=setting, ranks=(1,), **options):
            assert first == "" and "the ranks disagree on the settings of stage 0: ranks [0]: " in second
            assert setting in second.split("ranks [1]: ")[1]
