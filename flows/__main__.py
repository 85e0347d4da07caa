"""Command line: ``python -m flows run|plan|ui --preset tiny --set stages.grpo.learning_rate=2e-6``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rlcore.errors import ConfigError, RlcoreError
from tasks.home.settings import configure_environment, configure_logging, find_home

USAGE_ERROR, FAILURE = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error that we know ends with its message, without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        configure_environment(find_home())
        configure_logging()
        return _COMMANDS[options.command](options)
    except RlcoreError as error:
        sys.stderr.write(f"\nerror ({type(error).__name__}): {error}\n")
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILURE


def _run(options: argparse.Namespace) -> int:
    from flows.presets import open_preset

    config = open_preset(options.preset, options.set)  # refused here, before anything is started
    from flows.post_train import post_train
    from flows.run import every_target
    from tasks.pipeline.bridge import call_flow
    from tasks.pipeline.live_view import live_view
    from tasks.report.summary import summarise

    every_target(options.preset, options.set)  # refused here: what its stages cannot do together
    started = time.perf_counter()
    with live_view():
        refs = call_flow(post_train, preset=options.preset, overrides=tuple(options.set))
    sys.stdout.write(summarise(find_home(), config.name, refs, seconds=time.perf_counter() - started))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from flows.run import every_target, plan_memory, plan_targets
    from tasks.pipeline.run import format_plan

    targets = every_target(options.preset, options.set)
    sys.stdout.write(format_plan(plan_targets(options.preset, options.set, targets)) + "\n")
    sys.stdout.write("\n".join(plan_memory(options.preset, options.set, targets)) + "\n")
    return 0


def _ui(options: argparse.Namespace) -> int:
    from tasks.pipeline.interfaces import serve

    return serve(find_home(), mlflow_port=options.mlflow_port, prefect_port=options.prefect_port)


def _promote(options: argparse.Namespace) -> int:
    from flows.presets import open_preset

    config = open_preset(options.preset, options.set)  # refused here, before anything is started
    from flows.promote import promote
    from tasks.pipeline.bridge import call_flow
    from tasks.pipeline.pages import page_folder

    refs = call_flow(promote, preset=options.preset, overrides=tuple(options.set))
    sys.stdout.write(
        (page_folder(find_home(), config.name, "promote", refs["promote"]) / "verdict.md").read_text("utf-8")
    )
    return 0


def _retrain(options: argparse.Namespace) -> int:
    from flows.presets import open_preset
    from rlcore.config import RetrainConfig

    config = open_preset(options.preset, options.set)
    config.section("retrain", RetrainConfig)  # refused here, before anything is started
    from flows.retrain import retrain
    from tasks.pipeline.bridge import call_flow

    done = call_flow(retrain, preset=options.preset, overrides=tuple(options.set))
    sys.stdout.write(f"{done.page}\n{done.outcome}\n")
    return 0


def _rollback(options: argparse.Namespace) -> int:
    from flows.rollback import rollback
    from tasks.pipeline.bridge import call_flow

    sys.stdout.write(call_flow(rollback, options.model, options.version, options.reason) + "\n")
    return 0


def _lineage(options: argparse.Namespace) -> int:
    from tasks.tracking.lineage import draw, find_lineage, tree_text

    tags, root = find_lineage(find_home(), options.model)
    sys.stdout.write(tree_text(tags, root))
    picture = find_home().root / f"lineage-{tags['name']}-{tags['version']}.svg"
    draw(root, picture)
    sys.stdout.write(f"picture: {picture}\n")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from flows.reproduce import run_reproduce

    done = run_reproduce(options.model, options.preset, anyway=options.anyway)
    sys.stdout.write("\n".join(done.lines) + "\n")
    return 0 if done.is_equal else FAILURE


_COMMANDS = {
    "run": _run,
    "plan": _plan,
    "ui": _ui,
    "promote": _promote,
    "retrain": _retrain,
    "rollback": _rollback,
    "lineage": _lineage,
    "reproduce": _reproduce,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows", description="Post-training of a language model.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "run every stage of a preset"), ("plan", "say what would run, and why")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--preset", default="tiny", help="a committed preset or the path of a .toml file")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    promote = commands.add_parser("promote", help="judge a preset's challenger, and promote it if it is better")
    promote.add_argument("--preset", default="tiny", help="a committed preset or the path of a .toml file")
    promote.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    retrain = commands.add_parser("retrain", help="train the champion on with what is new, and promote what is better")
    retrain.add_argument("--preset", default="retrain", help="a committed preset or the path of a .toml file")
    retrain.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    rollback = commands.add_parser("rollback", help="make the previous champion of a model champion again")
    rollback.add_argument("model", help="name of the registered model, such as tiny-grpo")
    rollback.add_argument("version", type=int, help="the version to take down, which must be the champion")
    rollback.add_argument("--reason", required=True, help="why, for the version's tags")
    lineage = commands.add_parser("lineage", help="where a registered model comes from, down to the raw rows")
    lineage.add_argument("model", help="tiny-grpo@champion or tiny-grpo/3")
    reproduce = commands.add_parser("reproduce", help="run what made a model again, and compare the bytes")
    reproduce.add_argument("model", help="tiny-grpo@champion or tiny-grpo/3")
    reproduce.add_argument("--preset", default="", help="where its preset lies, if it is not a committed one")
    reproduce.add_argument(
        "--anyway", action="store_true", help="run though code, versions or the machine have changed"
    )
    ui = commands.add_parser("ui", help="open the MLflow and Prefect interfaces over the results")
    ui.add_argument("--mlflow-port", type=int, default=5000)
    ui.add_argument("--prefect-port", type=int, default=4200)
    return parser


if __name__ == "__main__":
    sys.exit(main())
