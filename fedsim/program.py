"""Local steps as one program: a pure function of tensors, for one client or a stack of them, compiled if asked for.

The compiler is given a graph that make_fx has recorded, not the Python code: whatever a rule or a model does in Python
is gone by then, the sizes are fixed, and nothing has to be looked at before each call. Samples are given as they are
stored: a step makes its inputs of them itself, a batch at a time, while they are in the cache.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim import kernels, native
from fedsim.data import ClientData
from fedsim.kernels import Decompositions
from fedsim.model.dropout import KEY
from fedsim.trees import Form, difference, leaves, mapped, packed, rebuilt
from fedsim.types import Batch, Context, Model, State, Tree, Work

SMALL, UNROLL = 2**15, 8
"""A model of at most so many parameters has its steps compiled together, so many at a time: calls are most of its time,
and longer programs take longer to compile."""


@dataclass(frozen=True)
class Given:
    """What a rule is given of a client's data inside a program: the batches that were drawn for it."""

    extra: Iterator[Batch]


@dataclass
class Carry:
    """What changes from step to step."""

    params: Tree
    buffers: Tree
    state: State
    """The optimizer's."""
    loss: Tensor
    """Sum over the samples so far, each at the moment it was used."""
    alike: bool = False
    """A stack's clients are all where they began, at the same place: nothing has their dimension yet."""

    def parts(self) -> tuple[Tree, Tree, State, Tensor]:
        """In the plain form that torch.func knows."""
        return self.params, self.buffers, self.state, self.loss


@dataclass
class Fixed:
    """What does not, in a round: the client's own state (stacked), and what all clients share."""

    own: State
    model: Model
    shared: State
    lr: Tensor


@dataclass(frozen=True)
class Start:
    """Of clients that have nothing of their own."""

    carry: Carry
    fixed: Fixed
    server: Tree
    """What an update is measured against: the server's present parameters."""


Moments = dict[str, Any]
"""What a step is given or, in a stack, several steps, each tensor with the step as first dimension: `batches`, the
batch and the extra ones, each x as it is stored and y; and, where they are wanted, `size`, how many samples the batch
has, `there`, which of its rows are samples, and `key` of the step's dropout."""


class Compiled:
    """A pure function of trees of tensors, compiled for every form, size and kind of number that comes."""

    def __init__(self, function: Callable[..., Any], forms: Decompositions | None = None) -> None:
        """`forms`: which operations have a form of their own here."""
        self._function, self._forms = function, forms or {}
        self._made: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    def __call__(self, *trees: Any, names: Iterable[str] = ()) -> Any:
        """`names` are what may differ although all sizes are the same."""
        forms: list[Form] = []
        flat = leaves(trees, forms)
        kind = (*names, *forms, *[(t.dtype, t.shape, t.stride()) for t in flat])
        if kind not in self._made:
            self._made[kind] = self._make(trees, flat)
        program, form = self._made[kind]
        return rebuilt(form, iter(program(*flat)))

    def _make(self, trees: Any, flat: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
        # The first gradient starts autograd's threads. With what is imported next there would be some of these, and no
        # process that is forked afterwards (engine=process, later in the same sweep) could take a gradient.
        with torch.enable_grad():
            one = torch.ones((), requires_grad=True)
            torch.autograd.grad(one * 1, one)
        # Where there is CUDA's compiler and no CUDA it would warn, in the middle of a progress bar.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from torch import _inductor  # these here, since they take seconds to import
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        survive_forks()

        form: list[Any] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            result = self._function(*rebuilt(trees, iter(tensors)))
            form[:] = [mapped(lambda _: ..., result)]
            return leaves(result)

        # A tensor that stood for two arguments would be recorded as one.
        apart = [t.view(t.shape) if any(t is other for other in flat[:i]) else t for i, t in enumerate(flat)]
        graph = make_fx(on_tensors, self._forms)(*apart)
        # Stand-ins with an environment of shapes, though all of them are fixed: only then torch keeps what it makes of
        # a graph on disk, and the next run of the same model, or cell of a table, begins in a third of the time.
        standing = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        examples: list[Any] = [standing.from_tensor(t, static_shapes=True) for t in apart]
        # Nobody has to look at every tensor's size in every call, for 3 % of a small batch's step: they are `kind`.
        options = {"size_asserts": False}
        return native.whole(lambda: _inductor.compile(graph, examples, options=options)), form[0]


@cache
def survive_forks() -> None:
    """The compiler's threads do not come along into a process that is forked; it would wait for them for ever."""
    from torch._inductor.async_compile import AsyncCompile

    os.register_at_fork(after_in_child=AsyncCompile.pool.cache_clear)


class Loop:
    """A step that is taken again and again, `step(carry, constant, moment) -> carry`, by one client or, under vmap,
    by a stack of them."""

    def __init__(
        self,
        step: Callable[[Any, Any, Moments], Any],
        inputs: Callable[[Tensor], Tensor],
        stacked: bool,
        in_dims: tuple[int | None, ...],
        masked: bool,
        compile: bool,
        forms: Decompositions,
        unroll: int,
        whole: bool = False,
    ) -> None:
        """`inputs` of the samples as they are stored; `in_dims`: what of `constant` has the clients' dimension."""
        self._step, self._inputs, self._stacked, self._in_dims = step, inputs, stacked, in_dims
        self.masked = masked
        """Whether a step may be nobody's, or only some clients': those without a sample stay as they are."""
        self.unroll = unroll
        """Steps in a call."""
        self.whole = whole
        """Whether one call takes all steps there are in a round."""
        self._compiled = {a: Compiled(self.take(a), forms) for a in (True, False)} if compile else None

    def __call__(
        self,
        carry: Any,
        constant: Any,
        pieces: Iterable[Moments],
        alike: bool = False,
        names: Iterable[str] = (),
        seldom: Callable[[Moments], bool] = lambda given: False,
    ) -> Any:
        """Piece after piece of the steps; those of sizes that come too `seldom` are not compiled for. `alike`: the
        carry is one for all clients, until their first step."""
        with torch.no_grad():
            for given in pieces:
                if self._compiled and not seldom(given):
                    carry = self._compiled[alike](carry, constant, given, names=names)
                else:
                    carry = self.take(alike)(carry, constant, given)
                alike = False
        return carry

    def take(self, alike: bool, widths: Sequence[int] = ()) -> Callable[[Any, Any, Moments], Any]:
        """Several of them, the first perhaps from one place for all. `widths`: how many rows of each step's batch are
        anybody's, where a stack's may be fewer than there is room for."""

        def take(carry: Any, constant: Any, given: Moments) -> Any:
            for place in range(len(given["batches"][0][0]) if self._stacked else 1):
                step, moment = self._once, given
                if self._stacked:
                    step = vmap(step, in_dims=(None if alike and place == 0 else 0, self._in_dims, 0))
                    moment = mapped(lambda t, place=place: t[place], given)
                if widths:
                    moment["batches"] = mapped(lambda t, place=place: t[:, : widths[place]], moment["batches"])
                batches = [(self._inputs(x), *y) for x, *y in moment["batches"]]
                carry = step(carry, constant, moment | {"batches": batches})
            return carry

        return take

    def _once(self, carry: Any, constant: Any, moment: Moments) -> Any:
        after = self._step(carry, constant, moment)
        if not self.masked:
            return after
        there = moment["size"] > 0
        return mapped(lambda a, b: torch.where(there, a, b), after, carry)


class Program:
    """A client's round in steps of a client rule and a client optimizer (`training`) and, before that, of what the
    aggregator has it measure (`probing`): for one client or for a stack of them."""

    def __init__(self, work: Work, stacked: bool, compile: bool, short: Sequence[int] = ()) -> None:
        """`short`: sizes of a client's last batch that come often."""
        self.task, self.rule, self.optimizer = work.task.for_stacks(), work.client, work.optimizer
        self.data, self.stacked, self.compile = work.data.dataset, stacked, compile
        data, batch_size = work.data, work.client.batch_size
        self._packs = compile and not stacked
        self._start: tuple[Work, Start] | None = None
        self._there: dict[tuple[int, int], Tensor] = {}
        layers = work.task.layers

        def upload(server: Tree, params: Tree) -> tuple[Tree, Tensor]:
            delta = difference(server, params)
            return delta, layers.norms(delta)

        self._upload = Compiled(upload)
        self._some = next(iter(work.model.params.values()))
        self.sizes = {size: self._some.new_tensor(size) for size in (batch_size, *short) if size is not None}
        """Of batches that there is a program for."""
        small = sum(p.numel() for p in work.model.params.values()) <= SMALL

        def unrolled(masked: bool, largest: int, width: int | None, epochs: int = 1) -> tuple[int, bool]:
            """As many steps as the client with most samples takes, in equal pieces of at most UNROLL; and whether
            that is a single piece."""
            if not (masked and small and width):
                return 1, False
            steps = max(epochs * -(-largest // width), 1)
            return -(-steps // -(-steps // UNROLL)), steps <= UNROLL

        masked = stacked and compile and not self.task.mixes and batch_size is not None
        pieces = unrolled(masked, int(data.sizes.max()), batch_size, work.client.epochs)
        dims: tuple[int | None, ...] = (0, None, None, None)
        forms = kernels.forms(stacked, data.dataset.train_x.device)
        self.training = Loop(self._descend, self._inputs, stacked, dims, masked, compile, forms, *pieces)
        self.probe, self.probing = work.probe, cast(Loop, None)
        if self.probe is not None:
            self.probe_size = self.probe.batch_size or batch_size
            """Samples of a batch; None: all there are."""
            held = np.maximum(data.split.held, 1)
            usual = sorted({int(np.median(held)), int(held.max())})
            self.probe_widths = sorted({min(n, self.probe_size or n) for n in usual})
            """What batches are filled up to, with rows that count nowhere; the last holds any."""
            mixes = self.probe.mixes and self.task.mixes
            masked = stacked and compile and not mixes and self.probe_size is not None
            pieces = unrolled(masked, int(held.max()), self.probe_widths[-1])
            dims = (None, None if masked else 0)  # batch norm changes its copy of the buffers
            self.probing = Loop(self._measure, self._inputs, stacked, dims, masked, compile, forms, *pieces)

    def __call__(self, carry: Carry, fixed: Fixed, pieces: Iterable[Moments], seldom: bool = False) -> Carry:
        """`seldom`: that many clients come too seldom together to be compiled for."""

        def other_size(given: Moments) -> bool:
            return seldom or given["batches"][0][1].shape[2 if self.stacked else 0] not in self.sizes

        constant = fixed.own, (fixed.model.params, fixed.model.buffers), fixed.shared, fixed.lr
        names = tuple(fixed.own)
        return Carry(*self.training(carry.parts(), constant, pieces, carry.alike, names, other_size))

    def measured(self, found: Tree, model: Model, given: Moments) -> Tree:
        """By a single client, after one more batch."""
        other_size = len(given["there"]) not in self.probe_widths
        after: Tree = self.probing(found, (model.params, model.buffers), [given], seldom=lambda _: other_size)
        return after

    def uploaded(self, work: Work, params: Tree) -> tuple[Tree, Tensor]:
        """(theta - theta_k, its norms by layer and part)."""
        found: tuple[Tree, Tensor] = self._upload(self.start(work).server, self.laid_out(params))
        return found

    def there(self, samples: int, width: int) -> Tensor:
        """Which rows of so many are samples."""
        if (samples, width) not in self._there:
            self._there[samples, width] = torch.arange(width, device=self._some.device) < samples
        return self._there[samples, width]

    def size(self, samples: int) -> Tensor:
        """Of a single client's batch, as a step is given it."""
        return self.sizes[samples] if samples in self.sizes else self._some.new_tensor(samples)

    def _descend(self, carry: Any, constant: Any, moment: Moments) -> Any:
        (params, buffers, state, loss_sum), (own, model, shared, lr) = carry, constant
        batch, *extra = moment["batches"]
        # The rate is a tensor, so that a program serves all rounds of a schedule.
        context = Context(self.task, Model(*model), shared, own, cast(ClientData, Given(iter(extra))), lr)
        statistics = {n: b.clone() for n, b in buffers.items()} | ({KEY: moment["key"]} if self.task.drops else {})
        params = dict(params)  # as torch.func knows it
        grads, loss = self.rule.gradient(self.task, params, statistics, batch, context)
        new, new_state = self.optimizer.step(params, grads, state, lr)
        statistics.pop(KEY, None)
        after = self.laid_out(new), self.laid_out(statistics), self.all_laid_out(new_state)
        return *after, loss_sum + loss * moment["size"]

    def _measure(self, found: Any, model: Any, moment: Moments) -> Any:
        assert self.probe is not None
        (x,) = moment["batches"][0]
        found = found or {n: torch.zeros_like(p) for n, p in model[0].items()}
        return self.laid_out(self.probe.step(self.task, Model(*map(dict, model)), found, x, moment.get("there")))

    def _inputs(self, stored: Tensor) -> Tensor:
        """Of one client or of a stack. A single client's convolutions run fastest with channels last (oneDNN would
        reorder everything it is given); a stack's become grouped convolutions, for which there is no such rule."""
        x = self.data.inputs(stored)
        if self._packs and x.ndim == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return kernels.in_memory(x) if self.compile else x

    def laid_out(self, tree: Tree) -> Tree:
        """A model, or another of its form, as the program wants it: that of a single client is packed, and so are few
        tensors where it has many."""
        return packed(tree, self.task.layers.filters) if self._packs else tree

    def all_laid_out(self, state: State) -> State:
        return {name: self.laid_out(tree) for name, tree in state.items()}

    def start(self, work: Work) -> Start:
        """Where the round's clients begin, laid out once for all of them."""
        if self._start is None or not same_round(self._start[0], work):
            params, buffers = self.laid_out(work.model.params), self.laid_out(work.model.buffers)
            state, some = self.all_laid_out(self.optimizer.init(work.model.params)), self._some
            server = params if work.server.params is work.model.params else self.laid_out(work.server.params)
            shared = self.all_laid_out(work.shared)
            fixed = Fixed({}, Model(params, buffers), shared, some.new_tensor(work.lr))
            start = Start(Carry(params, buffers, state, some.new_zeros(())), fixed, server)
            self._start = work, start
        return self._start[1]

    def carry(self, work: Work, model: Model, state: State) -> Carry:
        """A client's, that begins with this model and with what its optimizer remembers, if anything."""
        start = self.start(work).carry
        if model is work.model:
            return replace(start, state=self.all_laid_out(state)) if state else start
        state = state or self.optimizer.init(model.params)
        return Carry(self.laid_out(model.params), self.laid_out(model.buffers), self.all_laid_out(state), start.loss)

    def fixed(self, work: Work, own: State) -> Fixed:
        return replace(self.start(work).fixed, own=self.all_laid_out(own))


def same_round(one: Work, other: Work) -> bool:
    """Whether two clients are given the same. What lies in memory that is used again is another round's, though."""
    return one.round == other.round and one.model is other.model and one.server is other.server
