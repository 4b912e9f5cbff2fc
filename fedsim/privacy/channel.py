"""Between the clients and the server: plain sums, clipped and noisy ones, masked ones. All that a client sends goes
through here: its update, batch-norm statistics, elastic's sensitivities, SCAFFOLD's control variates.

Differential privacy for clients (McMahan et al., ICLR 2018): every part p of an upload (P of them) is clipped to the
norm S_p, and the server adds Gaussian noise to the cohort's sum:

    x_k <- x_k min(1, S_p / ||x_k||) ,    mean = (1/m) (sum_k x_k + N(0, (z S_p sqrt(P))^2))

so that all parts together are one Gaussian mechanism of multiplier z, whose epsilon `accountant.py` gives. It is a
simulation: the noise comes from the run's seed, and the metrics of a run (losses, norms, accuracies) are exact, for the
researcher's eyes, not covered by epsilon.

Masking (secure summation) is in `secure_sum.py`; the server then works with the fixed-point sum alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim import check, rng
from fedsim.privacy.secure_sum import SecureSum
from fedsim.trees import length, mapped, pairs
from fedsim.types import Tree, Work


@dataclass(frozen=True)
class Part:
    """One part of a client's upload, and the weight it has in the sum."""

    weight: float
    tree: Tree


def nothing(like: Tensor) -> Tensor:
    """What a sum begins with. That of counters is of floats: they are weighted too."""
    return torch.zeros_like(like, dtype=like.dtype if like.is_floating_point() else torch.float32)


class Summation:
    """The plain sum of what clients upload, part by part."""

    def __init__(self) -> None:
        self._total: dict[str, Tree] = {}
        self._expected: dict[str, Tree] = {}

    def expect(self, part: str, like: Tree) -> None:
        """A part that stands in the total even if no client uploads it."""
        self._expected[part] = like

    def add(self, client: int, parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            self._begin(name, part.tree)
            if self._total[name]:
                torch._foreach_add_(*pairs(self._total[name], part.tree), alpha=part.weight)

    def _begin(self, name: str, like: Tree) -> None:
        """A sum is laid out in memory as what is added to it: much faster."""
        if name not in self._total:
            self._total[name] = mapped(nothing, like)

    def total(self) -> dict[str, Tree]:
        for name, like in self._expected.items():
            self._begin(name, like)
        return self._total

    def metrics(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Privacy:
    clip: float | None
    clip_extra: float
    noise_multiplier: float
    delta: float
    masked: bool
    bits: int
    threshold: float

    def __post_init__(self) -> None:
        if self.clip is not None:
            check.number("clip", self.clip, gt=0)
        check.number("clip_extra", self.clip_extra, gt=0)
        check.number("noise_multiplier", self.noise_multiplier, ge=0, le=1e6)
        check.number("delta", self.delta, gt=0, lt=1)
        check.boolean("masked", self.masked)
        check.integer("bits", self.bits, ge=1, le=52)
        check.number("threshold", self.threshold, gt=0.5, le=1)
        if self.noise_multiplier and self.clip is None:
            raise check.BadValue("noise_multiplier", self.noise_multiplier, "needs clip: noise is in units of it")

    @property
    def active(self) -> bool:
        return self.clip is not None or self.masked

    def least(self, sampled: int) -> int:
        """How many clients must answer for the round to count: the threshold of the secret sharing."""
        return math.ceil(round(self.threshold * sampled, 9)) if self.masked else 1

    def epsilon(self, rounds: int, num_clients: int, clients_per_round: int) -> float:
        from fedsim.privacy import accountant  # imported only where it is used: it takes a second

        return accountant.epsilon(rounds, self.noise_multiplier, self.delta, num_clients, clients_per_round)

    def open(self, work: Work) -> Summation:
        return Protected(self, work) if self.active else Summation()


class Protected(Summation):
    """Clipped, masked and noisy, whichever of these is asked for."""

    def __init__(self, privacy: Privacy, work: Work) -> None:
        super().__init__()
        self._privacy, self._work = privacy, work
        self._clipped: list[Tensor] = []
        self._diverged = False
        self._secure: SecureSum | None = None

    def add(self, client: int, parts: Mapping[str, Part]) -> None:
        parts = {name: part for name, part in parts.items() if part.tree}
        if self._privacy.clip is not None:
            parts = {name: self._clip(name, part) for name, part in parts.items()}
        if not self._privacy.masked:
            super().add(client, parts)
            return
        for name, part in parts.items():
            self._begin(name, part.tree)
        order = [(parts[name], key) for name, tree in self._total.items() for key in tree]
        flat = [part.weight * part.tree[key].cpu().double().reshape(-1) for part, key in order]
        vector = torch.cat(flat).numpy()
        if not np.isfinite(vector).all():  # no ring has such a number: the run has diverged
            self._diverged = True
            return
        if self._secure is None:
            sampled = list(self._work.sampled)
            self._secure = SecureSum(sampled, self._privacy.least(len(sampled)), self._privacy.bits, len(vector))
        self._secure.receive(client, self._secure.mask(client, vector))

    def total(self) -> dict[str, Tree]:
        total = super().total()
        if self._diverged:
            return {n: {key: torch.full_like(t, torch.nan) for key, t in tree.items()} for n, tree in total.items()}
        if self._secure is not None:
            total = self._unflatten(self._secure.total())
        noise, count = self._privacy.noise_multiplier, len(self._clipped)
        if noise and count:
            present = [name for name, tree in total.items() if tree]
            generator = rng.generator(self._work.seed, "noise", self._work.round)
            for name in present:
                spread = noise * self._bound(name) * math.sqrt(len(present)) / count
                for t in total[name].values():
                    drawn = generator.standard_normal(t.shape).astype(np.float32)
                    t.add_(torch.from_numpy(np.asarray(drawn)).to(t.device), alpha=spread)
        return total

    def metrics(self) -> dict[str, Tensor]:
        return {"privacy/clipped_fraction": torch.stack(self._clipped).mean()} if self._clipped else {}

    def _bound(self, name: str) -> float:
        assert self._privacy.clip is not None
        return self._privacy.clip if name in ("delta", "length") else self._privacy.clip_extra

    def _clip(self, name: str, part: Part) -> Part:
        norm = length(part.tree)
        factor = (self._bound(name) / norm.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0)
        if name == "delta":
            self._clipped.append((factor < 1).float())
        return Part(part.weight, {key: t * factor for key, t in part.tree.items()})

    def _unflatten(self, vector: np.ndarray) -> dict[str, Tree]:
        device = next(iter(self._work.server.params.values())).device
        flat = torch.from_numpy(vector.astype(np.float32)).to(device)
        pieces = iter(torch.split(flat, [t.numel() for tree in self._total.values() for t in tree.values()]))
        return {
            name: {key: next(pieces).view(t.shape) for key, t in tree.items()} for name, tree in self._total.items()
        }
