"""Several engines behind one sampler: the same completions as from one, and a sync that is proved on each."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.algorithms.agreement import Spread
from rlcore.algorithms.table import ALGORITHMS
from rlcore.checks.canaries.sync import EngineCalibration
from rlcore.config import SamplingConfig
from rlcore.errors import SamplingError, StaleSamplerError
from rlcore.loop.weight_sync import calibrate_engines, verify_sync
from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams, replicas_of, take_metrics
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import ReplicatedSampler, open_servers
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner
from rlcore.types import FailedRollout, Prompt, Rollout
from tests import strategies
from tests.rlcore.sampling.servers import server_spec
from tests.waiting import LONG

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=6, num_samples=3)
CPU = torch.device("cpu")
SOUND = EngineCalibration(noise=Spread(0.0, 0.0), unverified=frozenset())


class DeafSampler(NativeSampler):
    """Takes the version of new weights and leaves the weights."""

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self.policy_version = policy_version


class BrokenSampler(NativeSampler):
    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        raise SamplingError("this engine is gone")


class MeetingSampler(NativeSampler):
    """Sampler that waits for the others before it samples."""

    meeting = threading.Barrier(2, timeout=LONG)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        self.meeting.wait()
        return super().sample(prompts, params, seed=seed, places=places)


def make(checkpoint: Path, tokenizer: ChatTokenizer, *kinds: type[NativeSampler]) -> ReplicatedSampler:
    members = [kind(load_policy(checkpoint, device=CPU, dtype=torch.float32), tokenizer) for kind in kinds]

    def send(state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        for member in members:
            member.load_weights(state, policy_version=policy_version)

    return ReplicatedSampler(members, send)


def test_each_completion_names_the_engine_that_made_it(
    checkpoint: Path, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    found = make(checkpoint, tokenizer, NativeSampler, NativeSampler).sample(prompts, PARAMS, seed=3)
    named = [{item.replica for item in group if isinstance(item, Rollout)} for group in found]
    assert named == [{number % 2} for number in range(len(prompts))]  # a group is of one engine


@pytest.mark.parametrize("places", [None, [7, 2, 11, 5]])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_completions_are_those_of_one_engine_in_the_order_of_the_prompts(
    count: int, places: list[int] | None, checkpoint: Path, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    one, several = (make(checkpoint, tokenizer, *(NativeSampler,) * n) for n in (1, count))
    expected = one.sample(prompts, PARAMS, seed=3, places=places)
    found = several.sample(prompts, PARAMS, seed=3, places=places)
    for ours, theirs in zip(expected, found, strict=True):
        assert [r.prompt for r in theirs] == [r.prompt for r in ours]
        assert [r.completion_ids for r in theirs if isinstance(r, Rollout)] == [
            r.completion_ids for r in ours if isinstance(r, Rollout)
        ]


def test_the_engines_work_at_the_same_time(checkpoint: Path, tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    groups = make(checkpoint, tokenizer, MeetingSampler, MeetingSampler).sample(prompts, PARAMS, seed=0)
    assert [len(group) for group in groups] == [3] * len(prompts)


def test_an_engine_that_breaks_stops_the_run(checkpoint: Path, tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    with pytest.raises(SamplingError, match="this engine is gone"):
        make(checkpoint, tokenizer, NativeSampler, BrokenSampler).sample(prompts, PARAMS, seed=0)


def test_weights_reach_every_engine_and_a_deaf_one_is_found_wherever_it_stands(
    checkpoint: Path, tokenizer: ChatTokenizer, prompts: list[Prompt], model: PreTrainedModel
) -> None:
    components = components_of(make(checkpoint, tokenizer, NativeSampler, NativeSampler), model, prompts)
    baselines, samples = calibrate_engines(components)
    assert (len(baselines), len(samples)) == (2, 2 * len(prompts))
    learn(components)
    load(components)
    assert verify_sync(components, baselines)["sync/logprob_max_diff"] < 1e-5
    assert verify_sync(components, baselines, by_probes=False) == {}
    for kinds in ((NativeSampler, DeafSampler), (DeafSampler, NativeSampler)):
        components = components_of(make(checkpoint, tokenizer, *kinds), model, prompts)
        learn(components)
        load(components)
        for by_probes in (True, False):
            with pytest.raises(StaleSamplerError):
                verify_sync(components, [SOUND] * 2, by_probes=by_probes)


def components_of(engine: ReplicatedSampler, model: PreTrainedModel, prompts: list[Prompt]) -> Any:
    config = strategies.rl_config(sampling=SamplingConfig(max_new_tokens=6))
    learner = Learner(model, None, algorithm=ALGORITHMS["grpo"], config=config)
    return SimpleNamespace(
        engine=engine,
        prompts=prompts,
        seed=0,
        learner=LocalLearner(learner),
        config=config,
        engine_dtype=torch.float32,
    )


def load(components: Any) -> None:
    learner = components.learner
    components.engine.load_weights(learner.weights(), policy_version=learner.policy_version)


def learn(components: Any) -> None:
    with torch.no_grad():
        for parameter in components.learner.learner.policy.parameters():
            parameter += 0.02
    components.learner.learner.policy_version += 1


def test_one_engine_that_cannot_report_its_weights_leaves_the_check_out(
    checkpoint: Path, tokenizer: ChatTokenizer, model: PreTrainedModel
) -> None:
    native = NativeSampler(model, tokenizer)
    assert ReplicatedSampler([native, native], native.load_weights).differing_parts(model.state_dict()) == []
    assert (
        ReplicatedSampler([native, ScriptedSampler({}, tokenizer)], native.load_weights).differing_parts(
            model.state_dict()
        )
        is None
    )
    other = {name: tensor + 1.0 if "layers.1.mlp.up" in name else tensor for name, tensor in model.state_dict().items()}
    assert ReplicatedSampler([native, native], native.load_weights).differing_parts(other) == ["layer 1"]


def test_one_engine_has_itself_for_its_only_member_and_a_native_one_no_metrics(
    checkpoint: Path, tokenizer: ChatTokenizer
) -> None:
    several = make(checkpoint, tokenizer, NativeSampler, NativeSampler)
    assert replicas_of(several) == several.members
    assert replicas_of(several.members[0]) == (several.members[0],)
    assert take_metrics(several) == {}
    several.members[1].load_weights(dict(several.members[1]._model.state_dict()), policy_version=4)  # type: ignore[attr-defined]
    assert several.policy_version == 0


def test_where_one_server_does_not_start_nothing_is_left(
    checkpoint: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    specs = [server_spec(checkpoint, folder, engine={"python": str(tmp_path / "none")}) for folder in folders]
    with (
        pytest.raises(SamplingError, match=r"the interpreter .* does not exist"),
        open_servers(specs, tokenizer, print),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
