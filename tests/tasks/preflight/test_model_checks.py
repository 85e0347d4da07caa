"""LoRA for engines in half precision: sent as such, or refused."""

from __future__ import annotations

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.preflight.model_checks import adapter_errors

SERVER = "kind='vllm'"
ATTACHED = "kind='vllm',urls=['http://a:1']"
RANKS = "distributed={backend='processes',learner_ranks=2}"
HALVES = [(half, "auto") for half in ("bfloat16", "float16")] + [("float32", "bfloat16"), ("float32", "float16")]


def errors(engine: str, hardware: str, dtype: str, rank: int, *more: str) -> list[str]:
    overrides = (
        f"engine={{{engine},dtype='{dtype}'}}",
        f"hardware.dtype={hardware}",
        f"stages.grpo.update.lora.rank={rank}",
        *more,
    )
    config = open_preset("tiny", overrides)
    return list(adapter_errors(config, tuple(config.stages)))


@pytest.mark.parametrize(("hardware", "dtype"), HALVES)
@pytest.mark.parametrize(
    ("engine", "rank", "more", "fix"),
    [
        (ATTACHED, 32, (), "set engine.urls = [];"),
        (SERVER, 513, (), "set update.lora.rank to at most 512;"),
        (SERVER, 32, (RANKS,), "set distributed.backend = 'local';"),
        (ATTACHED, 513, (RANKS,), "set engine.urls = [] and update.lora.rank to at most 512 and distributed.backend"),
    ],
)
def test_merged_weights_in_half_precision_are_refused_with_settings_that_send_the_adapter(
    engine: str, rank: int, more: tuple[str, ...], fix: str, hardware: str, dtype: str
) -> None:
    (error,) = errors(engine, hardware, dtype, rank, *more)
    half = hardware if dtype == "auto" else dtype
    assert error.startswith(f"stages.grpo.update.lora.rank = {rank}: the engine would get merged weights in {half}")
    assert fix in error
    assert errors(engine, "float32", "auto", rank, *more) == []  # the other fix
    assert errors(engine, hardware, dtype, 0, *more) == []


@pytest.mark.parametrize(("hardware", "dtype"), HALVES)
@pytest.mark.parametrize(("engine", "rank"), [(SERVER, 1), (SERVER, 512), ("kind='native'", 513)])
def test_a_started_server_gets_the_adapter_and_the_native_engine_computes_in_float32(
    engine: str, rank: int, hardware: str, dtype: str
) -> None:
    assert errors(engine, hardware, dtype, rank) == []


def test_a_preset_for_a_gpu_that_is_not_here_is_refused_as_it_would_be_there() -> None:
    (error,) = errors(ATTACHED, "auto", "auto", 8, "hardware.device=cuda")
    assert "merged weights in half precision" in error
