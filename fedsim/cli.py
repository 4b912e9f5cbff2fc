"""The `fedsim` command. Torch and the rest are imported when a run starts, so that --help answers at once."""

import os
import sys
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.check import InputError
from fedsim.overrides import CONF, cell_name, explain, run_name

BAD_INPUT, DIVERGED, EXIT_BY_SIGNAL = 2, 3, {"SIGINT": 130, "SIGTERM": 143}

_typed: list[str] = []  # the overrides on the command line
_summaries: dict[Path, dict[str, Any]] = {}  # of the runs this process played
_exit_codes: list[int] = [0]


def main() -> None:
    """Run, sweep or explain; every way it can go wrong is one line and an exit code."""
    _typed[:] = [a for a in sys.argv[1:] if "=" in a and not a.startswith("-")]
    register_resolvers()
    if "--cfg" in sys.argv and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hand errors to us instead of printing them
    try:
        _run()
    except (HydraException, OmegaConfBaseException) as error:
        _complain(explain(error, _typed))
    except OSError as error:  # Hydra makes the run's folder before it calls us
        _complain(f"{error.filename}: cannot be written to ({error.strerror}); choose another hydra.run.dir")
    except KeyboardInterrupt:
        sys.exit(EXIT_BY_SIGNAL["SIGINT"])
    if len(_summaries) > 1:
        from fedsim import report

        report.compare(_summaries)
    sys.exit(max(_exit_codes))


def register_resolvers() -> None:
    """Folder names, for conf/config.yaml."""
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    # Cached, since Hydra resolves the sweep's folder again in every job.
    OmegaConf.register_new_resolver("sweep_name", lambda: run_name(_typed), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("cell_name", lambda job: cell_name(job, _typed), replace=True)


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _run(cfg: DictConfig) -> None:
    """One run: Hydra calls this once, or once for each job of a sweep."""
    from fedsim import build, report
    from fedsim.session import Request, execute

    choices = HydraConfig.get().runtime.choices
    overrides = list(HydraConfig.get().overrides.task)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
        build.check_root(config)
        where = build.device(config["device"])
        build.determinism(config["deterministic"], where)
        request = Request(
            folder,
            folder.name,
            config,
            {k: str(v) for k, v in choices.items() if not k.startswith("hydra/")},
            overrides,
            where,
        )
        summary = execute(request, lambda: build.experiment(config, where), build.loggers(config))
    except (InputError, OmegaConfBaseException, OSError) as error:
        _complain(str(error))
        if not any(folder.iterdir()):
            folder.rmdir()  # Hydra made it; nothing was computed
        return
    _summaries[folder] = summary
    report.run(folder, summary)
    if summary["status"] == "diverged":
        _exit_codes.append(DIVERGED)
    if summary["status"] == "interrupted":
        sys.exit(EXIT_BY_SIGNAL[summary["signal"]])


def _complain(message: str) -> None:
    print(f"fedsim: error: {' '.join(message.split())}", file=sys.stderr)
    _exit_codes.append(BAD_INPUT)
