"""Naive aggregation: the weighted mean of the clients' updates. McMahan et al., AISTATS 2017; elastic paper Eq. 3."""

from dataclasses import dataclass

from fedsim import check
from fedsim.cohort import Cohort
from fedsim.types import Direction, Probe, State, Tree


@dataclass(frozen=True)
class FedAvg:
    """Also what every other aggregator starts from: no memory, nothing measured, one model uploaded."""

    weighting: str
    evaluate: str

    def __post_init__(self) -> None:
        check.choice("weighting", self.weighting, ("samples", "uniform"))
        check.choice("evaluate", self.evaluate, ("sent", "averaged"))

    @property
    def extra_uploads(self) -> int:
        return 0

    @property
    def individual(self) -> bool:
        return False

    @property
    def lengths(self) -> bool:
        return False

    @property
    def probe(self) -> Probe | None:
        return None

    def init(self, params: Tree) -> State:
        return {}

    def direction(self, cohort: Cohort, state: State) -> Direction:
        return Direction(cohort.delta)
