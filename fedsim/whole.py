"""A round of small models as one program: what the clients measure, their steps and their sums; the server's half comes
behind it (`server.py`). Calls take longer than such models' arithmetic, and what goes from one to the next has to be
written and read again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.func import vmap

from fedsim.client.sgd import Sgd
from fedsim.cohort import Cohort, Deferred, reduced
from fedsim.program import Program
from fedsim.stack import Ready, Sums
from fedsim.types import Model, State, Work


def possible(work: Work, program: Program) -> bool:
    """Clients that begin alike, take a few steps as they come, and keep nothing; all of them in one stack."""
    rule = type(work.client)
    plain = rule.start is Sgd.start and rule.plan is Sgd.plan and rule.finish is Sgd.finish
    plain = plain and not (work.client.extra_batches or work.optimizer.persist_state)
    return work.whole and plain and program.training.whole and (work.probe is None or program.probing.whole)


def widest(sizes: np.ndarray, batch_size: int, epochs: int, steps: int) -> list[int]:
    """Samples in each step's batch of the client that has most of them there: an epoch's last batch may be short, and
    clients of one size all have it in the same step."""
    an_epoch = np.maximum(-(-sizes // batch_size), 1)
    left = [np.where(s < epochs * an_epoch, sizes - s % an_epoch * batch_size, 1) for s in range(steps)]
    return [min(batch_size, int(rows.max())) for rows in left]


class Whole:
    def __init__(self, work: Work, program: Program, sums: Sums) -> None:
        self._program, self._sums, self._layers = program, sums, work.task.layers
        self._widths = widest(work.data.sizes, work.client.batch_size or 0, work.client.epochs, program.training.unroll)

    def __call__(self, work: Work, weights: Sequence[float], ready: Ready) -> Deferred:
        some = next(iter(work.model.params.values()))
        given = {"steps": ready.moments, "numbers": some.new_tensor([work.lr, *weights])}
        given |= {} if ready.probe is None else {"probe": ready.probe}
        return Deferred(self._round, given, len(weights))

    def _round(self, model: Model, shared: State, given: Any) -> Cohort:
        program, params, sent = self._program, model.params, (model.params, model.buffers)
        lr, w = given["numbers"][0], given["numbers"][1:]
        uploads: State = {}
        if program.probe is not None:
            nothing = {n: torch.zeros_like(p) for n, p in params.items()}
            uploads["measured"] = program.probing.take(True)(nothing, sent, given["probe"])
            if program.probe.end is not None:
                batches = (given["probe"]["size"] > 0).sum(0).clamp_min(1)
                uploads["measured"] = vmap(program.probe.end)(uploads["measured"], batches)
        start = (*sent, program.optimizer.init(params), torch.zeros_like(lr))
        after = program.training.take(True, self._widths)(start, ({}, sent, shared, lr), given["steps"])
        seen = given["steps"]["size"].sum(0).clamp_min(1)
        uploads["buffers"] = after[1]
        trees, E, loss = self._sums.sums(params, after[0], uploads, {}, after[3], seen, w)
        return reduced(self._layers, model, trees, E, loss, len(w))
