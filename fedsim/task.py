"""The learning task: a model's structure and its loss, as pure functions of parameters and data.

Rows of a batch that are only padding (a stacked engine's, so that clients with fewer samples fit beside others) have
the label NOBODY, or PAD at every position of a sequence; they count in no mean.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from fedsim.data import PAD, ClientData, Dataset
from fedsim.layers import Layers
from fedsim.model.dropout import KEY, Dropout, mixed
from fedsim.types import Batch, Model, Tree

NOBODY = -100  # what torch's cross entropy passes over

Mode = Literal["train", "eval", "batch_statistics"]


@dataclass(frozen=True)
class Evaluation:
    """Sums over a set of samples; on the device until someone reads them."""

    loss_sum: Tensor
    correct: Tensor | None
    count: int | Tensor
    """Samples, or targets where a sample has many."""


class Task:
    """Gradients, sensitivities and accuracy of one architecture. Holds no weights of its own: `module` lends only
    its structure, every call is given the parameters."""

    stacked = False
    """Whether calls come from inside torch.func.vmap: one client's code, run for a stack of clients at once."""

    def __init__(self, module: nn.Module, dataset: Dataset, precision: str = "fp32") -> None:
        self.module, self.precision = module, precision
        self.layers = Layers.of(module)
        names = [n for n, _ in module.named_parameters(remove_duplicate=False)]
        self._shares_weights = len(names) > len(self.layers.names)
        self._mode: list[Mode] = []  # that the module is in; shared by all copies of this task, as the module is
        self.classification, self.sequence = dataset.classification, dataset.sequence
        self._read_last = dataset.tokens and not dataset.sequence
        drops = [(n, m) for n, m in module.named_modules() if isinstance(m, Dropout)]
        self.mixes = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        self.drops = {f"{n}.key" if n else "key": place << 20 for place, (n, _) in enumerate(drops, start=1)}
        """Where the model's dropouts want their keys, and what makes each one's different."""

    def initial_model(self) -> Model:
        return Model(
            {n: p.detach().clone() for n, p in self.module.named_parameters()},
            {n: b.detach().clone() for n, b in self.module.named_buffers() if n not in self.drops},
        )

    def for_stacks(self) -> "Task":
        """The same, to be called inside torch.func.vmap, where only torch.func can differentiate."""
        task = copy(self)
        task.stacked = True
        return task

    def outputs(self, params: Tree, buffers: Tree, x: Tensor, mode: Mode) -> Tensor:
        """F(theta; x). Except in `eval` mode `buffers` are updated in place: hand in a copy.

        `batch_statistics` is `eval` (no dropout) but for batch norm, which uses the batch's own mean and variance."""
        if self._mode != [mode]:
            self.module.train(mode == "train")
            for module in self.module.modules():
                if mode == "batch_statistics" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
            self._mode[:] = [mode]
        if KEY in buffers:
            buffers = {n: b for n, b in buffers.items() if n != KEY} | {
                name: mixed(buffers[KEY] ^ place) for name, place in self.drops.items()
            }
        with self._autocast(x.device):
            given = dict(params), dict(buffers)
            outputs: Tensor = functional_call(self.module, given, (x,), tie_weights=self._shares_weights)
        if outputs.dtype == torch.bfloat16:
            outputs = outputs.float()
        # A sequence model is read at its last position where a sample has a single label.
        return outputs[:, -1] if self._read_last and outputs.ndim == 3 else outputs

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Products in bfloat16 where that is asked for; parameters, sums and losses stay float32."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One loss for each sample, or for each position of a sequence; 0 where that has no target."""
        if self.sequence:
            return nn.functional.cross_entropy(outputs.movedim(-1, 1), y, ignore_index=PAD, reduction="none")
        if self.classification:
            return nn.functional.cross_entropy(outputs, y, reduction="none")
        own = outputs.flatten(1).sum(1)
        return torch.where(y == NOBODY, 0, own) if self.stacked else own

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over a batch's samples, or over all targets of its sequences."""
        losses = self.losses(outputs, y)
        return losses.sum() / self.count(y) if self.sequence or self.stacked else losses.mean()

    def count(self, y: Tensor) -> int | Tensor:
        """What a sum of losses is to be divided by."""
        if self.sequence:
            return (y != PAD).sum()
        return (y != NOBODY).sum() if self.stacked else len(y)

    def gradient(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        """(gradient, value) of the mean loss over a batch."""
        x, y = batch
        if self.stacked:

            def value(params: Tree, buffers: Tree) -> Tensor:
                return self.loss(self.outputs(params, buffers, x, "train"), y)

            grads, loss = grad_and_value(value)(params, buffers)
            return grads, loss
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        loss = self.loss(self.outputs(leaves, buffers, x, "train"), y)
        return _gradients(loss, leaves), loss.detach()

    def full_gradient(self, model: Model, batches: Iterable[Batch]) -> Tree:
        """Gradient of the mean loss over all of the batches at one place; the model is left as it was."""
        total: Tree = {n: torch.zeros_like(p) for n, p in model.params.items()}
        seen: int | Tensor = 0
        for batch in batches:
            grads, _ = self.gradient(model.params, {n: b.clone() for n, b in model.buffers.items()}, batch)
            count = self.count(batch[1])
            for name, t in total.items():
                if isinstance(count, int):
                    t.add_(grads[name], alpha=count)
                else:  # on the device, where it stays
                    t.addcmul_(grads[name], count)
            seen = seen + count
        return {n: t / seen for n, t in total.items()}

    @torch.no_grad()
    def mean_loss(self, model: Model, data: ClientData) -> Tensor:
        """Over all of a client's samples, as the model would predict them."""
        total, seen = torch.zeros(()), torch.zeros(())
        for x, y in data.all():
            total = total + self.losses(self.outputs(model.params, model.buffers, x, "eval"), y).sum()
            seen = seen + self.count(y)
        return total / seen

    def output_norm_gradient(self, model: Model, x: Tensor, mode: Mode, there: Tensor | None = None) -> Tree:
        """Gradient of ||F(theta; x)||_2^2, the mean over the batch: no labels, and the model is left as it was.
        `there` says which rows are samples, where not all are."""
        buffers = model.buffers if mode == "eval" else {n: b.clone() for n, b in model.buffers.items()}
        if self.stacked:

            def value(params: Tree, buffers: Tree) -> Tensor:
                squares = self.outputs(params, buffers, x, mode).flatten(1).square().sum(1)
                return squares.mean() if there is None else torch.where(there, squares, 0).sum() / there.sum()

            result: Tree = grad(value)(model.params, buffers)
            return result
        leaves = {n: p.detach().requires_grad_() for n, p in model.params.items()}
        outputs = self.outputs(leaves, buffers, x, mode)
        return _gradients(outputs.flatten(1).square().sum(1).mean(), leaves)

    @torch.no_grad()
    def evaluate(
        self,
        model: Model,
        dataset: Dataset,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        index: Tensor | None = None,
    ) -> Evaluation:
        """Loss and accuracy of a model over (x, y), or over the samples at `index` of them; of sequences, over the
        positions that have a target."""
        samples = len(y) if index is None else len(index)
        count: int | Tensor = 0
        loss_sum = torch.zeros((), device=y.device)
        correct = torch.zeros((), device=y.device) if self.classification else None
        for start in range(0, samples, batch_size):
            part = slice(start, start + batch_size) if index is None else index[start : start + batch_size]
            loss, right = self.judged(model, dataset.inputs(x[part]), y[part])
            loss_sum += loss
            if correct is not None:
                correct += right
            count = count + self.count(y[part])
        return Evaluation(loss_sum, correct, count)

    def judged(self, model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the losses, how many are right) of a batch."""
        outputs = self.outputs(model.params, model.buffers, x, "eval")
        right = outputs.argmax(-1) == y if self.classification else torch.zeros_like(y)
        return self.losses(outputs, y).sum(), (right & (y != PAD) if self.sequence else right).sum()


def _gradients(value: Tensor, leaves: Tree) -> Tree:
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))
