"""Online RL: rollouts, scoring, update, weight sync with its canary, periodic evaluation, checkpoint; resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from rlcore.canaries import known_answers_canary, terms_canary
from rlcore.evaluation import accuracy
from rlcore.health import Verdict
from rlcore.metrics import check_names
from rlcore.models.loading import save_model
from rlcore.rewards.base import is_correct, score_each
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.episodes import episode_metrics
from rlcore.sampling.replicas import take_metrics
from rlcore.sampling.vllm import rest
from rlcore.seeding import derive_seed
from rlcore.training.experience import Experience, build_experience
from rlcore.types import Rollout, ScoredRollout
from tasks.steps.base import MODEL, StageContext, StageResult
from tasks.steps.rl.ahead import mean_staleness
from tasks.steps.rl.groups import draw_groups, replacement_metrics
from tasks.steps.rl.health import go_back, stopping, watch, write_health
from tasks.steps.rl.memory import measured_update
from tasks.steps.rl.run import START, RlRun, open_run, start_from
from tasks.steps.rl.sync import compare_engines, sync_weights
from tasks.steps.rl.timing import timed
from tasks.steps.runtime import peak_memory_gib


def run_online_rl(context: StageContext, *, section: str, start: str) -> StageResult:
    """All iterations of one run, from the policy of the stage ``start`` or the run's newest checkpoint if there is one.

    The artifact is the trained policy.
    """
    with open_run(start_from(context, start), section) as run:
        check_rewards(run, compare_engines(run))
        done = resume(run)
        for iteration in range(done + 1, run.rl.num_iterations + 1):
            verdict = context.turn("iteration", iteration, partial(run_iteration, run, iteration))
            context.advance(f"{section} iterations", iteration, run.rl.num_iterations, run.history[-1])
            if finding := stopping(run, verdict):
                redo(run, go_back(run, finding, sound=verdict.sound), verdict.sound)
                break
        return finish(run)


def resume(run: RlRun) -> int:
    """Restore the newest checkpoint; returns the number of iterations done. The engine gets the restored weights."""
    state = run.checkpoints.load(run.learner)
    if state is None:
        return 0
    run.history, run.findings = state["history"], state["findings"]
    iteration = int(state["iteration"])
    run.ahead.restore(state["ahead"], run.prompts_of(iteration + 1))
    run.context.progress(f"goes on after iteration {iteration} of {run.rl.num_iterations}")
    sync_weights(run)
    return iteration


def redo(run: RlRun, done: int, until: int) -> None:
    """Do iterations once more that are recorded already: the same draws and updates, so the same weights."""
    if done < until:
        run.context.progress(f"goes back to iteration {until} by way of the checkpoint of iteration {done}")
        sync_weights(run)
    for iteration in range(done + 1, until + 1):
        drawn = draw_groups(run, iteration, {})
        rest(run.engine)
        update_policy(run, drawn.groups, iteration, {})
        run.ahead.wait()
        sync_weights(run)


def run_iteration(run: RlRun, iteration: int) -> Verdict:
    """One iteration: every step of it is timed, what it measured is logged and kept, and the health rules judge it."""
    metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    drawn = draw_groups(run, iteration, seconds)
    scored = drawn.groups
    if run.rl.sampling.max_replacements:
        metrics |= replacement_metrics(drawn, truncated=run.rl.update.truncated)
    if run.rl.sampling.episodes.tools:
        metrics |= episode_metrics([item.rollout for group in scored for item in group])
    if run.rl.sampling.staleness:
        metrics["staleness"] = mean_staleness(scored, run.learner.policy_version)
    with timed(seconds, "update"):
        rest(run.engine)
        update_policy(run, scored, iteration, metrics)
    with timed(seconds, "rollout"):
        run.ahead.wait()
    with timed(seconds, "sync"):
        metrics |= sync_weights(run)
    every, last = run.rl.eval_every, iteration == run.rl.num_iterations
    if every and (last or iteration % every == 0):
        with timed(seconds, "evaluate"):
            metrics |= monitor(run)
    lengths = [len(item.rollout.completion_ids) for group in (*scored, *drawn.replaced) for item in group]
    metrics |= {"rollouts/count": float(len(lengths)), "rollouts/tokens": float(sum(lengths))}
    metrics["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()} | take_metrics(run.engine)
    record(run, iteration, metrics)
    run.rollouts.keep(iteration, drawn)
    verdict = watch(run, iteration)
    if run.checkpoints.is_due(iteration) and not stopping(run, verdict):
        known_answers_canary(run.reward, run.prompts, prefill=run.tokenizer.prefill)
        checkpoint(run, iteration, spared=verdict.seen.values())
    return verdict


def update_policy(
    run: RlRun, scored: Sequence[Sequence[ScoredRollout]], iteration: int, metrics: dict[str, float]
) -> None:
    """Advantages, then the optimizer steps; adds to ``metrics``."""
    learner = run.learner
    experience = build_experience(
        scored,
        run.algorithm,
        replace(run.judges, tokens_per_microbatch=learner.tokens_per_microbatch),  # what fits the update fits them
        kl=run.rl.kl,
        kl_coefficient=learner.kl.coefficient,
        truncated=run.rl.update.truncated,
        need_old_logprobs=learner.needs_old_logprobs,
    )
    update = partial(learner.update, experience.samples, seed=derive_seed(run.seed, "update", iteration))
    stats, memory = measured_update(run, update)
    learner.observe_kl(mean_kl(experience, stats.metrics), len(experience.samples))
    # KL in the reward is measured while the rewards are made, KL in the loss while the loss is.
    metrics |= {**stats.metrics, **experience.metrics, **memory}


def mean_kl(experience: Experience, metrics: Mapping[str, float]) -> float:
    """Nats per completion to the reference, what the adaptive coefficient looks at.

    KL in the reward is summed over the completions; KL in the loss is measured per token, while the loss is.
    """
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in experience.samples)
    return experience.mean_kl + metrics.get("kl/ref", 0.0) * num_tokens / len(experience.samples)


def monitor(run: RlRun) -> dict[str, float]:
    """Greedy accuracy on the first held-out problems: for the curve; the stage ``evaluate`` gives the figure.

    As there, a problem that could not be answered or graded counts as wrong, and is counted.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=run.rl.sampling.max_new_tokens, num_samples=1, greedy=True)
    groups = run.sampler.sample(run.monitor_prompts, params, seed=0)
    scores = score_each([rollout for group in groups for rollout in group], run.verifier)
    failed = [score.error for score in scores if score.error]
    if failed:
        run.context.progress(f"{len(failed)} of {len(scores)} held-out problems count as wrong, as one: {failed[0]}")
    right = [is_correct(score) for score in scores]
    interval = accuracy(right, confidence=run.context.config.evaluation.confidence)
    return {
        "eval/accuracy": interval.mean,
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
        "eval/failed": float(len(failed)),
    }


def record(run: RlRun, iteration: int, metrics: Mapping[str, float]) -> None:
    """Log one iteration's metrics; a name that the glossary does not know, or NaN, is an error."""
    check_names(metrics)
    run.history.append({"iteration": iteration, **metrics})
    run.context.tracker.log_metrics(metrics, step=iteration)
    optional = {"KL": "kl/ref", "with calls": "episode/with_calls", "held-out": "eval/accuracy"}
    shown = "".join(f", {label} {metrics[name]:.4f}" for label, name in optional.items() if name in metrics)
    run.context.progress(
        f"iteration {iteration}/{run.rl.num_iterations}: reward {metrics['reward/mean']:.3f}, "
        f"length {metrics['completion/length']:.1f}{shown}"
    )


def checkpoint(run: RlRun, iteration: int, *, spared: Collection[int]) -> None:
    """Everything that has state, after a whole iteration; what the rules say is a function of the history."""
    state = {"history": run.history, "ahead": run.ahead.state(), "findings": run.findings}
    run.rollouts.write()
    run.context.tracker.flush()  # the resumed run drops what is logged already, and must not miss what is not
    run.checkpoints.save(iteration, run.learner, run_state=state, spared=spared)


def check_rewards(run: RlRun, samples: Sequence[Rollout]) -> None:
    """Probe every term of the reward that trains, and the verifier of held-out answers, or stop the run."""
    prefill = run.tokenizer.prefill
    notes = terms_canary(run.reward, run.prompts, samples, prefill=prefill)
    notes += known_answers_canary(run.verifier, run.prompts, prefill=prefill)
    for note in dict.fromkeys(notes):
        run.context.progress(note)


def finish(run: RlRun) -> StageResult:
    """The artifact: the policy, every rollout, the history and what the health rules found."""
    folder = run.context.folder
    run.rollouts.write()
    run.context.tracker.flush()
    start = run.context.inputs[START] / MODEL
    save_model(run.learner.policy, start, folder / MODEL, like_start=run.runtime.narrow)
    shutil.copytree(run.rollouts.folder, folder / "rollouts")
    (folder / "history.json").write_text(json.dumps(run.history, indent=1), encoding="utf-8")
    write_health(run)
    run.context.tracker.log_artifacts(folder / "rollouts", "rollouts")
    last = {name: value for name, value in run.history[-1].items() if name != "iteration"}
    memory = {"memory/peak_gib": peak_memory_gib(run.runtime.device)}
    del run.learner
    torch.cuda.empty_cache()
    return StageResult(metrics=last | memory, rows=len(run.history))
