"""TensorBoard event files in the run's folder: `tensorboard --logdir outputs`."""

from typing import TYPE_CHECKING

from fedsim import check
from fedsim.logger.base import RunInfo
from fedsim.runner import LayerRows, Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tensorboard:
    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def open(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise check.InputError(
                "logger=tensorboard needs it installed: pip install 'fedsim-lab[tensorboard]'"
            ) from error
        # Whatever an earlier process logged after the round it is resumed from is hidden.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.start + 1)

    def log(self, row: Row, layers: LayerRows) -> None:
        assert self._writer is not None
        for name, value in row.items():
            if name != "round":
                self._writer.add_scalar(name, value, int(row["round"]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
