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

from fedsim import growth
from fedsim.client.sgd import Sgd
from fedsim.cohort import Partial, Upload
from fedsim.data import PAD, ClientData, Dataset, crop_and_flip, rows
from fedsim.layers import Layers
from fedsim.local import OPTIMIZER, dropout_key, optimizer_part
from fedsim.participation.base import steps_taken
from fedsim.program import Carry, Compiled, Fixed, Given, Moments, Program
from fedsim.task import NOBODY
from fedsim.trees import mapped
from fedsim.types import Batch, Context, Finished, Model, State, Tree, Work

GATHERED = 2**25
"""Bytes of samples brought together at a time, for as many steps as that holds."""


@dataclass(frozen=True)
class Trained:
    """A stack of clients after their round: every tensor has the client's dimension in front."""

    clients: Sequence[int]
    end: Finished
    measured: Tree | None
    loss: Tensor
    """Sum over the samples, each at the moment it was used."""
    seen: Tensor
    """How many those were (1 at least)."""
    kept: State


@dataclass(frozen=True)
class Ready:
    """A stack's samples for all of its steps, gathered beforehand."""

    moments: Moments
    sizes: np.ndarray
    """[S, K, 1], how many each client has in each step."""
    probe: Moments | None
    """And those of its sensitivity pass, if there is one."""


def train(work: Work, clients: Sequence[int], program: Program, size: int, ready: Ready | None = None) -> Trained:
    """With a compiled program, stacks that are not full are filled up to `size` while they train."""
    measured = None
    if work.probe is not None:
        held = ready.probe if ready is not None and ready.probe is not None else None
        measured = sensitivities(work, clients, program, held or probe_moments(work, clients, program, size))
    stack = Stack(work, clients, program, size)
    stack.descend(ready)
    end, loss = stack.finish(), stack.part(stack.carry.loss)
    kept = dict(end.kept)
    if work.optimizer.persist_state:
        kept |= {OPTIMIZER + n: t for n, t in stack.part(stack.carry.state).items()}
    seen = torch.from_numpy(np.maximum(stack.seen[: len(clients)], 1)).to(loss)
    return Trained(clients, end, measured, loss, seen, kept)


class Sums:
    """Stacks reduced at once, each to its part of the round's sums."""

    def __init__(self, layers: Layers, size: int, compile: bool) -> None:
        self._layers, self._size = layers, size
        self._compiled = Compiled(self.sums) if compile else None

    def __call__(self, work: Work, weights: Sequence[float], count: int, stack: Trained) -> Partial:
        """`count` clients are in the whole cohort."""
        end, w = stack.end, torch.tensor(weights, dtype=stack.loss.dtype, device=stack.loss.device)
        uploads = {"buffers": end.model.buffers} | ({} if stack.measured is None else {"measured": stack.measured})
        sent = {} if end.sent is None else {"sent": end.sent}
        # One that is not full has a size of its own, which may never come again.
        sums = self._compiled if self._compiled and len(weights) == self._size else self.sums
        given = work.server.params, end.model.params, uploads, sent, stack.loss, stack.seen, w
        trees, E, loss = sums(*given)
        if end.sent is not None:
            trees["sent"] = {n: t / count for n, t in trees["sent"].items()}
        # Copies: a slice would keep the whole stack alive.
        states = {k: mapped(torch.clone, at(stack.kept, place)) for place, k in enumerate(stack.clients) if stack.kept}
        return Partial(trees, E, loss, states, [] if end.report is None else list(end.report))

    def sums(
        self, server: Tree, params: Tree, uploads: State, sent: State, loss: Tensor, seen: Tensor, w: Tensor
    ) -> tuple[State, Tensor, Tensor]:
        """(sum_k w_k of every upload, of the norms and of the mean losses), and the plain sum of what is `sent`."""
        delta = {n: p - params[n] for n, p in server.items()}
        trees: State = {
            name: {n: torch.mv(t.to(w.dtype).reshape(len(w), -1).t(), w).view(t.shape[1:]) for n, t in tree.items()}
            for name, tree in {"delta": delta, **uploads}.items()
        }
        trees |= {name: {n: t.sum(0) for n, t in tree.items()} for name, tree in sent.items()}
        return trees, w @ self._layers.stacked_norms(delta), w @ (loss / seen)


def apart(work: Work, stack: Trained) -> list[Upload]:
    """The clients of a stack one by one, for those who must see them so."""
    end, server = stack.end, work.server.params
    delta = {n: p - end.model.params[n] for n, p in server.items()}
    norms, loss = work.task.layers.stacked_norms(delta), stack.loss / stack.seen
    return [
        Upload(
            at(delta, place),
            norms[place],
            at(end.model.buffers, place),
            at(stack.measured, place),
            loss[place],
            mapped(torch.clone, at(stack.kept, place)) if stack.kept else None,
            at(end.sent, place),
            None if end.report is None else end.report[place],
            at(end.model.params, place) if work.individual else None,
        )
        for place in range(len(loss))
    ]


def at(tree: Any, place: int) -> Any:
    """One client's part."""
    return mapped(lambda t: t[place], tree)


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of stacks, from the clients' trees."""
    return mapped(lambda *tensors: torch.stack(tensors), *trees)


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
    steps = max(sum(-(-len(order) // width) for order in client) for client in orders)
    shape = next((order.shape[1:] for client in orders for order in client), ())
    rows = np.full((len(orders), steps * width, *shape), -1, np.int64)
    for row, client in zip(rows, orders, strict=True):
        start = 0
        for order in client:
            row[start : start + len(order)] = order
            start += -(-len(order) // width) * width
    return np.ascontiguousarray(rows.reshape(len(orders), steps, width, *shape).swapaxes(0, 1))


def with_steps_of_nobody(array: np.ndarray, multiple: int, fill: int = -1) -> np.ndarray:
    """At the end, so that there are a multiple of so many, and some at all."""
    missing = -len(array) % multiple if len(array) else multiple
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, np.int64)]) if missing else array


def gathered(dataset: Dataset, positions: np.ndarray, crops: np.ndarray | None = None) -> Batch:
    """x as stored and y, [S, K, B, ...], of samples at positions [S, K, B]."""
    stored, labels = dataset.train_x, dataset.train_y
    padded = bool(positions.min(initial=0) < 0)
    flat = torch.from_numpy(np.maximum(positions, 0) if padded else positions).to(labels.device).view(-1)
    x = rows(stored, flat)
    if crops is not None:
        x = crop_and_flip(x, torch.from_numpy(crops).to(labels.device).clamp_min(0).view(-1, crops.shape[-1]))
    y = rows(labels, flat).view(*positions.shape, *labels.shape[1:])
    if padded:
        nobody = torch.from_numpy(positions < 0).to(labels.device).view(*positions.shape, *(1,) * (labels.ndim - 1))
        y = y.masked_fill(nobody, PAD if dataset.sequence else NOBODY)
    return x.view(*positions.shape, *stored.shape[1:]), y


def cut_into_pieces(moments: Moments, steps: int) -> Iterator[Moments]:
    """So many steps in each."""
    for first in range(0, len(moments["size"]), steps):
        yield mapped(lambda t, first=first: t[first : first + steps], moments)


def groups(sizes: np.ndarray, exact: bool) -> list[np.ndarray]:
    """Who takes a step together: all who have a batch, or those whose batches [K, batches of a step] are as large."""
    present = np.flatnonzero(sizes[:, 0])
    if not exact:
        return [present] if len(present) else []
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
    sizes: np.ndarray
    """[S, K, batches]: samples of each client in each step's batch, and in the extra ones."""

    def padded(self, multiple: int) -> "Block":
        """With steps of nobody at the end."""

        def longer(array: np.ndarray, fill: int = -1) -> np.ndarray:
            return with_steps_of_nobody(array, multiple, fill)

        crops, extra = None if self.crops is None else longer(self.crops), [longer(e) for e in self.extra]
        return Block(longer(self.index), crops, extra, longer(self.taken), longer(self.sizes, fill=0))

    def moments(self, dataset: Dataset, key: Tensor, drops: bool, steps: slice) -> Moments:
        """What a program is given for some of the steps."""
        crops = None if self.crops is None else self.crops[steps]
        batches = [gathered(dataset, self.index[steps], crops), *(gathered(dataset, e[steps]) for e in self.extra)]
        sizes = torch.from_numpy(self.sizes[steps, :, 0].astype(np.float32)).to(key.device)
        keys = key.expand(len(sizes), *key.shape).contiguous()  # a program is made for its arguments' strides
        if drops:
            keys = key + torch.from_numpy(self.taken[steps, :, None]).to(key)
        return {"batches": batches, "size": sizes, "key": keys}


class Stack:
    """Clients in training."""

    def __init__(self, work: Work, clients: Sequence[int], program: Program, size: int) -> None:
        self.work, self.clients, self.program = work, list(clients), program
        self.device = next(iter(work.model.params.values())).device
        rule = work.client
        # A compiled program is made for stacks of one size: the last client stands there more than once, for nothing.
        self.size = size if program.training.masked else len(clients)
        filled = [*clients] + [clients[-1]] * (self.size - len(clients))
        self.own = stacked([growth.padded_state(work.states.get(k, {}), work.model.params) for k in filled])

        def start(own: State) -> Any:
            model = rule.start(self._context(own))
            return model.params, model.buffers, optimizer_part(own) or work.optimizer.init(model.params)

        some = next(iter(work.model.params.values()))
        # Clients without a state of their own all start alike.
        params, buffers, state = vmap(start)(self.own) if self.own else start({})
        self.carry = Carry(params, buffers, state, some.new_zeros(self.size if self.own else ()), alike=not self.own)
        if self.own or program.training.unroll == 1:
            self._apart()
        self.fixed = Fixed(self.own, work.model, work.shared, some.new_tensor(work.lr))
        self.key = dropout_key(work, filled)
        self.steps, self.seen = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)

    @cached_property
    def data(self) -> list[ClientData]:
        work = self.work
        return [work.data.client(k, work.round, work.client.batch_size) for k in self.clients]

    def _apart(self) -> None:
        """Give everyone a place of their own."""

        def copies(t: Tensor) -> Tensor:
            return t.expand(self.size, *t.shape).contiguous() if self.carry.alike else t.contiguous()

        self.carry = Carry(*mapped(copies, self.carry.parts()))

    def part(self, tree: Any) -> Any:
        """The clients' own part of a stack that was filled up."""
        count = len(self.clients)
        return tree if count == self.size else mapped(lambda t: t[:count], tree)

    def _context(self, own: State, place: int | None = None) -> Context:
        """Of one client; inside a stack's program, without its data."""
        task = self.program.task if place is None else self.work.task
        data = cast(ClientData, Given(iter(()))) if place is None else self.data[place]
        return Context(task, self.work.model, self.work.shared, own, data, self.work.lr)

    def _own(self, place: int) -> State:
        state: State = at(self.own, place) if self.own else {}
        return state

    def _model(self, place: int) -> Model:
        model = self.carry.params, self.carry.buffers
        return Model(*(model if self.carry.alike else at(model, place)))

    def descend(self, ready: Ready | None = None) -> None:
        """The loop: block after block of epochs, as each client's rule plans them; or what lies ready."""
        if ready is None:
            self._planned()
        else:
            pieces = cut_into_pieces(ready.moments, self.program.training.unroll)
            self.carry = self.program(self.carry, self.fixed, pieces)
            self._count(ready.sizes)
        if self.carry.alike:  # nobody has taken a step
            self._apart()

    def _planned(self) -> None:
        rule = self.work.client

        def loss_of(place: int) -> Callable[[], float]:
            return lambda: self.work.task.mean_loss(self._model(place), self.data[place]).item()

        plans = [rule.plan(self._context(self._own(k), k), loss_of(k)) for k in range(len(self.clients))]
        drawn = [data.drawn() for data in self.data]
        while any(epochs := [next(plan, 0) for plan in plans]):
            block = self.block(epochs, drawn)
            self._take(block)
            self._count(block.sizes)

    def _count(self, sizes: np.ndarray) -> None:
        self.steps += (sizes[..., 0] > 0).sum(0)
        self.seen += sizes[..., 0].sum(0)

    def block(self, epochs: Sequence[int], drawn: Sequence[Iterator[np.ndarray]]) -> Block:
        """What everyone is given in the next so many epochs."""
        rule, effort = self.work.client, self.work.effort
        nothing: list[list[np.ndarray]] = [[]] * (self.size - len(self.clients))
        width = rule.batch_size or max(len(data) for data in self.data)
        orders = [list(data.orders(number)) for data, number in zip(self.data, epochs, strict=True)]
        index = cut_into_steps([*([order for order, _ in client] for client in orders), *nothing], width)
        for place, (client, data) in enumerate(zip(self.clients, self.data, strict=True)):
            if client in effort:
                index[steps_taken(rule.epochs * data.steps, effort[client]) - self.steps[place] :, place] = -1
        sizes = (index >= 0).sum(2)
        there = sizes > 0
        some = int(there.any(1).sum())  # steps that somebody takes
        index, sizes, there = index[:some], sizes[:some], there[:some]
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
        more = [np.concatenate(tables) for tables in extra]
        return Block(index, crops, more, taken, np.stack([sizes, *((table >= 0).sum(2) for table in more)], 2))

    def _take(self, block: Block) -> None:
        """Its steps: many clients and, compiled, several steps in a call."""
        loop, dataset = self.program.training, self.work.data.dataset
        block = block.padded(loop.unroll)
        sizes, width = block.sizes, block.index.shape[2]
        step_bytes = block.index[: loop.unroll].size * dataset.train_x[0].numel() * dataset.train_x.element_size()
        at_once = loop.unroll * max(GATHERED // max(step_bytes, 1), 1)
        for first in range(0, len(sizes), at_once):
            moments = block.moments(dataset, self.key, bool(self.work.task.drops), slice(first, first + at_once))
            pieces = cut_into_pieces(moments, loop.unroll)
            if loop.masked or (sizes[first : first + at_once] == width).all():
                self.carry = self.program(self.carry, self.fixed, pieces)
                continue
            for now, piece in zip(sizes[first : first + at_once], pieces, strict=True):
                for members in groups(now, exact=self.work.task.mixes):
                    self._some(members, now[members].max(0).tolist(), piece)

    def _some(self, members: np.ndarray, widths: list[int], piece: Moments) -> None:
        """A step of some of the clients, whose batches (and extra ones) have at most so many samples."""
        chosen = torch.from_numpy(members).to(self.device)

        def some(tree: Any, dim: int = 0) -> Any:
            return mapped(lambda t: t.index_select(dim, chosen), tree)

        before, given = self.carry.parts(), some(piece, dim=1)
        given["batches"] = [(x[:, :, :w], y[:, :, :w]) for (x, y), w in zip(given["batches"], widths, strict=True)]
        fixed = replace(self.fixed, own=some(self.own))
        after = self.program(Carry(*some(before)), fixed, [given], seldom=True)
        self.carry = Carry(*mapped(lambda t, part: t.index_copy(0, chosen, part), before, after.parts()))

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


def probe_moments(work: Work, clients: Sequence[int], program: Program, size: int) -> Moments:
    """Every client's B_k in batches. As in training, a compiled program is made for stacks of one size, and for so many
    steps."""
    loop, device = program.probing, work.data.dataset.train_y.device
    held = [[work.data.split.sensitivity(client)] for client in clients]
    index = cut_into_steps(held + [[]] * (size - len(clients) if loop.masked else 0), program.probe_widths[-1])
    index = with_steps_of_nobody(index, loop.unroll if loop.masked else 1)
    there = torch.from_numpy(index >= 0).to(device)
    return {"batches": [(gathered(work.data.dataset, index)[0],)], "size": there.sum(2), "there": there}


def sensitivities(work: Work, clients: Sequence[int], program: Program, moments: Moments) -> Tree:
    """What the aggregator's probe measures at the broadcast model on every client's B_k, stacked."""
    assert work.probe is not None
    model, loop, device = work.model, program.probing, work.data.dataset.train_y.device
    found: Tree = {n: torch.zeros_like(p) for n, p in model.params.items()}
    pieces = cut_into_pieces(moments, loop.unroll)
    if loop.masked:
        found = loop(found, (model.params, model.buffers), pieces, alike=True)
        found = {n: t[: len(clients)] for n, t in found.items()}
    else:
        found = {n: t.expand(len(clients), *t.shape).contiguous() for n, t in found.items()}
        held, width = work.data.split.held[list(clients)], program.probe_widths[-1]
        for step, piece in enumerate(pieces):
            now = np.clip(held - step * width, 0, width)
            for members in groups(now[:, None], exact=work.probe.mixes and work.task.mixes):
                chosen, most = torch.from_numpy(members).to(device), now[members].max()
                rows = mapped(lambda t, chosen=chosen: t.index_select(1, chosen), piece)
                part = mapped(lambda t, most=most: t[:, :, :most], {"batches": rows["batches"], "there": rows["there"]})
                buffers = {n: b.expand(len(members), *b.shape) for n, b in model.buffers.items()}
                before = {n: t.index_select(0, chosen) for n, t in found.items()}
                after = loop(before, (model.params, buffers), [part])
                found = {n: t.index_copy(0, chosen, after[n]) for n, t in found.items()}
    if work.probe.end is not None:
        found = vmap(work.probe.end)(found, (moments["size"] > 0).sum(0)[: len(clients)].clamp_min(1))
    return found


def _parts(end: Finished) -> Any:
    """In the plain form that torch.func knows."""
    return (end.model.params, end.model.buffers), end.kept, end.sent or {}, [] if end.report is None else [end.report]


def _finished(parts: Any) -> Finished:
    model, kept, sent, report = parts
    return Finished(Model(*model), kept, sent or None, report[0] if report else None)
