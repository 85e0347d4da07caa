"""Commands that run a preset, or show what would run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.flows.cli.parameters import Overrides, Preset, announce, open_home
from rlcore.tasks.store.settings import engine_name, use_inline_engine

if TYPE_CHECKING:
    from rlcore.flows.plan import RunPlan
    from rlcore.tasks.store.artifacts import ArtifactRef


def run(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Run every stage of a preset: data, training, evaluation, comparison, report.

    Cached stages are skipped. After an interruption the same command resumes.

    ```
    rlcore run
    rlcore run mine.toml --set stages.grpo.learning_rate=2e-6 --set seed=1
    ```
    """
    home = open_home(reads=True)
    from rlcore.flows.plan import plan_run
    from rlcore.flows.presets import open_draft

    draft = open_draft(preset, overrides)
    if draft.config and not draft.errors:
        announce(draft.config, home)
    planned = plan_run(preset, overrides, is_verified=False)  # reject invalid presets before anything starts
    sys.stderr.write(f"{planned.summary}\n")
    if planned.is_cached and not os.environ.get("PREFECT_API_URL"):
        use_inline_engine()  # an embedded server would take longer to start than the rest of the run
    open_home()
    from rlcore.tasks.run.live_view import live_view

    started = time.perf_counter()
    with live_view():
        refs = _run_all(planned, preset, overrides)
    from rlcore.tasks.report.summary import summarise

    sys.stdout.write(summarise(home, planned.config.name, refs, seconds=time.perf_counter() - started))
    return 0


def _run_all(planned: RunPlan, preset: str, overrides: Sequence[str]) -> Mapping[str, ArtifactRef]:
    """Run every stage; the inline engine imports no Prefect."""
    if engine_name() == "inline":
        from rlcore.flows.run import run_targets
        from rlcore.tasks.run.interrupts import interruptible

        with interruptible():
            return run_targets(preset, overrides, [row.stage for row in planned.rows])
    from rlcore.flows.flows import post_train
    from rlcore.tasks.run.prefect_bridge import call_flow

    return call_flow(post_train, preset=preset, overrides=tuple(overrides))


def plan(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Show which stages are cached, which would run and why, their memory, disk and time; nothing runs.

    All errors that can be found before a run are listed by file: keys and values, the graph of the stages, the first
    rows of each data file, tokenizer and chat template, missing packages, memory and disk.

    ```
    rlcore plan mine.toml
    ```
    """
    open_home(reads=True)
    from rlcore.flows.plan import plan_run

    planned = plan_run(preset, overrides)
    from rlcore.tasks.keys.plan import format_plan

    sys.stdout.write("\n".join((format_plan(planned.rows), *planned.lines)) + "\n")
    return 0


def promote(preset: Preset = "tiny", *, overrides: Overrides = ()) -> int:
    """Compare a preset's challenger with the champion, and promote it if it is better.

    The section [promotion] names the challenger and the allowed losses.

    ```
    rlcore promote mine.toml
    ```
    """
    from rlcore.flows.presets import open_preset

    config = open_preset(preset, overrides)  # reject invalid presets before anything starts
    home = open_home()
    announce(config, home)
    from rlcore.flows.flows import promote as promote_flow
    from rlcore.tasks.run.live_view import live_view
    from rlcore.tasks.run.pages import page_folder
    from rlcore.tasks.run.prefect_bridge import call_flow
    from rlcore.tasks.store.markdown import on_terminal

    with live_view():
        refs = call_flow(promote_flow, preset=preset, overrides=overrides)
    page = page_folder(home, config.name, "promote", refs["promote"]) / "verdict.md"
    sys.stdout.write(on_terminal(page.read_text(encoding="utf-8")))
    return 0


def retrain(preset: Preset = "retrain", *, overrides: Overrides = ()) -> int:
    """Continue training the champion on new data, and promote a better model; without new data do nothing.

    ```
    rlcore retrain mine.toml
    ```
    """
    from rlcore.flows.presets import open_preset
    from rlcore.tasks.presets.settings import RetrainConfig

    config = open_preset(preset, overrides)
    config.section("retrain", RetrainConfig, where=preset)  # reject invalid presets before anything starts
    home = open_home()
    announce(config, home)
    from rlcore.flows.flows import retrain as retrain_flow
    from rlcore.tasks.run.live_view import live_view
    from rlcore.tasks.run.prefect_bridge import call_flow
    from rlcore.tasks.store.markdown import on_terminal

    with live_view():
        done = call_flow(retrain_flow, preset=preset, overrides=overrides)
    sys.stdout.write(f"{on_terminal(done.page)}\n{done.outcome}\n")
    return 0
