"""LoRA adapters on one frozen base that several models share: policy, critic, reward model, and the bare base itself.

An :class:`AdaptedModel` is the base as seen with one adapter on, or with none: then it is the reference, bit for bit.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.hardware.precision import at_least_float32
from rlcore.models.adapter_targets import choose_targets, log_coverage
from rlcore.models.architectures import backbone
from rlcore.models.low_rank import low_rank_linear
from rlcore.models.saving import save_tensors, weights_digest
from rlcore.seeding import generator

FOLDER = "adapter"  # below a checkpoint: beside config.json it would be applied a second time on loading
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names in peft's files


class AdaptedModel(nn.Module):
    """``base`` with the adapter ``name`` on; with the name ``""`` every adapter is off.

    Use it as a policy or a backbone. Its parameters are those of its adapter alone: the base is frozen,
    shared with other adapted models, and no submodule. Calling it sets the base's adapters, so passes of several
    models may alternate, and a backward pass may come after another model's forward pass.
    """

    def __init__(self, base: PreTrainedModel, name: str) -> None:
        super().__init__()
        self._shared = (base,)  # a tuple, so that torch does not count the base's parameters as ours
        self.name = name
        for path, parameter in _parameters(base, name):
            self.register_parameter(path.replace(".", "/"), parameter)

    @property
    def base(self) -> PreTrainedModel:
        """The frozen model below."""
        return self._shared[0]

    @property
    def config(self) -> Any:
        """The architecture, that of the base."""
        return self.base.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.base.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the base; adapters are at least float32."""
        dtype: torch.dtype = self.base.dtype
        return dtype

    def base_model(self, **inputs: Any) -> Any:
        """The backbone's forward pass with this adapter; the name is that of transformers' models."""
        activate(self.base, self.name)
        return backbone(self.base)(**inputs)

    def get_output_embeddings(self) -> nn.Module:
        """The head of the base, which has no adapter."""
        head: nn.Module = self.base.get_output_embeddings()
        return head

    def save_pretrained(self, folder: Path) -> None:
        """A whole checkpoint with the adapter merged in, and the adapter itself in peft's format in ``adapter/``."""
        self.base.save_pretrained(folder, state_dict={key: value.cpu() for key, value in MergedState(self).items()})
        self.save_adapter(folder / FOLDER, base_sha256=_digest(self.base))

    def save_adapter(self, folder: Path, **metadata: str) -> None:
        """The adapter alone in peft's format, in a new folder; ``metadata`` stands in its file."""
        folder.mkdir()
        (folder / CONFIG).write_text(_config_text(self.base.peft_config[self.name]), encoding="utf-8")
        tensors = {_file_key(path, self.name): p.detach().cpu() for path, p in _parameters(self.base, self.name)}
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt", **metadata})

    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape ``(outputs, inputs)`` of every weight that the adapter changes, by the weight's name."""
        shapes = {path: tuple(parameter.shape) for path, parameter in _parameters(self.base, self.name)}
        down, up = (f".lora_{letter}.{self.name}.weight" for letter in "AB")
        layers = [path.removesuffix(down) for path in shapes if path.endswith(down)]
        return {f"{layer}.weight": (shapes[layer + up][0], shapes[layer + down][1]) for layer in layers}


def add_lora(model: PreTrainedModel | AdaptedModel, config: LoraConfig, name: str, *, seed: int) -> AdaptedModel:
    """Put a new adapter on a base, which is frozen, and return the model that learns it.

    It changes nothing at first: B is 0, and A uniform within ±1/sqrt(inputs), drawn from (seed, name).

    Raises:
        ModelError: peft is missing, or no layer has one of the targets' names.
    """
    base = model.base if isinstance(model, AdaptedModel) else model
    if not config.rank:
        raise ModelError(f"lora.rank must be at least 1, got {config.rank}", where="lora.rank", fix="set lora.rank")
    _inject(base, _peft_config(config, choose_targets(base, config.targets)), name)
    draws = generator(seed, "adapter", name)
    with torch.no_grad():
        for path, parameter in _parameters(base, name):
            parameter.data = at_least_float32(parameter.data)
            if ".lora_A." in path:
                uniform = torch.rand(parameter.shape, generator=draws) * 2.0 - 1.0
                parameter.copy_(uniform / math.sqrt(parameter.shape[1]))
    adapted = AdaptedModel(base, name)
    log_coverage(base, sum(outputs * inputs for outputs, inputs in adapted.adapter_shapes().values()))
    return adapted


def load_adapter(model: PreTrainedModel | AdaptedModel, checkpoint: Path, name: str) -> AdaptedModel:
    """The adapter that lies beside a merged checkpoint, on the base that it was trained on.

    Raises:
        ModelError: there is none, or it was trained on another base.
    """
    from peft import LoraConfig

    base = model.base if isinstance(model, AdaptedModel) else model
    path = checkpoint / FOLDER / WEIGHTS
    if not is_adapter_of(base, checkpoint):
        raise ModelError(
            "there is no adapter of this base", where=str(path), fix="train it with an adapter from this checkpoint"
        )
    _inject(base, LoraConfig.from_pretrained(str(checkpoint / FOLDER)), name)
    with safe_open(path, framework="pt") as stored, torch.no_grad():
        for key, parameter in _parameters(base, name):
            parameter.data = at_least_float32(stored.get_tensor(_file_key(key, name))).to(base.device)
    return AdaptedModel(base, name)


def is_adapter_of(model: PreTrainedModel | AdaptedModel, checkpoint: Path) -> bool:
    """Whether an adapter lies beside a checkpoint that was trained on exactly this base."""
    base = model.base if isinstance(model, AdaptedModel) else model
    path = checkpoint / FOLDER / WEIGHTS
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as stored:
        return bool((stored.metadata() or {}).get("base_sha256") == _digest(base))


class MergedState(Mapping[str, torch.Tensor]):
    """The weights that an engine or a checkpoint needs: ``W + alpha / rank * B A`` by W's name, the others as they are.

    A merged matrix is at least float32. Each is made when it is read and not kept, so that a sync needs no second model
    in memory. ``adapted`` is the model itself, for those who can do with the adapter alone.
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
        raise ModelError(f"adapters need peft: {error}", fix="pip install 'rlcore[lora]'") from error
    return LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, bias="none", target_modules=targets)


def _config_text(config: Any) -> str:
    """The adapter's settings as peft writes them, but sorted: sets have another order in every process."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(values | {"inference_mode": True}, indent=2, sort_keys=True) + "\n"


def _inject(base: PreTrainedModel, config: Any, name: str) -> None:
    """Add the layers of a new adapter; the base is frozen, adapters that are there keep learning or not as before."""
    from peft import inject_adapter_in_model

    others = {id(p): p.requires_grad for layer in _layers(base) for p in _all_parameters(layer)}
    # peft draws weights of its own from the global generator, and warns of a second adapter, which is meant.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        try:
            inject_adapter_in_model(config, base, adapter_name=name)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"peft refuses the adapter: {error}", where="lora.targets") from error
    base.requires_grad_(False)
    for layer in _layers(base):
        layer.forward = functools.partial(_forward, layer)  # peft's own takes three times as long for the same
        for parameter in _all_parameters(layer):
            parameter.requires_grad_(others.get(id(parameter), True))


def _forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What a layer computes with the adapter that is on, or as the base's own."""
    linear, names = layer.base_layer, () if layer.disable_adapters else layer.active_adapters
    (name,) = names or ("",)
    if name not in layer.lora_A:
        output: torch.Tensor = linear(inputs)
        return output
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return low_rank_linear(inputs, linear.weight, linear.bias, down, up, layer.scaling[name])


def active_name(base: PreTrainedModel) -> str:
    """The adapter that is on; ``""`` where none is, or there are none."""
    layer = next(_layers(base), None) if hasattr(base, "peft_config") else None
    return "" if layer is None or layer.disable_adapters else str(layer.active_adapters[0])


def activate(base: PreTrainedModel, name: str) -> None:
    """Turn the adapter ``name`` on, or for ``""`` every one off; what learns stays what it was."""
    layers = list(_layers(base))
    if all(layer.disable_adapters if not name else _serves(layer, name) for layer in layers):
        return
    flags = [(p, p.requires_grad) for layer in layers for p in _all_parameters(layer)]
    for layer in layers:
        layer.enable_adapters(bool(name))
        if name:
            layer.set_adapter(name)
    for parameter, learns in flags:  # peft freezes what is off, and would lose the gradient of an earlier pass
        parameter.requires_grad_(learns)


def _serves(layer: Any, name: str) -> bool:
    return not layer.disable_adapters and list(layer.active_adapters) == [name]


def _layers(base: PreTrainedModel) -> Iterator[Any]:
    """The layers that carry adapters."""
    return (module for module in base.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer"))


def _all_parameters(layer: Any) -> list[nn.Parameter]:
    return [*layer.lora_A.parameters(), *layer.lora_B.parameters()]


def _parameters(base: PreTrainedModel, name: str) -> list[tuple[str, nn.Parameter]]:
    ends = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    return [(path, parameter) for path, parameter in base.named_parameters() if path.endswith(ends)]


def _file_key(path: str, name: str) -> str:
    return _PREFIX + path.replace(f".{name}.weight", ".weight")


def _digest(base: PreTrainedModel) -> str:
    """Of the checkpoint that the base was loaded from; empty for one made in memory."""
    folder = Path(base.config._name_or_path)
    return weights_digest(folder) if base.config._name_or_path and folder.is_dir() else ""
