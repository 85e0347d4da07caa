"""The page for Prometheus: what stands on it, when, and where it is served."""

from __future__ import annotations

import logging
import os
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.exporter import ADDRESS, Labels, exported, gauge_name, labels_of
from rlcore.tasks.pipeline.stages import run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.settings import Home
from tests.http_servers import free_port
from tests.tasks.pipeline.test_stages import open_run
from tests.toys import no_sections
from tests.waiting import LONG

CONFIG = open_preset("tiny", ["stages.grpo.algorithm=dapo"])
GRPO = {"preset": "tiny", "stage": "grpo", "recipe": "dapo"}
Page = dict[tuple[str, str], float]


def read(port: int) -> Page:
    """The page: value by gauge and stage, as Prometheus's own parser reads it."""
    with urllib.request.build_opener().open(f"http://127.0.0.1:{port}/metrics", timeout=LONG) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, sample.labels.get("stage", "")): sample.value for sample in samples}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    chosen = free_port()
    monkeypatch.setenv(ADDRESS, f"127.0.0.1:{chosen}")
    return chosen


def test_without_an_address_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with exported(CONFIG, "grpo") as show:
        assert show is None


def test_the_running_stage_is_on_the_page_with_its_last_figures_and_then_is_not(port: int) -> None:
    with exported(CONFIG, "grpo") as show:
        assert show is not None
        show({"reward/mean": 0.25, "kl/ref": 0.01}, 3)
        show({"reward/mean": 0.5}, 4)
        with exported(CONFIG, "sft") as other:
            assert other is not None
            other({"sft/loss": 2.0}, 7)
            page = read(port)
        assert ("rlcore_sft_loss", "sft") not in read(port)
        show({"memory/peak_gib": 1.5}, 0)  # a stage's summary has no step
        assert read(port)["rlcore_step", "grpo"] == 4.0
    assert page["rlcore_reward_mean", "grpo"] == 0.5
    assert page["rlcore_kl_ref", "grpo"] == 0.01
    assert page["rlcore_sft_loss", "sft"] == 2.0
    assert (page["rlcore_step", "grpo"], page["rlcore_step", "sft"]) == (4.0, 7.0)
    assert page["rlcore_logged_timestamp_seconds", "grpo"] > 1.7e9
    assert page["process_resident_memory_bytes", ""] > 1e6
    assert not any(name.startswith("rlcore_") for name, _ in read(port))


def log_twice(context: StageContext) -> StageResult:
    for value in (0.25, 0.75):  # after a resume the last iterations come a second time, which MLflow is not told
        context.tracker.log_metrics({"reward/mean": value}, step=1)
    page = read(int(os.environ[ADDRESS].rpartition(":")[2]))
    (context.folder / "reward").write_text(str(page["rlcore_reward_mean", "grpo"]))
    return StageResult(metrics={})


def test_what_a_stage_logs_is_on_the_page_while_it_runs(port: int, tracked_home: Home) -> None:
    run = open_run(tracked_home)
    stage = Stage(name="grpo", version=1, kind="policy", run=log_twice, sections=no_sections)
    ref = run_stage(stage, CONFIG, {}, run)
    assert (run.store.path(ref) / "reward").read_text() == "0.75"
    assert not any(name.startswith("rlcore_") for name, _ in read(port))


def test_each_gauge_carries_its_labels_and_the_glossarys_formula(port: int) -> None:
    with exported(CONFIG, "grpo") as show:
        assert show is not None
        show({"reward/term/math": 1.0}, 1)
        with urllib.request.build_opener().open(f"http://127.0.0.1:{port}/metrics", timeout=LONG) as answer:
            families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    family = families["rlcore_reward_term_math"]
    assert (family.type, family.samples[0].labels) == ("gauge", GRPO)
    assert "mean" in family.documentation


def test_a_stage_without_an_algorithm_is_its_own_recipe() -> None:
    assert labels_of(CONFIG, "grpo") == Labels(**GRPO)
    assert [labels_of(CONFIG, stage).recipe for stage in ("sft", "evaluate_sft")] == ["sft", "evaluate_sft"]
    assert gauge_name("eval/pass_at_8") == "rlcore_eval_pass_at_8"


def test_a_taken_port_is_passed_by_and_no_free_one_costs_the_page_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = int(taken.getsockname()[1])
        monkeypatch.setenv(ADDRESS, f"127.0.0.1:{first}")
        with exported(CONFIG, "grpo") as show:
            assert show is not None
            show({"entropy": 2.0}, 1)
            assert read(first + 1)["rlcore_entropy", "grpo"] == 2.0
    monkeypatch.setenv(ADDRESS, "203.0.113.1:9464")  # not an address of this machine (RFC 5737)
    with caplog.at_level(logging.WARNING), exported(CONFIG, "grpo") as show:
        assert show is not None
        show({"entropy": 2.0}, 1)
    assert "no metrics for Prometheus: ports 9464 to 9467 of 203.0.113.1" in caplog.text


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "a:b"])
def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(ADDRESS, address)
    with pytest.raises(ConfigError, match="is not an address"), exported(CONFIG, "grpo"):
        pass
