"""LoRA adapters on one frozen base that policy, critic, reward model and reference policy share.

An :class:`AdaptedModel` is the base with one active adapter. Without an adapter it is the reference, bit for bit.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.extras import install_command
from rlcore.hardware.precision import Linear, at_least_float32, product
from rlcore.hardware.sharded import backbone
from rlcore.models.saving import save_tensors, weights_digest
from rlcore.seeding import generator

if TYPE_CHECKING:
    from jaxtyping import Float

logger = logging.getLogger(__name__)
# peft treats these names as the projections of all experts of a mixture, which are one tensor in memory.
_OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_READ_DIRECTLY = frozenset(("out_proj", "dt_proj"))  # Mamba kernels read these weights directly
_SMALL_FRACTION = 0.5
FOLDER = "adapter"  # subfolder: next to config.json it would be applied again on loading
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of names in peft's files


class AdaptedModel(nn.Module):
    """Model ``base`` with the adapter ``name`` active, or with none if ``name`` is ""; usable as policy or backbone.

    Its parameters are those of its adapter; the base is frozen, shared, and not a submodule. Passes of several models
    may alternate, and a backward pass may follow another's forward pass.
    """

    def __init__(self, base: PreTrainedModel, name: str) -> None:
        super().__init__()
        self._shared = (base,)  # a tuple, so that torch does not register the base's parameters
        self.name = name
        for path, parameter in _parameters(base, name):
            self.register_parameter(path.replace(".", "/"), parameter)

    @property
    def base(self) -> PreTrainedModel:
        return self._shared[0]

    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the base; adapters are at least float32."""
        dtype: torch.dtype = self.base.dtype
        return dtype

    def base_model(self, **inputs: Any) -> Any:
        """Run the backbone with this adapter; named as in transformers."""
        activate(self.base, self.name)
        return backbone(self.base)(**inputs)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head of the base, which has no adapter."""
        head: nn.Module = self.base.get_output_embeddings()
        return head

    def save_pretrained(self, folder: Path) -> None:
        """Write a checkpoint with the adapter merged, and the adapter in peft's format in ``adapter/``."""
        self.base.save_pretrained(folder, state_dict={key: value.cpu() for key, value in MergedState(self).items()})
        self.save_adapter(folder / FOLDER, base_sha256=_digest(self.base))

    def save_adapter(self, folder: Path, **metadata: str) -> None:
        """Write the adapter in peft's format to a new folder, with ``metadata`` in its file."""
        folder.mkdir()
        (folder / CONFIG).write_text(_config_text(self.base.peft_config[self.name]), encoding="utf-8")
        tensors = {_file_key(path, self.name): p.detach().cpu() for path, p in _parameters(self.base, self.name)}
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt", **metadata})

    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape ``(outputs, inputs)`` of every adapted weight, by name."""
        shapes = {path: tuple(parameter.shape) for path, parameter in _parameters(self.base, self.name)}
        down, up = (f".lora_{letter}.{self.name}.weight" for letter in "AB")
        layers = [path.removesuffix(down) for path in shapes if path.endswith(down)]
        return {f"{layer}.weight": (shapes[layer + up][0], shapes[layer + down][1]) for layer in layers}


def add_lora(model: PreTrainedModel | AdaptedModel, config: LoraConfig, name: str, *, seed: int) -> AdaptedModel:
    """Freeze a base, add a new adapter, and return the model that trains it.

    The adapter initially changes nothing: B is 0, and A uniform within ±1/sqrt(inputs), drawn from (seed, name).

    Raises:
        ModelError: peft is missing, or no layer has a target's name.
    """
    base = model.base if isinstance(model, AdaptedModel) else model
    if not config.rank:
        raise ModelError(f"lora.rank must be at least 1, got {config.rank}", where="lora.rank", fix="set lora.rank")
    _inject(base, _peft_config(config, _choose_targets(base, config.targets)), name)
    draws = generator(seed, "adapter", name)
    with torch.no_grad():
        for path, parameter in _parameters(base, name):
            parameter.data = at_least_float32(parameter.data)
            if ".lora_A." in path:
                uniform = torch.rand(parameter.shape, generator=draws) * 2.0 - 1.0
                parameter.copy_(uniform / math.sqrt(parameter.shape[1]))
    adapted = AdaptedModel(base, name)
    _log_coverage(base, sum(outputs * inputs for outputs, inputs in adapted.adapter_shapes().values()))
    return adapted


def load_adapter(model: PreTrainedModel | AdaptedModel, checkpoint: Path, name: str) -> AdaptedModel:
    """Load the adapter of a merged checkpoint onto the base that it was trained on.

    Raises:
        ModelError: There is no adapter, or it was trained on another base.
    """
    from peft import LoraConfig

    base = model.base if isinstance(model, AdaptedModel) else model
    path = checkpoint / FOLDER / WEIGHTS
    if not is_adapter_of(base, checkpoint):
        raise ModelError("adapter of this base not found", where=str(path), fix="train an adapter from this checkpoint")
    _inject(base, LoraConfig.from_pretrained(str(checkpoint / FOLDER)), name)
    with safe_open(path, framework="pt") as stored, torch.no_grad():
        for key, parameter in _parameters(base, name):
            parameter.data = at_least_float32(stored.get_tensor(_file_key(key, name))).to(base.device)
    return AdaptedModel(base, name)


def is_adapter_of(model: PreTrainedModel | AdaptedModel, checkpoint: Path) -> bool:
    """Return True if the checkpoint has an adapter that was trained on exactly this base."""
    base = model.base if isinstance(model, AdaptedModel) else model
    path = checkpoint / FOLDER / WEIGHTS
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as stored:
        return bool((stored.metadata() or {}).get("base_sha256") == _digest(base))


class MergedState(Mapping[str, torch.Tensor]):
    """Weights for an engine or a checkpoint: ``W + alpha / rank * B A`` by W's name, other weights unchanged.

    Merged matrices are at least float32, and computed when read.
    """

    def __init__(self, model: AdaptedModel) -> None:
        self.adapted, self._adapter = model, model.name
        self._layers = dict(model.base.named_modules())
        state = model.base.state_dict()
        self._keys = {key.replace(".base_layer.", "."): key for key in state if ".lora_" not in key}
        self._state = state

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._keys[name]
        weight: torch.Tensor = self._state[key]
        layer = self._layers[key.removesuffix(".base_layer.weight")] if key.endswith(".base_layer.weight") else None
        if layer is None or self._adapter not in layer.lora_A:
            return weight
        merged: torch.Tensor = at_least_float32(weight) + layer.get_delta_weight(self._adapter)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _peft_config(config: LoraConfig, targets: list[str]) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ModelError(f"adapters need peft: {error}", fix=install_command("lora")) from error
    return LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, bias="none", target_modules=targets)


def _config_text(config: Any) -> str:
    """Return peft's settings with sets sorted, whose order differs between processes."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(values | {"inference_mode": True}, indent=2, sort_keys=True) + "\n"


def _inject(base: PreTrainedModel, config: Any, name: str) -> None:
    """Freeze the base and add a new adapter; existing adapters stay trained or frozen."""
    from peft import inject_adapter_in_model

    others = {id(p): p.requires_grad for layer in _layers(base) for p in _all_parameters(layer)}
    # peft draws weights from the global generator, and warns about a second adapter, which is intended.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        try:
            inject_adapter_in_model(config, base, adapter_name=name)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"peft refuses the adapter: {error}", where="lora.targets") from error
    base.requires_grad_(False)
    for layer in _layers(base):
        layer.forward = functools.partial(_forward, layer)  # peft's own takes three times as long
        for parameter in _all_parameters(layer):
            parameter.requires_grad_(others.get(id(parameter), True))


def _forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    linear, names = layer.base_layer, () if layer.disable_adapters else layer.active_adapters
    (name,) = names or ("",)
    if name not in layer.lora_A:
        output: torch.Tensor = linear(inputs)
        return output
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return low_rank_linear(inputs, linear.weight, linear.bias, down, up, layer.scaling[name])


def active_name(base: PreTrainedModel) -> str:
    """Return the name of the active adapter, "" if there is none."""
    layer = next(_layers(base), None) if hasattr(base, "peft_config") else None
    return "" if layer is None or layer.disable_adapters else str(layer.active_adapters[0])


def activate(base: PreTrainedModel, name: str) -> None:
    """Activate the adapter ``name``, or none for ""; ``requires_grad`` flags are unchanged."""
    layers = list(_layers(base))
    if all(layer.disable_adapters if not name else _serves(layer, name) for layer in layers):
        return
    flags = [(p, p.requires_grad) for layer in layers for p in _all_parameters(layer)]
    for layer in layers:
        layer.enable_adapters(bool(name))
        if name:
            layer.set_adapter(name)
    for parameter, learns in flags:  # peft freezes inactive adapters, which would lose the gradient of an earlier pass
        parameter.requires_grad_(learns)


def _serves(layer: Any, name: str) -> bool:
    return not layer.disable_adapters and list(layer.active_adapters) == [name]


def _layers(base: PreTrainedModel) -> Iterator[Any]:
    return (module for module in base.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer"))


def _all_parameters(layer: Any) -> list[nn.Parameter]:
    return [*layer.lora_A.parameters(), *layer.lora_B.parameters()]


def _parameters(base: PreTrainedModel, name: str) -> list[tuple[str, nn.Parameter]]:
    ends = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    return [(path, parameter) for path, parameter in base.named_parameters() if path.endswith(ends)]


def _file_key(path: str, name: str) -> str:
    return _PREFIX + path.replace(f".{name}.weight", ".weight")


def _digest(base: PreTrainedModel) -> str:
    folder = Path(base.config._name_or_path)
    return weights_digest(folder) if base.config._name_or_path and folder.is_dir() else ""


def low_rank_linear(
    inputs: Float[Tensor, "... input"],
    weight: Float[Tensor, "output input"],
    bias: Float[Tensor, "output"] | None,
    down: Float[Tensor, "rank input"],
    up: Float[Tensor, "output rank"],
    scaling: float,
) -> Float[Tensor, "... output"]:
    """Return the layer's output, [..., O], with gradients for ``inputs``, ``down`` and ``up``.

    Products are in the precision of ``weight`` or autocast; under autocast the sum is at least float32, since half
    precision rounds a small addition away.

    ``inputs``: [..., I]. ``weight``: [O, I], frozen, as is ``bias``, [O]. ``down``: A, [rank, I]. ``up``: B, [O, rank].
    ``scaling``: alpha / rank.
    """
    kind = inputs.device.type
    is_wide = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_wide else weight.dtype
    output: Tensor = _LowRankLinear.apply(inputs, weight, bias, down, up, scaling, dtype, is_wide)  # type: ignore[no-untyped-call]
    return output


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
        dtype: torch.dtype,
        is_wide: bool,
    ) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            adapter_dtype = down.dtype
            rows, weight, down, up = (each.to(dtype) for each in (inputs.flatten(0, -2), weight, down, up))
            output = product(rows, weight.T) if bias is None else functional.linear(rows, weight, bias.to(dtype))
            narrow = rows @ down.T  # [N, rank]
            if is_wide:
                output = at_least_float32(output)
            output.addmm_(narrow.to(output), up.T.to(output), alpha=scaling)
        ctx.save_for_backward(rows, weight, down, up, narrow)
        ctx.scaling, ctx.shape, ctx.input_dtype, ctx.adapter_dtype = scaling, inputs.shape, inputs.dtype, adapter_dtype
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, narrow = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2).to(weight.dtype)
        # On a CPU G' Z, with Z of [N, 8], takes eight times as long as Z' G, and G B three times as long as B' G'.
        of_narrow = (up.T.contiguous() @ gradient.T).mul_(ctx.scaling)  # [rank, N]
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(gradient, weight).addmm_(of_narrow.T, down).view(ctx.shape).to(ctx.input_dtype)
        of_down, of_up = of_narrow @ rows, (narrow.T @ gradient).mul_(ctx.scaling).T
        return of_inputs, None, None, of_down.to(ctx.adapter_dtype), of_up.to(ctx.adapter_dtype), None, None, None


def _choose_targets(base: PreTrainedModel, wanted: Collection[str]) -> list[str]:
    """Return the last names of the layers to change: ``wanted``, or all that an adapter can change."""
    known = linear_names(base)
    missing = sorted(set(wanted) - known)
    if not known:
        raise ModelError(
            f"{type(base).__name__} has no linear layer that an adapter can change",
            where="lora.rank",
            fix="train all weights: set lora.rank = 0",
        )
    if missing:
        raise ModelError(
            f"the model has no linear layer {', '.join(missing)} that an adapter can change",
            where="lora.targets",
            fix=f"choose among {', '.join(sorted(known))}",
        )
    return list(wanted) or sorted(known)


def linear_names(base: PreTrainedModel) -> set[str]:
    """Return the last names of the backbone's linear layers that an adapter can change, adapted or not."""
    modules = dict(backbone(base).named_modules())  # type: ignore[attr-defined]  # a module, called as a function
    names = set()
    for path, module in modules.items():
        if (
            isinstance(module, nn.Linear)
            and type(module).forward in (nn.Linear.forward, Linear.forward)
            and ".lora_" not in path
        ):
            names.add(path.removesuffix(".base_layer").rpartition(".")[2])
    if any(_holds_experts(module) for module in modules.values()):
        names -= _OF_EXPERTS
    if any(hasattr(module, "A_log") and hasattr(module, "D") for module in modules.values()):
        names -= _READ_DIRECTLY
    return names


def _log_coverage(base: PreTrainedModel, num_changed: int) -> None:
    """Log the changed fraction of the backbone if it is below one half; ``num_changed`` is in weights."""
    embedding = base.get_input_embeddings().weight.numel()
    total = sum(p.numel() for name, p in backbone(base).named_parameters() if ".lora_" not in name)  # type: ignore[attr-defined]
    fraction = num_changed / max(1, total - embedding)
    if fraction < _SMALL_FRACTION:
        experts = " Experts are not changed." if any(map(_holds_experts, base.modules())) else ""
        logger.warning("the adapter changes only %.0f %% of the layers' weights.%s", 100 * fraction, experts)


def _holds_experts(module: nn.Module) -> bool:
    return any(
        p.ndim == 3 and name in ("gate_up_proj", "up_proj", "down_proj")
        for name, p in module.named_parameters(recurse=False)
    )
