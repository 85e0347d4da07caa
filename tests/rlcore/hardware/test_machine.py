"""The machine that a run computes on: device, precision, digest of its arithmetic, and fast products."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError
from rlcore.hardware import machine
from rlcore.hardware.machine import (
    Machine,
    choose_device_and_dtype,
    fast_dtype_hint,
    find_machine,
    hardware_config_for,
    slow_dtype_warning,
)
from rlcore.hardware.precision import Linear, product, use_onednn
from rlcore.models.lora import linear_names
from tests import strategies

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
def test_cpu_defaults_to_float32(monkeypatch: pytest.MonkeyPatch, has_units: bool) -> None:
    pretend_cards(monkeypatch)
    pretend_units(monkeypatch, are_there=has_units)
    assert choose_device_and_dtype(HardwareConfig()) == (CPU, torch.float32)
    assert choose_device_and_dtype(HardwareConfig(dtype="bfloat16")) == (CPU, torch.bfloat16)
    assert choose_device_and_dtype(HardwareConfig(dtype="float16")) == (CPU, torch.float16)


def test_cuda_defaults_to_bfloat16_and_old_cards_to_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (7, 5))
    assert choose_device_and_dtype(HardwareConfig()) == (torch.device("cuda"), torch.bfloat16)
    assert choose_device_and_dtype(HardwareConfig(device="cuda:1")) == (torch.device("cuda:1"), torch.float16)
    assert choose_device_and_dtype(HardwareConfig(dtype="float32"))[1] == torch.float32
    assert choose_device_and_dtype(HardwareConfig(device="cpu")) == (CPU, torch.float32)


def test_missing_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (9, 0))
    with pytest.raises(ConfigError, match="'cuda:2', but the last CUDA device is cuda:1"):
        find_machine(HardwareConfig(device="cuda:2"))
    pretend_cards(monkeypatch)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="no CUDA device is available"):
            find_machine(HardwareConfig(device=name))


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:01", "cuda:-1", "cpu:0", "cuda:1 "])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be one of 'auto', 'cpu', 'cuda', 'cuda:0'"):
        HardwareConfig(device=name)


def test_machine_depends_on_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, (9, 0), (9, 0), (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    first, second, other = (find_machine(HardwareConfig(device=f"cuda:{number}")) for number in range(3))
    assert first == second == find_machine(HardwareConfig(num_threads=3))
    assert other != first
    assert first == Machine(device="cuda", precision="bfloat16", gpu="NVIDIA H200 (compute capability 9.0)")


def test_auto_and_its_result_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_recorded_machine_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_half_precision_units_are_part_of_half_precision_machines(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_slow_precision_is_named(precision: str, instructions: str, is_slow: bool) -> None:
    found = slow_dtype_warning(Machine(device="cpu", precision=precision, instructions=instructions))
    assert (precision in found) == is_slow
    assert not slow_dtype_warning(Machine(device="cuda", precision=precision))


@pytest.mark.parametrize(("units", "precision"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_unused_units_are_named(units: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: units)
    hint = fast_dtype_hint(Machine(device="cpu", precision=precision, instructions="AVX512"))
    assert bool(hint) == (units and precision == "float32")
    assert not fast_dtype_hint(Machine(device="cuda", precision=precision))


def test_another_instruction_set_is_another_machine() -> None:
    """In a process of its own: torch chooses its instruction set once."""
    script = "from rlcore.hardware.machine import *; print(find_machine(HardwareConfig(device='cpu', num_threads=1)))"
    here = find_machine(HardwareConfig(device="cpu", num_threads=1))
    lowered = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", script], env=lowered, cwd=ROOT, capture_output=True, text=True)
    assert "precision='float32', gpu='', instructions='DEFAULT', threads=1" in done.stdout
    arithmetic = done.stdout.partition("numerics_digest='")[2][:12]
    assert (here.instructions == "DEFAULT") == (arithmetic == here.numerics_digest)


ROUNDING = 1e-5  # of the norm, in float32 and sums of at most 688 numbers


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (drawn(300, 576), drawn(576, 192)),
        (drawn(576, 300).T, drawn(192, 576).T),
        (drawn(300, 1152)[:, ::2], drawn(576, 384)[:, 1::2]),
        (drawn(300, 1).expand(300, 576), drawn(1, 192).expand(576, 192)),
        (drawn(576).expand(300, 576), drawn(576, 192)),
        (drawn(2, 3), drawn(3, 2)),
        (drawn(0, 576), drawn(576, 192)),
    ],
    ids=["rows", "transposed", "strided", "expanded", "one row", "small", "empty"],
)
def test_product_for_every_layout(left: Tensor, right: Tensor) -> None:
    found = product(left, right)
    assert found.shape == (len(left), right.shape[1])
    if len(left):
        assert error(found, left.double() @ right.double()) < ROUNDING


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 256), (2, 150, 256), (1, 256), (256,)])
def test_layer_and_gradients_equal_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = use_onednn(nn.Sequential(nn.Linear(256, 688, bias=bias)))
    assert type(layer[0]) is Linear
    exact = nn.Sequential(nn.Linear(256, 688, bias=bias)).double()
    exact.load_state_dict(layer.state_dict())
    inputs = drawn(*shape).requires_grad_()
    wide = inputs.detach().double().requires_grad_()
    slopes = drawn(*shape[:-1], 688)
    found, wanted = layer(inputs), exact(wide)
    found.backward(slopes)
    wanted.backward(slopes.double())
    assert error(found.detach(), wanted.detach()) < ROUNDING
    pairs = zip((inputs, *layer.parameters()), (wide, *exact.parameters()), strict=True)
    assert all(error(mine.grad, other.grad) < ROUNDING for mine, other in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_use_torch(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(256, 688).to(dtype))
    fast, inputs = use_onednn(copy.deepcopy(layer)), drawn(300, 256).to(dtype)
    assert torch.equal(fast(inputs), layer(inputs))
    single, fast_single = layer.float(), fast.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast_single(inputs.float()), single(inputs.float()))


def test_copied_model_has_own_layers() -> None:
    model = use_onednn(strategies.tiny_llama())
    names, copied = linear_names(model), copy.deepcopy(model)
    assert names == linear_names(strategies.tiny_llama())
    with torch.no_grad():
        copied.model.layers[0].mlp.down_proj.weight.zero_()
    assert float(model.model.layers[0].mlp.down_proj.weight.detach().abs().max()) > 0.0
    assert copied.state_dict().keys() == model.state_dict().keys()


def test_digest_ignores_threads_global_seed_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of the module computes its digest anew, under conditions that must not matter."""
    spec = importlib.util.spec_from_file_location("fresh_machine", machine.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fresh_machine", fresh)
    spec.loader.exec_module(fresh)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.manual_seed(7)
        for dtype in ("float32", "bfloat16"):
            config = HardwareConfig(device="cpu", dtype=dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = fresh.find_machine(config)
            assert found.numerics_digest == find_machine(config).numerics_digest
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
