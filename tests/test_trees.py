"""Models that are packed: the same numbers under the same names, in one piece."""

import pickle

import pytest
import torch
from conftest import experiment
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsim.layers import Layers
from fedsim.trees import Packed, combined, difference, leaves, mapped, packed, rebuilt

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6)
KINDS = [torch.float32, torch.int64, torch.float64]


def numbered(shapes: list[list[int]], kinds: list[torch.dtype], first: int = 0) -> dict[str, Tensor]:
    """No two numbers alike."""
    tree: dict[str, Tensor] = {}
    for place, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        tree[f"t{place}"] = torch.arange(first, first + count).view(shape).to(kinds[place % len(kinds)])
        first += count
    return tree


@given(shapes=SHAPES, kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
def test_everything_is_where_its_name_says(shapes: list[list[int]], kinds: list[torch.dtype]) -> None:
    tree = numbered(shapes, kinds)
    filters = {name for name in tree if name != "t0"}
    found = packed(tree, filters)
    assert list(found) == list(tree)
    assert len(found.pieces) == len({t.dtype for t in tree.values()}) == len(leaves(found))
    assert sum(len(p) for p in found.pieces) == sum(t.numel() for t in tree.values())
    for name, t in tree.items():
        assert found[name].dtype == t.dtype
        assert torch.equal(found[name], t)
        assert sorted(found.rows()[name].tolist()) == sorted(t.flatten().tolist())
        last = torch.channels_last if t.ndim == 4 and name in filters else torch.contiguous_format
        assert found[name].is_contiguous(memory_format=last) or t.numel() == 0
    assert packed(found) is found
    assert packed(dict(found), filters).form is found.form  # laid out already, whatever it came from


@given(shapes=SHAPES.filter(bool))
def test_what_is_done_with_all_of_it(shapes: list[list[int]]) -> None:
    a, b = numbered(shapes, [torch.float32, torch.int64]), numbered(shapes, [torch.float32, torch.int64], first=1000)
    one, other = packed(a), packed(b)
    # packed alike, packed one of them, packed neither
    for found in (difference(one, other), difference(one, b), difference(a, other), difference(a, b)):
        assert list(found) == list(a)
        assert all(torch.equal(found[n], a[n] - b[n]) for n in a)
    assert isinstance(difference(one, other), Packed)
    assert all(torch.equal(t, 2 * a[n]) for n, t in mapped(lambda t: 2 * t, one).items())
    assert all(torch.equal(t, b[n]) for n, t in rebuilt(one, iter(leaves(other))).items())
    assert combined(lambda x, y: y, a, b) == b


def test_forms_are_told_apart() -> None:
    a, b = packed({"w": torch.zeros(2, 3)}), packed({"w": torch.zeros(3, 2)})
    assert a.form is not b.form
    assert all(torch.equal(t, torch.zeros(2, 3)) for t in difference(a, {"w": torch.zeros(2, 3)}).values())
    with pytest.raises(RuntimeError, match="size"):
        difference(a, b)


def test_a_form_is_the_same_behind_a_pipe() -> None:
    there = packed({"conv": torch.randn(4, 3, 2, 2), "steps": torch.tensor(3)}, {"conv"})
    assert pickle.loads(pickle.dumps(there.form)) is there.form


def test_norms_of_a_packed_model() -> None:
    exp = experiment("dataset=mnist5k", "model=cnn_emnist")
    params = exp.task.initial_model().params
    layers: Layers = exp.task.layers
    exact = torch.stack([params[name].double().norm() for name in layers.names])
    expected = torch.cat([exact, (layers.members.double() @ exact.square()).sqrt()])
    for found in (layers.norms(packed(params, layers.filters)), layers.norms(params)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
