"""Weights & Biases. The run's id lives in its folder, so a continued run goes on in the same W&B run."""

from dataclasses import dataclass, field
from typing import Any

from fedsim import check
from fedsim.logger.base import RunInfo
from fedsim.runner import LayerRows, Row


@dataclass
class Wandb:
    project: str
    entity: str | None
    group: str | None
    tags: list[str]
    mode: str
    _run: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        check.choice("mode", self.mode, ("online", "offline", "disabled"))
        check.text("project", self.project)
        for key, optional in (("entity", self.entity), ("group", self.group)):
            if optional is not None:
                check.text(key, optional)
        if not isinstance(self.tags, list):
            raise check.BadValue("tags", self.tags, "must be a list of words, such as [baseline,mnist]")
        for tag in self.tags:
            check.text("tags", tag)

    def open(self, run: RunInfo) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                group=self.group,
                tags=list(self.tags),
                mode=self.mode,  # type: ignore[arg-type]
                id=run.id,
                name=run.name,
                dir=run.folder,
                config=dict(run.config),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise check.InputError(
                f"logger.wandb.mode={self.mode}: W&B cannot start ({reason}); "
                "log in with `wandb login`, or use logger.wandb.mode=offline"
            ) from error
        # Rounds played again after a crash are logged again, with equal values: the round is the axis, not the step.
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def log(self, row: Row, layers: LayerRows) -> None:
        self._run.log(row)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
