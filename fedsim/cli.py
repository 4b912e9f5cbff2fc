"""The `fedsim` command. Torch and the rest are imported when a run starts, so that --help answers at once."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fedsim import __version__
from fedsim.check import InputError
from fedsim.overrides import CONF, cell_name, explain, misread, run_name, table_name

DRY_RUN = "--dry-run"
BAD_INPUT, DIVERGED, BROKEN_PIPE, BY_SIGNAL = 2, 3, 141, {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class Job:
    """One run that is to be made."""

    folder: Path
    name: str
    config: Callable[[], dict[str, Any]]
    """Resolves it, which may fail."""
    choices: Mapping[str, str]
    overrides: Sequence[str]
    place: Mapping[str, str] = field(default_factory=dict)
    """In a paper's table."""


@dataclass
class Command:
    """One invocation: what was typed, what its runs gave, and the worst way any of them ended."""

    typed: list[str]
    summaries: dict[Path, dict[str, Any]] = field(default_factory=dict)
    exit_code: int = 0
    _attempted: set[Path] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    def play(self, cfg: DictConfig) -> None:
        """One run: Hydra calls this once, or once for each job of a sweep."""
        job = HydraConfig.get()
        folder = Path(job.runtime.output_dir)
        choices = {k: v for k, v in job.runtime.choices.items() if not k.startswith("hydra/")}

        def config() -> dict[str, Any]:
            return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))

        self.run(Job(folder, folder.name, config, choices, list(job.overrides.task)), job.mode == RunMode.MULTIRUN)

    def play_table(self, name: str, listed: bool) -> None:
        """Every cell of a paper's table, or only a list of them with what they would take."""
        from fedsim import estimate, report, table

        try:
            cells = table.cells(name, self.typed)
            if listed:
                report.cells(name, cells, estimate.each(cells))
                return
        except InputError as error:
            self.complain(str(error))
            return
        without: list[str] = []
        for cell in cells:
            if any(self._failed(cell.beside(column)) for column in table.paired_columns(cell)):
                without.append(cell.column)
                self._attempted.add(cell.folder)
                continue
            self.run(
                Job(cell.folder, cell.name, partial(table.resolved, cell), cell.choices, cell.overrides, cell.place),
                in_sweep=True,
            )
        if without:
            columns = ", ".join(dict.fromkeys(without))
            self.complain(
                f"{len(without)} cells left out (column {columns}): what they take values from did not finish"
            )
        if self.summaries:
            report.filled(cells[0].folder.parent)

    def run(self, job: "Job", in_sweep: bool) -> None:
        """Build, train, and say how it went."""
        from fedsim import build, report
        from fedsim.session import Request, execute, preview

        folder, where = job.folder, None
        self._attempted.add(folder)
        try:
            config = job.config()
            where = config["device"]
            build.check_root(config)
            device = where = build.device(config["device"])
            build.determinism(config["deterministic"], device)
            config = build.on_device(config, device)
            request = Request(folder, job.name, config, job.choices, job.overrides, device, job.place)
            if config["partition"]["preview"]:
                report.preview(folder, preview(request, lambda: build.federated_data(config, device)))
                return
            summary = execute(request, lambda before: build.experiment(config, device, before), build.loggers(config))
        except Exception as error:
            problem = told(error, folder, where)
            if problem is None:
                raise
            self.complain(problem)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()  # Hydra made it; nothing was computed
            return
        self.summaries[folder] = summary
        report.run(folder, summary, in_sweep)
        if summary["status"] == "diverged":
            self.exit_code = max(self.exit_code, DIVERGED)
        if summary["status"] == "interrupted":
            sys.exit(BY_SIGNAL[summary["signal"]])

    def _failed(self, folder: Path) -> bool:
        """Whether that run was tried in this command and did not finish."""
        return folder in self._attempted and self.summaries.get(folder, {}).get("status") != "finished"

    def complain(self, message: str) -> None:
        """Once, however many cells of a table it concerns."""
        if message not in self._said:
            print(f"fedsim: error: {' '.join(message.split())}", file=sys.stderr)
        self._said.add(message)
        self.exit_code = max(self.exit_code, BAD_INPUT)


def told(error: Exception, folder: Path, device: object) -> str | None:
    """What went wrong in a run, in one line; None: a mistake of ours, which deserves its traceback."""
    import torch

    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; type {error.full_key}=VALUE"
    if isinstance(error, OmegaConfBaseException):
        within: BaseException = error
        while cause := within.__cause__ or within.__context__:  # a resolver of ours, wrapped once or twice
            within = cause
        return str(within if isinstance(within, InputError) else error)
    if isinstance(error, InputError):
        return str(error)
    # torch's own class for a GPU, NumPy's for arrays, a plain RuntimeError for a tensor on the CPU
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return f"device={device}: out of memory; smaller batches, models or datasets need less"
    if isinstance(error, OSError):
        return f"{folder}: {error.strerror or error}; what was computed is kept, the same command goes on"
    if "more than 1 value per channel" in str(error):
        return (
            "client.batch_size: batch norm cannot train on a batch of one sample (a client's last one may be); "
            "use another batch size or a model with group norm"
        )
    return None


def main() -> None:
    """Run, sweep or explain; every way it can go wrong is one line and an exit code."""
    command = Command([a for a in sys.argv[1:] if ("=" in a or a.startswith("~")) and not a.startswith("-")])
    # Flags first: argparse wants the overrides in one piece, a user types `fedsim seed=1 -m aggregator.tau=0.1,0.5`.
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in command.typed] + command.typed
    if "--version" in sys.argv:
        print(f"fedsim {__version__}")
        return
    if problem := misread(command.typed):
        command.complain(problem)
        sys.exit(command.exit_code)
    table, listed = asked_table(command), DRY_RUN in sys.argv
    if listed and not table:
        command.complain(f"{DRY_RUN} lists the runs of a paper's table; name it, as in experiment=elastic/table3")
        sys.exit(command.exit_code)
    register_resolvers(command.typed, table_name if table else run_name)
    if "--cfg" in sys.argv and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors to us instead of printing them
    logging.getLogger("hydra").addHandler(logging.NullHandler())  # nor to the log
    try:
        if table:
            command.play_table(table, listed)
        else:
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(command.play)()
    except (HydraException, OmegaConfBaseException) as error:
        command.complain(explain(error, command.typed))
    except BrokenPipeError:  # whoever read our output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except OSError as error:  # Hydra makes the run's folder before it calls us
        command.complain(f"{error.filename}: cannot be written to ({error.strerror}); choose another hydra.run.dir")
    except KeyboardInterrupt as interrupt:  # before the first round: there is nothing to keep
        sys.exit(BY_SIGNAL[str(interrupt) or "SIGINT"])
    if len(command.summaries) > 1 and not table:
        from fedsim import report

        report.compare(command.summaries)
    sys.exit(command.exit_code)


def asked_table(command: Command) -> str | None:
    """The paper's table that is to be run; None where a run, a sweep or one of Hydra's explanations is."""
    if not any(o.startswith("experiment=") for o in command.typed):
        return None
    from fedsim import table

    try:
        name = table.experiment(command.typed)
    except InputError as error:
        command.complain(str(error))
        sys.exit(command.exit_code)
    flags = {a for a in sys.argv[1:] if a.startswith("-")}
    if name is None or flags <= {"-m", "--multirun", DRY_RUN}:
        return name
    # --cfg, --help, --info: of what all cells share.
    sys.argv[1:] = [a for a in sys.argv[1:] if a.partition("=")[0] not in table.AXES]
    command.typed = [o for o in command.typed if o in sys.argv]
    return None


def register_resolvers(typed: list[str], sweep_name: Callable[[list[str]], str] = run_name) -> None:
    """Folder names, for conf/config.yaml, and values that a table's cell takes from another one's run."""
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    # Cached, since Hydra resolves the sweep's folder again in every job.
    OmegaConf.register_new_resolver("sweep_name", lambda: sweep_name(typed), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("cell_name", lambda job: cell_name(job, typed), replace=True)
    # As it is written, until table.resolved() knows the cell.
    OmegaConf.register_new_resolver("paired", lambda *source: f"paired:{','.join(map(str, source))}", replace=True)
