"""Run one experiment: ``python -m simulations.run engine=ray aggregation=filter``.

An experiment with a ``study`` of its own, such as ``experiment=trilemma``, runs that
instead of a federation: a callable that leaves what it finds in a folder.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from flwr_safedshb.algorithm.closing import describe_closing
from simulations.check import check_study
from simulations.command import lock_path, print_settings_errors
from simulations.config import (
    SEARCH_PATH,
    SettingsError,
    compose_config,
    explain_errors,
    format_override,
    read_checkpoint_path,
    resolve_config,
    with_published,
)
from simulations.engines import check_run, run
from simulations.loopback.watch import report_rounds
from simulations.overrides import CONF
from simulations.results import record
from simulations.results.loggers import log_run
from simulations.results.report import run_page, write_joint_report
from simulations.results.schema import RunRecord


@print_settings_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Refuse what makes no run, then let Hydra start one, or with ``-m`` many."""
    given = _read_config_dir(sys.argv[1:] if arguments is None else arguments)
    options = {argument for argument in given if argument.startswith("-")}
    overrides = [argument for argument in given if argument not in options]
    sys.argv[1:] = given
    if options - {"-m", "--multirun"}:  # such as --help and --cfg
        _job()
        return 0
    every = jobs(overrides) if options else [overrides]
    single, several = folders_of(every[0])
    folders = [several / str(i) for i in range(len(every))] if options else [single]
    models = [_checked(*job) for job in zip(every, folders, strict=True)]
    if len({*models}) < len(models):
        raise SettingsError(f"checkpoint={models[0]} would be that of several runs")
    # A folder's name may be the time, which must not be asked twice.
    sys.argv[1:] = [*sorted(options), *with_published(overrides)]
    sys.argv.append(format_override("hydra.run.dir", single))
    sys.argv.append(format_override("hydra.sweep.dir", several))
    with lock_path(several / "0" if options else models[0]):
        _job()
    found = [record.read(model.with_suffix(".json")) for model in models]
    if options and (joint := [run for run in found if run is not None]):
        write_joint_report(several / "report.html", joint)
        print(f"all runs: {several / 'results.csv'}, and report.html beside it")
    return 0


def _read_config_dir(arguments: Sequence[str]) -> list[str]:
    """Return arguments with Hydra's ``--config-dir`` as an override of a run's own."""
    given, found = list(arguments), []
    while given:
        name, equals, value = given.pop(0).partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value if equals or not given else given.pop(0)).absolute()
            found.append(f"{SEARCH_PATH}=[file://{folder}]")
        else:
            found.append(f"{name}{equals}{value}")
    return found


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a multirun: all of ``a=1,2 b=3,4``."""
    with explain_errors():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [
            [f"{one.get_key_element()}={v}" for v in one.sweep_string_iterator()]
            if one.is_sweep_override()
            else [str(one.input_line)]
            for one in parsed
        ]
    return [list(job) for job in itertools.product(*choices)]


def folders_of(overrides: Sequence[str]) -> tuple[Path, Path]:
    """Return Hydra's folder of a run and of a multirun, whose names may be the time."""
    with explain_errors(), initialize_config_dir(str(CONF), version_base=None):
        given = with_published(overrides)
        cfg = compose("config", given, return_hydra_config=True)
        return Path(cfg.hydra.run.dir).absolute(), Path(cfg.hydra.sweep.dir).absolute()


def _checked(overrides: Sequence[str], folder: Path) -> Path:
    """Refuse what makes no run in a folder; return where its model will be."""
    text = shlex.join(overrides)
    model = _model(read_checkpoint_path(text), folder)
    if "study" in compose_config(text):
        check_study(text)
    else:
        check_run(text, model)
    return model


@hydra.main(config_path=str(CONF), config_name="config", version_base=None)
def _job(cfg: DictConfig) -> None:
    if code := _run(cfg):
        sys.exit(code)


@print_settings_errors
def _run(cfg: DictConfig) -> int:
    """Run on the engine of the config; leave model, results and report together."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    logging.getLogger("flwr").setLevel(cfg.log_level)
    # The engines compose the config themselves, and Hydra has one at a time.
    GlobalHydra.instance().clear()
    if "study" in cfg:
        instantiate(cfg.study)(folder)
        return 0
    model = _model(cfg.checkpoint, folder)
    hidden = [o for o in settings.overrides.hydra if o.startswith(SEARCH_PATH)]
    found = _result(cfg, [*hidden, *settings.overrides.task], model)
    model.with_suffix(".html").write_text(run_page(found))
    last = found["evaluations"]
    print(
        f"round {last['step'][-1]}: loss {last['test_loss'][-1]:.4f}, "
        f"accuracy {last['accuracy'][-1]:.4f}"
    )
    print(found["privacy"]["statement"])
    print(found["privacy"]["note"])
    print(f"model: {model}; beside it: .json, .html, and .privacy.md, its privacy card")
    if "_target_" in cfg.logger:
        print(f"log: {log_run(instantiate(cfg.logger), found, model)}")
    return 0


def _model(checkpoint: str | None, folder: Path) -> Path:
    return Path(checkpoint or folder / "model.npz").absolute()


def _result(cfg: DictConfig, overrides: list[str], model: Path) -> RunRecord:
    """Run, or return what the same run has left here."""
    text, results = shlex.join(overrides), model.with_suffix(".json")
    there, known = check_run(text, model), record.read(results)
    done = there is not None and there.step == there.num_rounds
    if done and known is not None and known["config"] == resolve_config(text):
        print(f"the same run has ended here before, in {known['seconds']:.1f} s")
        return known
    start = time.perf_counter()
    words = f"{cfg.steps} steps, engine={cfg.engine.name}"
    with (
        Console(stderr=True).status(words) as status,
        report_rounds(lambda more: status.update(f"{words}: {more}")),
    ):
        progress = run(overrides, model)
    # The first, about privacy, is said below from the plans themselves.
    for _, line in [*describe_closing(progress)][1:]:
        print(line)
    found = record.record(overrides, progress, time.perf_counter() - start)
    record.write(results, found)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
