"""The client of vLLM's server, and the weight file that it reads."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.config import TimeoutConfig
from rlcore.errors import SamplingError
from rlcore.metrics import check_names
from rlcore.sampling.base import SamplingParams, weight_mismatches
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm.client import Address, EngineControl
from rlcore.sampling.vllm.server import MAX_ATTEMPTS, EngineWatch, VllmSampler, parse_page
from rlcore.sampling.vllm.weights import (
    Converted,
    adapter_mismatches,
    checkpoint_shapes,
    make_weight_dir,
    stored_tensors,
    write_weights,
)
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.rlcore.sampling.servers import server_spec
from tests.waiting import LONG, until

HASTY = 2.0  # seconds for a request, where one hangs

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=4, num_samples=2)

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 2.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 9.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} 3.0
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} 1e+02
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 25.0
"""


class Routes(BaseHTTPRequestHandler):
    """Completes every request with its own seed's digits; ``trouble`` says what goes wrong, and how often."""

    calls: Counter[str]
    order: list[str]
    seen: list[dict[str, Any]]
    trouble: dict[str, int]
    version: str
    track_stage: int
    most: int
    lock: threading.Lock

    def do_GET(self) -> None:
        kind = type(self)
        if self.path != "/metrics":
            self._answer(200, {})
            return
        done = kind.calls["/inference/v1/generate"] - kind.track_stage
        page = PAGE.format(running=kind.track_stage, generated=4 * done, kv=0.125 * kind.track_stage)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.calls[path] += 1
            kind.order.append(path)
        if path == "/inference/v1/generate":
            self._generate(payload)
        elif path == "/collective_rpc":
            kind.seen.append(payload)
            self._answer(500 if self._hit("refuse") else 200, {"results": [{"tensors": 20}]})
        else:
            if path == "/update_weight_version":
                kind.version = payload["new_version"]
            self._answer(200, {"success": not self._hit("cache")} if path == "/reset_prefix_cache" else {})

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""

    def _generate(self, payload: dict[str, Any]) -> None:
        settings = payload["sampling_params"]
        kind = type(self)
        with kind.lock:
            kind.seen.append(payload)
            kind.track_stage += 1
            kind.most = max(kind.most, kind.track_stage)
        if self._hit("meet"):
            until(lambda: kind.most == 3, "three requests at a time")
        if hangs := self._hit("hang"):
            self.connection.settimeout(LONG)
            self.connection.recv(1)  # until the client leaves
        with kind.lock:  # before the answer, upon which the client may send the next
            kind.track_stage -= 1
        if hangs or self._hit("break off"):
            self.close_connection = True
            return
        if self._hit("overload"):
            self._answer(503, {"error": "busy"})
            return
        if self._hit("bad"):
            self._answer(400, {"error": "bad"})
            return
        tokens = [3 + int(digit) for digit in str(settings["seed"])[:4]]
        logprob = -9999.0 if self._hit("nan") else -1.5
        content = [{"token_id": token, "logprob": logprob} for token in tokens]
        reason = "abort" if self._hit("abort") else "length"
        spans = [{"version": "7", "start": 0, "end": 2}, {"version": self.version, "start": 2, "end": 4}]
        choice = {
            "finish_reason": reason,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        self._answer(200, {"choices": [choice]})

    def _hit(self, name: str) -> bool:
        with self.lock:
            left = self.trouble.get(name, 0)
            self.trouble[name] = left - 1
        return left > 0

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def routes() -> Iterator[tuple[type[Routes], str]]:
    fresh = {"calls": Counter(), "order": [], "seen": [], "trouble": {}, "version": "", "track_stage": 0, "most": 0}
    kind = type("FreshRoutes", (Routes,), {**fresh, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # a client that hung up
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def sampler(
    request: pytest.FixtureRequest,
    routes: tuple[type[Routes], str],
    checkpoint: Path,
    tokenizer: ChatTokenizer,
    tmp_path: Path,
) -> Iterator[VllmSampler]:
    """A sampler that waits as long as it must; by its parameter, so many seconds for each request."""
    (tmp_path / "exchange").mkdir()
    seconds = getattr(request, "param", LONG)
    engine = {"timeouts": TimeoutConfig(request_seconds=seconds)}
    spec = server_spec(checkpoint, tmp_path / "exchange", engine=engine, max_concurrent=3, url=routes[1])
    with open_servers([spec], tokenizer, lambda line: None) as sampler:
        assert isinstance(sampler, VllmSampler)
        yield sampler


def flat(groups: list[list[Rollout | FailedRollout]]) -> list[Rollout | FailedRollout]:
    return [item for group in groups for item in group]


@pytest.mark.parametrize(
    ("trouble", "sampler"),
    [("hang", HASTY), ("break off", LONG), ("overload", LONG), ("abort", LONG)],
    indirect=["sampler"],
)
def test_what_fails_is_asked_for_again_and_comes_out_the_same(
    trouble: str, routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    expected = flat(sampler.sample(prompts, PARAMS, seed=1))
    asked = routes[0].calls["/inference/v1/generate"]
    routes[0].trouble[trouble] = 2
    assert flat(sampler.sample(prompts, PARAMS, seed=1)) == expected
    assert all(isinstance(item, Rollout) for item in expected)
    assert routes[0].calls["/inference/v1/generate"] == 2 * asked + 2


def test_a_request_carries_token_ids_its_own_seed_and_our_stop_tokens(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt], tokenizer: ChatTokenizer
) -> None:
    sampler.sample(prompts, PARAMS, seed=1)
    requests = [seen for seen in routes[0].seen if "token_ids" in seen]
    sent = Counter(tuple(request["token_ids"]) for request in requests)
    assert sent == Counter({prompt.token_ids: 2 for prompt in prompts})
    settings = [request["sampling_params"] for request in requests]
    assert len({s["seed"] for s in settings}) == len(settings)
    assert all(s["stop_token_ids"] == list(tokenizer.eos_ids) and s["ignore_eos"] for s in settings)
    assert all(s["temperature"] == 0.8 and s["max_tokens"] == 4 for s in settings)


def test_no_more_requests_are_under_way_than_allowed(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    routes[0].trouble["meet"] = 3
    sampler.sample(prompts * 4, PARAMS, seed=1)
    assert routes[0].most == 3


def test_a_completion_that_the_engine_refuses_fails_alone_and_is_not_asked_for_again(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    routes[0].trouble["bad"] = 1
    made = flat(sampler.sample(prompts, PARAMS, seed=1))
    assert [type(item) for item in made].count(FailedRollout) == 1
    assert routes[0].calls["/inference/v1/generate"] == len(made)


def test_an_engine_that_completes_nothing_is_broken(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    routes[0].trouble["overload"] = 1000
    with pytest.raises(SamplingError, match="requests: HTTP 503"):
        sampler.sample(prompts, PARAMS, seed=1)
    assert routes[0].calls["/inference/v1/generate"] == MAX_ATTEMPTS * len(prompts) * 2


def test_a_log_probability_that_is_no_number_stops_the_run(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    routes[0].trouble["nan"] = 1
    with pytest.raises(SamplingError, match="NaN or infinity"):
        sampler.sample(prompts, PARAMS, seed=1)


def test_a_completion_that_spans_a_sync_has_its_oldest_version(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt], model: PreTrainedModel
) -> None:
    sampler.load_weights(model.state_dict(), policy_version=9)
    assert {item.policy_version for item in flat(sampler.sample(prompts, PARAMS, seed=1))} == {7}  # type: ignore[union-attr]
    assert sampler.policy_version == 9


def test_an_update_is_made_while_the_engine_is_paused_and_drops_what_the_old_weights_computed(
    routes: tuple[type[Routes], str], sampler: VllmSampler, model: PreTrainedModel
) -> None:
    routes[0].order.clear()
    sampler.load_weights(model.state_dict(), policy_version=1)
    steps = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert routes[0].order == steps
    assert routes[0].version == "1"


def test_one_weight_file_is_kept_and_none_after_the_run(
    routes: tuple[type[Routes], str], sampler: VllmSampler, model: PreTrainedModel, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        sampler.load_weights(model.state_dict(), policy_version=version)
        (only,) = (tmp_path / "exchange").iterdir()
        assert routes[0].seen[-1]["args"] == [str(only)]
    sampler.close()
    assert list((tmp_path / "exchange").iterdir()) == []


@pytest.mark.parametrize("trouble", ["refuse", "cache"])
def test_a_sync_that_an_attached_engine_refuses_stops_the_run(
    trouble: str, routes: tuple[type[Routes], str], sampler: VllmSampler, model: PreTrainedModel
) -> None:
    routes[0].trouble[trouble] = 1
    with pytest.raises(SamplingError, match="rlcore cannot restart it"):
        sampler.load_weights(model.state_dict(), policy_version=1)
    assert sampler.policy_version == 0


def test_a_server_that_dies_between_a_sync_and_its_proof_is_asked_again_when_another_serves(
    routes: tuple[type[Routes], str], sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, started = sampler.control, list[int]()

    def start() -> None:
        started.append(1)
        sampler.control = living

    dead = EngineControl(Address("127.0.0.1", 9), log_tail=str)
    monkeypatch.setattr(sampler, "start", start)
    sampler.control = dead
    assert sampler._ask("/collective_rpc", {"method": "m", "args": []}) == {"results": [{"tensors": 20}]}
    assert started == [1]
    routes[0].trouble["refuse"] = 1
    with pytest.raises(SamplingError, match="refused /collective_rpc"):
        sampler._ask("/collective_rpc", {"method": "m", "args": []})
    assert started == [1]  # one that answers is not dead


def test_a_long_completion_may_take_longer() -> None:
    assert TimeoutConfig().for_request(1000) == 700.0
    assert TimeoutConfig(request_seconds=5.0).for_request(1000) == 5.0


@pytest.mark.parametrize("sampler", [HASTY], indirect=True)
def test_how_busy_the_engine_was_is_measured_while_it_samples_and_counted_from_call_to_call(
    routes: tuple[type[Routes], str], sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    kind, _ = routes
    kind.trouble["hang"] = 1  # past its deadline: long enough for a check and a retry
    sampler.sample(prompts, PARAMS, seed=1)
    figures = sampler.take_metrics()
    check_names(figures)
    assert figures["engine/retries"] == 1.0
    assert 1.0 <= figures["engine/running"] <= 3.0
    assert figures["engine/waiting"] == 2.0
    assert figures["engine/kv_cache_usage"] == 0.125 * figures["engine/running"]
    assert figures["engine/preemptions"] == 0.0  # 3 before and 3 after
    assert figures["engine/prefix_cache_hit_rate"] == 0.0
    made = 4 * (len(prompts) * PARAMS.num_samples)
    assert 0.0 < figures["engine/tokens_per_second"] <= (made + 4) / HASTY
    assert sampler.take_metrics() == {"engine/retries": 0.0}


def test_a_page_of_several_engines_is_summed_and_a_restarted_engine_counts_from_nothing() -> None:
    two = PAGE.format(running=1, generated=40, kv=0.5) + PAGE.format(running=2, generated=2, kv=0.25)
    figures = parse_page(two)
    assert figures["num_requests_running"] == 3.0
    assert figures["num_requests_waiting"] == 4.0  # and not 22: by reason is another figure
    assert figures["kv_cache_usage_perc"] == 0.5
    assert figures["generation_tokens"] == 42.0
    assert figures["prefix_cache_queries"] == 200.0
    watch = EngineWatch()
    watch._count({**figures, "generation_tokens": 100.0}, figures)
    watch._seconds = 2.0
    assert watch.take()["engine/tokens_per_second"] == 21.0


def test_an_engine_that_keeps_its_figures_to_itself_gives_none() -> None:
    watch = EngineWatch()
    watch._count({}, {})
    assert watch.take() == {"engine/retries": 0.0}
    assert parse_page("{}") == {}


def test_the_file_holds_every_stored_tensor_once_in_the_engines_precision(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    shapes = checkpoint_shapes(checkpoint)
    assert weight_mismatches(shapes, model.state_dict()) == []
    write_weights(Converted(model.state_dict(), shapes=shapes, dtype=torch.bfloat16), tmp_path / "w.safetensors")
    written = load_file(tmp_path / "w.safetensors")
    for path in (tmp_path, tmp_path / "w.safetensors"):
        assert {name: tensor.sum().item() for name, tensor in stored_tensors(path)} == {
            name: tensor.sum().item() for name, tensor in written.items()
        }
    assert set(written) == set(model.state_dict()) - {"lm_head.weight"}  # tied to the embedding
    for name, tensor in written.items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())


@pytest.mark.parametrize("length", range(1, 9))
def test_the_tensors_begin_at_a_multiple_of_8_bytes_as_the_format_has_it(length: int, tmp_path: Path) -> None:
    state = {"n" * length: torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    path = tmp_path / "w.safetensors"
    write_weights(Converted(state, shapes=shapes, dtype=torch.float16), path)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    read = load_file(path)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"n" * length: 2.5, "empty": []}
    assert [*tmp_path.iterdir()] == [path]


def test_weights_that_are_not_the_whole_model_are_named(checkpoint: Path, model: PreTrainedModel) -> None:
    shapes, state = checkpoint_shapes(checkpoint), model.state_dict()
    norm = "model.norm.weight"
    assert weight_mismatches(shapes, {name: tensor for name, tensor in state.items() if name != norm}) == [
        f"{norm} is missing"
    ]
    assert weight_mismatches(shapes, {**state, norm: torch.ones(3)}) == [f"{norm} has a different shape"]
    assert weight_mismatches(shapes, {**state, "extra": torch.ones(3)}) == [
        "extra is unknown, or tied in the engine and different here"
    ]
    untied = {**state, "lm_head.weight": state["lm_head.weight"] + 1.0}
    assert weight_mismatches(shapes, untied) == ["lm_head.weight is unknown, or tied in the engine and different here"]
    assert weight_mismatches(shapes, {**state, "lm_head.weight": state["lm_head.weight"].clone()}) == []


@pytest.mark.parametrize("named", [True, False])
def test_every_run_has_an_exchange_folder_of_its_own(tmp_path: Path, named: bool) -> None:
    one, other = (make_weight_dir(str(tmp_path) if named else "", num_bytes=10) for _ in range(2))
    assert one != other
    assert (one.parent == tmp_path) == named
    one.rmdir()
    other.rmdir()


def test_an_adapter_of_another_model_is_named() -> None:
    shapes = {"q.weight": (4, 8), "k.weight": (2, 8)}
    assert adapter_mismatches(shapes, {"q.weight": (4, 8)}) == []
    assert adapter_mismatches(shapes, {"q.weight": (8, 4), "k.weight": (2, 8), "v.weight": (2, 8)}) == [
        "q.weight has no weight of the adapter's shape",
        "v.weight has no weight of the adapter's shape",
    ]
