"""One local step as one program: a pure function of tensors, for one client or a stack of them, compiled if asked for.

`torch.compile` is given a graph that make_fx has recorded, not the Python code: whatever a rule or a model does in
Python is gone by then, the sizes are fixed, and what is left to look at before each call are a few tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedsim.data import ClientData
from fedsim.kernels import CHANNELS_LAST
from fedsim.model.dropout import KEY
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
        self._compiled: dict[Any, Callable[..., list[Tensor]]] = {}

    def __call__(self, carry: Carry, fixed: Fixed, pieces: Iterable[Moments], compiled: bool = True) -> Carry:
        """Piece after piece of the steps. Sizes that come too seldom are better not compiled for."""
        flat, form = tree_flatten(carry.parts())
        constants, constant_form = tree_flatten(
            (fixed.own, (fixed.model.params, fixed.model.buffers), fixed.shared, fixed.lr)
        )
        with torch.no_grad():
            for given in pieces:
                tensors = [*flat, *constants, *given]
                if not (self.compile and compiled):
                    flat = self._function(form, constant_form)(*tensors)
                    continue
                kind = (*fixed.own, *(t.shape for t in (flat[0], *given)))  # all that may be different another time
                if kind not in self._compiled:
                    self._compiled[kind] = self._compile(self._function(form, constant_form), tensors)
                flat = self._compiled[kind](*tensors)
        return Carry(*tree_unflatten(flat, form))

    def _function(self, form: Any, constant_form: Any) -> Callable[..., list[Tensor]]:
        """The steps as a function of tensors alone."""
        step = vmap(self._step, in_dims=(0, (0, None, None, None), 0)) if self.stacked else self._step
        places, constants = form.num_leaves, constant_form.num_leaves

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            carry = tree_unflatten(tensors[:places], form)
            constant = tree_unflatten(tensors[places : places + constants], constant_form)
            given = tensors[places + constants :]
            for place in range(len(given[0])):
                carry = step(carry, constant, [t[place] for t in given])
            result: list[Tensor] = tree_flatten(carry)[0]
            return result

        return on_tensors

    def _compile(self, function: Callable[..., list[Tensor]], example: list[Tensor]) -> Callable[..., list[Tensor]]:
        from torch.fx.experimental.proxy_tensor import make_fx  # here, since it takes seconds to import

        apart = [t.clone() for t in example]  # a tensor that stood for two arguments would be recorded as one
        program: Callable[..., list[Tensor]]
        last = not self.stacked and apart[0].device.type == "cpu"  # where convolutions have their channels last
        graph = make_fx(function, CHANNELS_LAST if last else {})(*apart).forward
        program = torch.compile(graph, dynamic=False, fullgraph=True)
        return program

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
        return tree_map(lambda a, b: torch.where(size > 0, a, b), after, carry) if self.masked else after

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
