"""A stack of clients' rounds as one tensor program: every parameter, buffer and optimizer state has one more dimension
in front, the client's, and every step is one call for all of them (torch.func.vmap of one client's own code).

The clients take exactly the batches they would take alone. Where some have fewer steps, the others go on without them;
where their batches differ in size, the shorter ones are padded with rows that count nowhere, unless samples of a batch
see each other (batch norm): then clients with batches of the same size go together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedsim import growth
from fedsim.client.sgd import Sgd
from fedsim.cohort import Partial, Upload
from fedsim.data import PAD, ClientData, Dataset, crop_and_flip
from fedsim.local import OPTIMIZER, dropout_key, optimizer_part
from fedsim.participation.base import steps_taken
from fedsim.program import Carry, Fixed, Given, Moments, Program
from fedsim.task import NOBODY
from fedsim.types import Batch, Context, Finished, Model, State, Tree, Work

GATHERED = 2**25
"""Bytes of samples brought together at a time, for as many steps as that holds."""


def train(work: Work, clients: Sequence[int], program: Program, size: int) -> Upload:
    """The clients' uploads, stacked. With a compiled program, stacks that are not full are filled up to `size`."""
    measured = sensitivities(work, clients) if work.probe is not None else None
    stack = Stack(work, clients, program, size)
    stack.descend()
    end, state = stack.finish(), stack.part(stack.carry.state)
    kept = end.kept | {OPTIMIZER + n: t for n, t in state.items() if work.optimizer.persist_state}
    delta = {n: p - end.model.params[n] for n, p in work.server.params.items()}
    return Upload(
        delta,
        work.task.layers.stacked_norms(delta),
        end.model.buffers,
        measured,
        stack.mean_loss(),
        kept or None,
        end.sent,
        end.report,
        end.model.params if work.individual else None,
    )


def summed(clients: Sequence[int], weights: Sequence[float], count: int, stack: Upload) -> Partial:
    """A stack, reduced at once; `count` clients are in the whole cohort."""
    w = torch.tensor(weights, dtype=stack.loss.dtype, device=stack.loss.device)

    def total(tree: Tree, factors: Tensor) -> Tree:
        return {n: torch.tensordot(factors, t.to(factors.dtype), 1) for n, t in tree.items()}

    sums = {"delta": total(stack.delta, w), "buffers": total(stack.buffers, w)}
    if stack.measured is not None:
        sums["measured"] = total(stack.measured, w)
    if stack.sent is not None:
        sums["sent"] = total(stack.sent, torch.full_like(w, 1 / count))
    states: dict[int, State] = {}
    if stack.state is not None:
        # Copies: a slice would keep the whole stack alive.
        states = {client: tree_map(torch.clone, at(stack.state, place)) for place, client in enumerate(clients)}
    reports = [] if stack.report is None else list(stack.report)
    return Partial(sums, w @ stack.norms, w @ stack.loss, states, reports)


def apart(stack: Upload) -> Iterator[Upload]:
    """The clients of a stack one by one, for those who must see them so."""
    for place in range(len(stack.loss)):
        yield Upload(
            at(stack.delta, place),
            stack.norms[place],
            at(stack.buffers, place),
            at(stack.measured, place),
            stack.loss[place],
            stack.state and tree_map(torch.clone, at(stack.state, place)),
            at(stack.sent, place),
            at(stack.report, place),
            at(stack.params, place),
        )


def at(tree: Any, place: int) -> Any:
    """One client's part."""
    return None if tree is None else tree_map(lambda t: t[place], tree)


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of stacks, from the clients' trees."""
    return tree_map(lambda *tensors: torch.stack(tensors), *trees)


def cut(work: Work, clients: Sequence[int], size: int) -> list[list[int]]:
    """The cohort in stacks of clients that keep the same kind of state (such as those that have taken part before),
    those with many samples together, so that few wait for the others."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for client in clients:
        kinds.setdefault(tuple(sorted(work.states.get(client, ()))), []).append(client)
    sizes = work.data.sizes
    ordered = [sorted(kind, key=lambda k: -sizes[k]) for kind in kinds.values()]
    return [kind[start : start + size] for kind in ordered for start in range(0, len(kind), size)]


def cut_into_steps(orders: Sequence[Sequence[np.ndarray]], width: int) -> np.ndarray:
    """What each client has in each step, of its epochs cut into pieces of `width`: [S, K, width, ...], -1 where there
    is nothing."""
    steps = [sum(-(-len(order) // width) for order in client) for client in orders]
    shape = next((order.shape[1:] for client in orders for order in client), ())
    table = np.full((max(steps), len(orders), width, *shape), -1, np.int64)
    for place, client in enumerate(orders):
        step = 0
        for order in client:
            number = -(-len(order) // width)
            rows = np.full((number * width, *shape), -1, np.int64)
            rows[: len(order)] = order
            table[step : step + number, place] = rows.reshape(number, width, *shape)
            step += number
    return table


def gathered(dataset: Dataset, positions: np.ndarray, crops: np.ndarray | None = None) -> Batch:
    """x and y, [S, K, B, ...], of samples at positions [S, K, B]."""
    stored, labels = dataset.train_x, dataset.train_y
    padded = bool((positions < 0).any())
    flat = torch.from_numpy(np.maximum(positions, 0) if padded else positions).to(labels.device).view(-1)
    x = stored.flatten(1).index_select(0, flat).view(-1, *stored.shape[1:])  # copies whole rows, unlike stored[flat]
    if crops is not None:
        x = crop_and_flip(x, torch.from_numpy(crops).to(labels.device).clamp_min(0).view(-1, crops.shape[-1]))
    y = labels.index_select(0, flat).view(*positions.shape, *labels.shape[1:])
    if padded:
        nobody = torch.from_numpy(positions < 0).to(labels.device).view(*positions.shape, *(1,) * (labels.ndim - 1))
        y = y.masked_fill(nobody, PAD if dataset.sequence else NOBODY)
    return dataset.inputs(x).view(*positions.shape, *stored.shape[1:]), y


def groups(sizes: np.ndarray, exact: bool) -> list[np.ndarray]:
    """Who takes a step together: all who have a batch, or those whose batches [K, batches of a step] are as large."""
    present = np.flatnonzero(sizes[:, 0])
    if not exact:
        return [present]
    kinds, kind = np.unique(sizes[present], axis=0, return_inverse=True)
    return [present[kind.reshape(-1) == k] for k in range(len(kinds))]


@dataclass(frozen=True)
class Block:
    """Some epochs of every client, cut into steps."""

    index: np.ndarray
    """[S, K, B] positions in the dataset, -1 where there is none."""
    crops: np.ndarray | None
    """[S, K, B, 3] of augmented images."""
    extra: Sequence[np.ndarray]
    """[S, K, B] for each extra batch of a step."""
    taken: np.ndarray
    """[S, K] steps that a client has taken before."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """[S, K, batches]: samples of each client in each step's batch, and in the extra ones."""
        return np.stack([(table >= 0).sum(2) for table in (self.index, *self.extra)], 2)

    def padded(self, multiple: int) -> "Block":
        """With steps of nobody at the end."""
        missing = -len(self.index) % multiple
        if not missing:
            return self

        def longer(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, np.full((missing, *array.shape[1:]), -1, np.int64)])

        crops = None if self.crops is None else longer(self.crops)
        return Block(longer(self.index), crops, [longer(e) for e in self.extra], longer(self.taken))

    def moments(self, dataset: Dataset, key: Tensor, steps: slice) -> Moments:
        """What a program is given for some of the steps."""
        batches = [gathered(dataset, self.index[steps], None if self.crops is None else self.crops[steps])]
        batches += [gathered(dataset, e[steps]) for e in self.extra]
        sizes = torch.from_numpy(self.sizes[steps, :, 0].astype(np.float32)).to(key.device)
        keys = key + torch.from_numpy(self.taken[steps, :, None]).to(key)
        return [*(t for batch in batches for t in batch), sizes, keys]


class Stack:
    """Clients in training."""

    def __init__(self, work: Work, clients: Sequence[int], program: Program, size: int) -> None:
        self.work, self.clients, self.program = work, list(clients), program
        self.device = next(iter(work.model.params.values())).device
        rule = work.client
        self.data = [work.data.client(k, work.round, rule.batch_size) for k in clients]
        # A compiled program is made for stacks of one size: the last client stands there more than once, for nothing.
        self.size = size if program.masked else len(clients)
        filled = [*clients] + [clients[-1]] * (self.size - len(clients))
        self.own = stacked([growth.padded_state(work.states.get(k, {}), work.model.params) for k in filled])

        def start(own: State) -> Any:
            model = rule.start(self._context(own))
            return model.params, model.buffers, optimizer_part(own) or work.optimizer.init(model.params)

        def copies(t: Tensor) -> Tensor:
            return t.expand(self.size, *t.shape).contiguous()

        # Clients without a state of their own all start alike.
        begin = tree_map(torch.Tensor.contiguous, vmap(start)(self.own)) if self.own else tree_map(copies, start({}))
        params, buffers, state = begin
        some = next(iter(work.model.params.values()))
        self.carry = Carry(params, buffers, state, some.new_zeros(self.size))
        self.fixed = Fixed(self.own, work.model, work.shared, some.new_tensor(work.lr))
        self.key = dropout_key(work, filled)
        self.steps, self.seen = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)

    def part(self, tree: Any) -> Any:
        """The clients' own part of a stack that was filled up."""
        count = len(self.clients)
        return tree if count == self.size else tree_map(lambda t: t[:count], tree)

    def _context(self, own: State, place: int | None = None) -> Context:
        """Of one client; inside a stack's program, without its data."""
        task = self.program.task if place is None else self.work.task
        data = cast(ClientData, Given(iter(()))) if place is None else self.data[place]
        return Context(task, self.work.model, self.work.shared, own, data, self.work.lr)

    def _own(self, place: int) -> State:
        state: State = at(self.own, place) if self.own else {}
        return state

    def _model(self, place: int) -> Model:
        return Model(at(self.carry.params, place), at(self.carry.buffers, place))

    def descend(self) -> None:
        """The loop: block after block of epochs, as each client's rule plans them."""
        rule = self.work.client

        def loss_of(place: int) -> Callable[[], float]:
            return lambda: self.work.task.mean_loss(self._model(place), self.data[place]).item()

        plans = [rule.plan(self._context(self._own(k), k), loss_of(k)) for k in range(len(self.clients))]
        drawn = [data.drawn() for data in self.data]
        while any(epochs := [next(plan, 0) for plan in plans]):
            block = self._block(epochs, drawn)
            self._take(block)
            self.steps += (block.sizes[..., 0] > 0).sum(0)
            self.seen += block.sizes[..., 0].sum(0)

    def _block(self, epochs: Sequence[int], drawn: Sequence[Iterator[np.ndarray]]) -> Block:
        rule, effort = self.work.client, self.work.effort
        nothing: list[list[np.ndarray]] = [[]] * (self.size - len(self.clients))
        width = rule.batch_size or max(len(data) for data in self.data)
        orders = [list(data.orders(number)) for data, number in zip(self.data, epochs, strict=True)]
        index = cut_into_steps([*([order for order, _ in client] for client in orders), *nothing], width)
        for place, (client, data) in enumerate(zip(self.clients, self.data, strict=True)):
            if client in effort:
                index[steps_taken(rule.epochs * data.steps, effort[client]) - self.steps[place] :, place] = -1
        index = index[: int((index >= 0).any((1, 2)).sum())]  # steps that somebody takes
        there = (index >= 0).sum(2) > 0
        crops = None
        if self.work.data.dataset.augment:
            crops = cut_into_steps([*([c for _, c in client if c is not None] for client in orders), *nothing], width)
            crops = crops[: len(index)]
        extra: list[list[np.ndarray]] = [[] for _ in range(rule.extra_batches)]
        for now in there:
            for tables in extra:
                draws = [[next(draw)] if takes else [] for draw, takes in zip(drawn, now, strict=False)]
                tables.append(cut_into_steps([*draws, *nothing], width))
        taken = np.cumsum(there, 0) - there + self.steps
        return Block(index, crops, [np.concatenate(tables) for tables in extra], taken)

    def _take(self, block: Block) -> None:
        """Its steps: many clients and, compiled, several steps in a call."""
        together = self.program.unroll
        block, dataset = block.padded(together), self.work.data.dataset
        sizes, width = block.sizes, block.index.shape[2]
        step_bytes = block.index[:together].size * dataset.train_x[0].numel() * 4
        at_once = together * max(GATHERED // max(step_bytes, 1), 1)
        for first in range(0, len(sizes), at_once):
            moments = block.moments(dataset, self.key, slice(first, first + at_once))
            pieces = ([t[i : i + together] for t in moments] for i in range(0, len(moments[0]), together))
            if self.program.masked or (sizes[first : first + at_once] == width).all():
                compiled = width == self.work.client.batch_size
                self.carry = self.program(self.carry, self.fixed, pieces, compiled)
                continue
            for now, piece in zip(sizes[first : first + at_once], pieces, strict=True):
                for members in groups(now, exact=self.work.task.mixes):
                    self._some(members, now[members].max(0).tolist(), piece)

    def _some(self, members: np.ndarray, widths: list[int], piece: Moments) -> None:
        """A step of some of the clients, whose batches (and extra ones) have at most so many samples."""
        chosen = torch.from_numpy(members).to(self.device)

        def some(tree: Any) -> Any:
            return tree_map(lambda t: t.index_select(0, chosen), tree)

        before = self.carry.parts()
        *batches, sizes, key = [t.index_select(1, chosen) for t in piece]
        given = [*(t[:, :, : widths[i // 2]] for i, t in enumerate(batches)), sizes, key]
        fixed = replace(self.fixed, own=some(self.own))
        after = self.program(Carry(*some(before)), fixed, [given], compiled=False)
        self.carry = Carry(*tree_map(lambda t, part: t.index_copy(0, chosen, part), before, after.parts()))

    def mean_loss(self) -> Tensor:
        loss: Tensor = self.part(self.carry.loss / torch.from_numpy(np.maximum(self.seen, 1)).to(self.device))
        return loss

    def finish(self) -> Finished:
        """The rule's end of the round: for all clients at once, unless it goes over their data again."""
        rule = self.work.client
        if type(rule).finish is Sgd.finish:  # as it is
            return Finished(Model(*self.part((self.carry.params, self.carry.buffers))))
        if rule.looks_back:
            ends = [
                rule.finish(self._model(k), steps, self._context(self._own(k), k))
                for k, steps in enumerate(self.steps.tolist()[: len(self.clients)])
            ]
            return _finished(stacked([_parts(end) for end in ends]))

        def one(params: Tree, buffers: Tree, own: State, steps: Tensor) -> Any:
            return _parts(rule.finish(Model(params, buffers), cast(int, steps), self._context(own)))

        steps = torch.from_numpy(self.steps).to(self.carry.loss)  # a number that goes with the parameters
        return _finished(vmap(one)(*self.part((self.carry.params, self.carry.buffers, self.own, steps))))


def sensitivities(work: Work, clients: Sequence[int]) -> Tree:
    """What the aggregator's probe measures at the broadcast model on every client's B_k, stacked."""
    assert work.probe is not None
    probe, model, task, dataset = work.probe, work.model, work.task.for_stacks(), work.data.dataset
    held = [work.data.split.sensitivity(client) for client in clients]
    width = probe.batch_size or work.client.batch_size or max(len(h) for h in held) or 1
    index = cut_into_steps([[h] for h in held], width)
    device = dataset.train_y.device

    def one(found: Tree, buffers: Tree, x: Tensor, there: Tensor) -> Tree:
        return probe.step(task, Model(model.params, buffers), found, x, there)

    found: Tree = {n: p.new_zeros(len(clients), *p.shape) for n, p in model.params.items()}
    for positions in index:
        sizes = (positions >= 0).sum(1)[:, None]
        for members in groups(sizes, exact=probe.mixes and task.mixes):
            chosen, now = torch.from_numpy(members).to(device), positions[members, : sizes[members].max()]
            x, _ = gathered(dataset, now)
            buffers = {n: b.expand(len(members), *b.shape) for n, b in model.buffers.items()}
            before = {n: t.index_select(0, chosen) for n, t in found.items()}
            after = vmap(one)(before, buffers, x, torch.from_numpy(now >= 0).to(device))
            found = {n: t.index_copy(0, chosen, after[n]) for n, t in found.items()}
    batches = torch.from_numpy(np.maximum((index >= 0).any(2).sum(0), 1)).to(device)
    result: Tree = vmap(probe.end)(found, batches)
    return result


def _parts(end: Finished) -> Any:
    """In the plain form that torch.func knows."""
    return (end.model.params, end.model.buffers), end.kept, end.sent or {}, [] if end.report is None else [end.report]


def _finished(parts: Any) -> Finished:
    model, kept, sent, report = parts
    return Finished(Model(*model), kept, sent or None, report[0] if report else None)
