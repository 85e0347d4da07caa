from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError
from rlcore.hardware.machine import (
    Machine,
    _numerics_digest,
    choose_device_and_dtype,
    fast_dtype_hint,
    find_machine,
    hardware_config_for,
    slow_dtype_warning,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def pretend_cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """CUDA with a card of each compute capability, or none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(capabilities))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capabilities[device.index or 0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"Card {device.index or 0}")


def pretend_units(monkeypatch: pytest.MonkeyPatch, *, are_there: bool) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(f"torch.cpu.{name}", lambda: are_there)


@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_computes_in_float32_unless_asked_otherwise_whatever_units_it_has(
    monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    pretend_cards(monkeypatch)
    pretend_units(monkeypatch, are_there=has_units)
    assert choose_device_and_dtype(HardwareConfig()) == (CPU, torch.float32)
    assert choose_device_and_dtype(HardwareConfig(dtype="bfloat16")) == (CPU, torch.bfloat16)
    assert choose_device_and_dtype(HardwareConfig(dtype="float16")) == (CPU, torch.float16)


def test_cuda_computes_in_bfloat16_and_an_old_card_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (7, 5))
    assert choose_device_and_dtype(HardwareConfig()) == (torch.device("cuda"), torch.bfloat16)
    assert choose_device_and_dtype(HardwareConfig(device="cuda:1")) == (torch.device("cuda:1"), torch.float16)
    assert choose_device_and_dtype(HardwareConfig(dtype="float32"))[1] == torch.float32
    assert choose_device_and_dtype(HardwareConfig(device="cpu")) == (CPU, torch.float32)


def test_a_card_that_is_not_there_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (9, 0))
    with pytest.raises(ConfigError, match="'cuda:2', but the last CUDA device is cuda:1"):
        find_machine(HardwareConfig(device="cuda:2"))
    pretend_cards(monkeypatch)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="no CUDA device is available"):
            find_machine(HardwareConfig(device=name))


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:01", "cuda:-1", "cpu:0", "cuda:1 "])
def test_a_device_of_no_known_form_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be one of 'auto', 'cpu', 'cuda', 'cuda:0'"):
        HardwareConfig(device=name)


def test_cards_of_one_kind_are_one_machine_and_of_two_kinds_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (9, 0), (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    first, second, other = (find_machine(HardwareConfig(device=f"cuda:{number}")) for number in range(3))
    assert first == second == find_machine(HardwareConfig(num_threads=3))
    assert other != first
    assert first == Machine(device="cuda", precision="bfloat16", gpu="NVIDIA H200 (compute capability 9.0)")


def test_what_was_asked_for_and_what_auto_became_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch)
    threads = torch.get_num_threads()
    assert find_machine(HardwareConfig()) == find_machine(
        HardwareConfig(device="cpu", dtype="float32", num_threads=threads)
    )
    assert torch.get_num_threads() == threads
    others = [
        HardwareConfig(dtype="bfloat16"),
        HardwareConfig(dtype="float16"),
        HardwareConfig(num_threads=threads + 1),
    ]
    assert len({find_machine(config) for config in (HardwareConfig(), *others)}) == 4


def test_a_recorded_machine_is_asked_for_again_as_far_as_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch)
    asked = HardwareConfig(dtype="bfloat16", num_threads=3)
    assert find_machine(HardwareConfig(**hardware_config_for(asdict(find_machine(asked))))) == find_machine(asked)
    assert hardware_config_for({}) == {}
    pretend_cards(monkeypatch, (9, 0))
    on_cuda = asdict(find_machine(HardwareConfig()))
    assert find_machine(HardwareConfig(**hardware_config_for(on_cuda))).device == "cuda"
    pretend_cards(monkeypatch)
    moved = find_machine(HardwareConfig(**hardware_config_for(on_cuda)))
    assert (moved.device, moved.precision) == ("cpu", "bfloat16")


def test_units_for_half_precision_belong_to_half_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    half, full = HardwareConfig(device="cpu", dtype="bfloat16"), HardwareConfig(device="cpu")
    found = []
    for are_there in (True, False):
        pretend_units(monkeypatch, are_there=are_there)
        found.append((find_machine(full), find_machine(half).instructions))
    (with_units, named), (without, bare) = found
    assert with_units == without
    assert named == f"{bare} + avx512_bf16 + amx_tile + amx_fp16"


@pytest.mark.parametrize(
    ("precision", "instructions", "is_slow"),
    [
        ("float32", "DEFAULT", False),
        ("bfloat16", "AVX2", True),
        ("bfloat16", "AVX512", False),
        ("bfloat16", "AVX512 + avx512_bf16", False),
        ("float16", "AVX512 + avx512_bf16", True),
        ("float16", "AVX512 + amx_tile + amx_fp16", False),
    ],
)
def test_a_precision_that_a_processor_computes_slowly_is_named(
    precision: str, instructions: str, is_slow: bool
) -> None:
    found = slow_dtype_warning(Machine(device="cpu", precision=precision, instructions=instructions))
    assert (precision in found) == is_slow
    assert not slow_dtype_warning(Machine(device="cuda", precision=precision))


@pytest.mark.parametrize(("units", "precision"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_only_units_that_are_not_used_are_named(units: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: units)
    hint = fast_dtype_hint(Machine(device="cpu", precision=precision, instructions="AVX512"))
    assert bool(hint) == (units and precision == "float32")
    assert not fast_dtype_hint(Machine(device="cuda", precision=precision))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_arithmetic_does_not_depend_on_threads_the_global_seed_or_an_open_autocast(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    before = _numerics_digest.__wrapped__(dtype)
    try:
        torch.set_num_threads(threads + 1)
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert _numerics_digest.__wrapped__(dtype) == before
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_another_instruction_set_is_another_machine() -> None:
    """In a process of its own: torch chooses its instruction set once."""
    script = "from rlcore.hardware.machine import *; print(find_machine(HardwareConfig(device='cpu', num_threads=1)))"
    here = find_machine(HardwareConfig(device="cpu", num_threads=1))
    lowered = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", script], env=lowered, cwd=ROOT, capture_output=True, text=True)
    assert "precision='float32', gpu='', instructions='DEFAULT', threads=1" in done.stdout
    arithmetic = done.stdout.partition("numerics_digest='")[2][:12]
    assert (here.instructions == "DEFAULT") == (arithmetic == here.numerics_digest)
