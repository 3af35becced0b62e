"""Ranks as threads, for what they tell one another: the few collectives that agreements are made of."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

JOIN_S = 10.0


class Ranks:
    """torch.distributed for threads. A group is a tuple of ranks, or None for all."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, size: int) -> None:
        self._local = threading.local()
        self._all = tuple(range(size))
        self._lock = threading.Lock()
        self._barriers: dict[Any, threading.Barrier] = {}
        self._given: dict[Any, dict[int, Any]] = {}
        self.calls: list[list[str]] = [[] for _ in self._all]
        self.store = torch.distributed.HashStore()
        self.group = SimpleNamespace(WORLD=object())
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: self.store)

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """What `act` returns or raises on each rank."""

        def run(rank: int) -> Any:
            self._local.rank = rank
            try:
                return act(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self._all)) as pool:
            return list(pool.map(run, self._all))

    def _exchange(self, name: str, value: Any, group: Any) -> list[Any]:
        group, rank = group or self._all, self._local.rank
        self.calls[rank].append(name)
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
            self._given.setdefault(group, {})[rank] = value
        barrier.wait(JOIN_S)
        values = [self._given[group][each] for each in group]
        barrier.wait(JOIN_S)
        return values

    def is_initialized(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "gloo"

    def get_world_size(self, group: Any = None) -> int:
        return len(group or self._all)

    def get_rank(self, group: Any = None) -> int:
        return (group or self._all).index(self._local.rank)

    def all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        values = torch.stack(self._exchange("all_reduce", tensor.clone(), group))
        tensor.copy_(values.amax(dim=0) if op == self.ReduceOp.MAX else values.sum(dim=0))

    def broadcast_object_list(self, values: list[Any], group: Any = None, group_src: int = 0) -> None:
        values[:] = pickle.loads(self._exchange("broadcast", pickle.dumps(values), group)[group_src])

    def all_gather_object(self, values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = map(pickle.loads, self._exchange("gather", pickle.dumps(value), group))
