"""Local steps as one program: a pure function of tensors, for one client or a stack of them, compiled if asked for.

`torch.compile` is given a graph that make_fx has recorded, not the Python code: whatever a rule or a model does in
Python is gone by then, the sizes are fixed, and what is left to look at before each call are a few tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.data import ClientData
from fedsim.kernels import CHANNELS_LAST
from fedsim.model.dropout import KEY
from fedsim.trees import leaves, mapped, rebuilt
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


Moments = list[Tensor]
"""What some steps are given, each tensor with the step as first dimension: x and y of the batch and of the extra ones,
the number of samples in the batch, the key of the step's dropout."""


def moment(batches: Sequence[Batch], size: Tensor, key: Tensor) -> Moments:
    """Of a single step."""
    return [t.unsqueeze(0) for t in (*(t for batch in batches for t in batch), size, key)]


def steps_at_once(work: Work) -> int:
    """As many as the client with most of them takes, cut into equal pieces of at most UNROLL."""
    batch_size = work.client.batch_size
    assert batch_size is not None
    most = work.client.epochs * -(-int(work.data.sizes.max()) // batch_size)
    return -(-most // -(-most // UNROLL))


class Compiled:
    """A pure function of trees of tensors, compiled for every form and size of them that comes."""

    def __init__(self, function: Callable[..., Any], channels_last: bool = False) -> None:
        self._function, self._channels_last = function, channels_last
        self._made: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    def __call__(self, *trees: Any, names: Sequence[str] = ()) -> Any:
        """`names` are what may differ although all sizes are the same."""
        flat = leaves(trees)
        kind = (*names, *[t.shape for t in flat])
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
        from torch.fx.experimental.proxy_tensor import make_fx  # here, since it takes seconds to import

        form: list[Any] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            result = self._function(*rebuilt(trees, iter(tensors)))
            form[:] = [mapped(lambda _: ..., result)]
            return leaves(result)

        apart = [t.clone() for t in flat]  # a tensor that stood for two arguments would be recorded as one
        graph = make_fx(on_tensors, CHANNELS_LAST if self._channels_last else {})(*apart).forward
        return torch.compile(graph, dynamic=False, fullgraph=True), form[0]


class Program:
    """Steps of a client rule and a client optimizer, for one client or for a stack of them."""

    def __init__(self, work: Work, stacked: bool, compile: bool) -> None:
        self.task, self.rule, self.optimizer = work.task.for_stacks(), work.client, work.optimizer
        self.stacked, self.compile = stacked, compile
        self.masked = stacked and compile and not self.task.mixes and self.rule.batch_size is not None
        """Whether a step may be nobody's, or only some clients': those without a sample stay as they are."""
        small = sum(p.numel() for p in work.model.params.values()) <= SMALL
        self.unroll = steps_at_once(work) if self.masked and small else 1
        """Steps in a call."""
        on_cpu = next(iter(work.model.params.values())).device.type == "cpu"
        self._compiled = {alike: Compiled(self._steps(alike), on_cpu and not stacked) for alike in (True, False)}

    def __call__(self, carry: Carry, fixed: Fixed, pieces: Iterable[Moments], compiled: bool = True) -> Carry:
        """Piece after piece of the steps. Sizes that come too seldom are better not compiled for."""
        parts, alike = carry.parts(), carry.alike
        constant = fixed.own, (fixed.model.params, fixed.model.buffers), fixed.shared, fixed.lr
        with torch.no_grad():
            for given in pieces:
                if self.compile and compiled:
                    parts = self._compiled[alike](parts, constant, given, names=tuple(fixed.own))
                else:
                    parts = self._steps(alike)(parts, constant, given)
                alike = False
        return Carry(*parts, alike)

    def _steps(self, alike: bool) -> Callable[[Any, Any, Moments], Any]:
        """Several of them, the first perhaps from one place for all."""

        def take(carry: Any, constant: Any, given: Moments) -> Any:
            for place in range(len(given[0])):
                step, here = self._step, None if alike and place == 0 else 0
                if self.stacked:
                    step = vmap(step, in_dims=(here, (0, None, None, None), 0))
                carry = step(carry, constant, [t[place] for t in given])
            return carry

        return take

    def _step(self, carry: Any, constant: Any, given: list[Tensor]) -> Any:
        (params, buffers, state, loss_sum), (own, model, shared, lr) = carry, constant
        *batches, size, key = given
        batch, *extra = [(self._inputs(x), y) for x, y in zip(batches[::2], batches[1::2], strict=True)]
        # The rate is a tensor, so that a program serves all rounds of a schedule.
        context = Context(self.task, Model(*model), shared, own, cast(ClientData, Given(iter(extra))), lr)
        statistics = {n: b.clone() for n, b in buffers.items()} | ({KEY: key} if self.task.drops else {})
        grads, loss = self.rule.gradient(self.task, params, statistics, batch, context)
        new, new_state = self.optimizer.step(params, grads, state, lr)
        statistics.pop(KEY, None)
        after = self.laid_out(new), statistics, new_state, loss_sum + loss * size
        return mapped(lambda a, b: torch.where(size > 0, a, b), after, carry) if self.masked else after

    def _inputs(self, x: Tensor) -> Tensor:
        """A single client's convolutions run fastest with channels last (oneDNN would reorder everything it is given);
        a stack's become grouped convolutions, for which there is no such rule."""
        return x.contiguous(memory_format=torch.channels_last) if self._channels_last(x) else x

    def laid_out(self, tree: Tree) -> Tree:
        """Parameters as the program wants them."""
        last = torch.channels_last
        return {n: t.contiguous(memory_format=last) if self._channels_last(t) else t for n, t in tree.items()}

    def _channels_last(self, t: Tensor) -> bool:
        return self.compile and not self.stacked and t.ndim == 4
