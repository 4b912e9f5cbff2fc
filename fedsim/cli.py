"""The `fedsim` command. Torch and the rest are imported when a run starts, so that --help answers at once."""

import logging
import os
import sys
from dataclasses import dataclass, field
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
from fedsim.overrides import CONF, cell_name, explain, misread, run_name

BAD_INPUT, DIVERGED, BROKEN_PIPE, BY_SIGNAL = 2, 3, 141, {"SIGINT": 130, "SIGTERM": 143}


@dataclass
class Command:
    """One invocation: what was typed, what its runs gave, and the worst way any of them ended."""

    typed: list[str]
    summaries: dict[Path, dict[str, Any]] = field(default_factory=dict)
    exit_code: int = 0

    def play(self, cfg: DictConfig) -> None:
        """One run: Hydra calls this once, or once for each job of a sweep."""
        from fedsim import build, report
        from fedsim.session import Request, execute, preview

        job = HydraConfig.get()
        folder, where = Path(job.runtime.output_dir), cfg.get("device")
        try:
            config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
            build.check_root(config)
            device = where = build.device(config["device"])
            build.determinism(config["deterministic"], device)
            choices = {k: v for k, v in job.runtime.choices.items() if not k.startswith("hydra/")}
            request = Request(folder, folder.name, config, choices, list(job.overrides.task), device)
            if config["partition"]["preview"]:
                report.preview(folder, preview(request, lambda: build.federated_data(config, device)))
                return
            summary = execute(request, lambda before: build.experiment(config, device, before), build.loggers(config))
        except Exception as error:
            problem = told(error, folder, where)
            if problem is None:
                raise
            self.complain(problem)
            if not any(folder.iterdir()):
                folder.rmdir()  # Hydra made it; nothing was computed
            return
        self.summaries[folder] = summary
        report.run(folder, summary, in_sweep=job.mode == RunMode.MULTIRUN)
        if summary["status"] == "diverged":
            self.exit_code = max(self.exit_code, DIVERGED)
        if summary["status"] == "interrupted":
            sys.exit(BY_SIGNAL[summary["signal"]])

    def complain(self, message: str) -> None:
        print(f"fedsim: error: {' '.join(message.split())}", file=sys.stderr)
        self.exit_code = max(self.exit_code, BAD_INPUT)


def told(error: Exception, folder: Path, device: object) -> str | None:
    """What went wrong in a run, in one line; None: a mistake of ours, which deserves its traceback."""
    import torch

    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; type {error.full_key}=VALUE"
    if isinstance(error, InputError | OmegaConfBaseException):
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
    register_resolvers(command.typed)
    if "--cfg" in sys.argv and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors to us instead of printing them
    logging.getLogger("hydra").addHandler(logging.NullHandler())  # nor to the log
    try:
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
    if len(command.summaries) > 1:
        from fedsim import report

        report.compare(command.summaries)
    sys.exit(command.exit_code)


def register_resolvers(typed: list[str]) -> None:
    """Folder names, for conf/config.yaml."""
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    # Cached, since Hydra resolves the sweep's folder again in every job.
    OmegaConf.register_new_resolver("sweep_name", lambda: run_name(typed), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("cell_name", lambda job: cell_name(job, typed), replace=True)
