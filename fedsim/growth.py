"""Models that grow: PFNM's global network may have more hidden units than the one whose state was kept.

Existing units keep their place and new ones come after them, so whatever is kept for the smaller network (control
variates, moments) fits the larger one with zeros where nothing is known yet.
"""

from torch import Tensor
from torch.nn.functional import pad

from fedsim.types import State, Tree


def padded(tree: Tree, like: Tree) -> Tree:
    """`tree` with zeros appended where the tensor of the same name in `like` is larger."""
    return {n: _pad(t, like[n]) if n in like else t for n, t in tree.items()}


def padded_state(state: State, like: Tree) -> State:
    return {name: padded(tree, like) for name, tree in state.items()}


def overlaid(state: State, fresh: State) -> State:
    """`state` where it reaches, the freshly initialised state of the larger network beyond."""
    return {
        name: {n: t if t.shape == fresh[name][n].shape else _lay(t, fresh[name][n]) for n, t in tree.items()}
        for name, tree in state.items()
    }


def _lay(t: Tensor, fresh: Tensor) -> Tensor:
    result = fresh.clone()
    result[tuple(slice(size) for size in t.shape)] = t
    return result


def _pad(t: Tensor, like: Tensor) -> Tensor:
    if t.shape == like.shape or t.dim() != like.dim():
        return t
    missing = [target - size for size, target in zip(t.shape, like.shape, strict=True)]
    return pad(t, [amount for m in reversed(missing) for amount in (0, m)])
