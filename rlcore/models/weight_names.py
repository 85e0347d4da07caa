"""Weights of a model by the names in its checkpoint, which other engines read.

transformers renames and fuses weights in memory: the experts of a layer are one tensor in memory and hundreds in a
checkpoint, and GPT-NeoX's head has another name. Its reversed conversion gives the stored names, here for one tensor at
a time, so that no second model is in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlcore.errors import ModelError

_CACHED = 8  # converted tensors to keep: the projections of one layer are read alternately


def to_checkpoint_names(state: Mapping[str, torch.Tensor], checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Map a complete ``state_dict()`` to the names in ``checkpoint``; returns it unchanged if the names agree.

    Raises:
        ModelError: The library's conversion needs several tensors together.
    """
    model, sources = _layout(checkpoint)
    return (
        state if all(name == source for name, source in sources.items()) else CheckpointNameView(state, model, sources)
    )


class CheckpointNameView(Mapping[str, torch.Tensor]):
    """Tensors of ``state`` by stored names, converted when they are read.

    ``sources``: name in ``state`` by stored name.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], model: PreTrainedModel, sources: Mapping[str, str]) -> None:
        used = set(sources.values())
        self._state, self._model = state, model
        self._sources = {name: source for name, source in sources.items() if source in state}
        self._sources |= {name: name for name in state if name not in used}
        self._converted: dict[str, dict[str, torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        if source not in self._converted:
            while len(self._converted) >= _CACHED:
                del self._converted[next(iter(self._converted))]
            self._converted[source] = _convert(self._model, source, self._state[source])
        return self._converted[source][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _convert(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: tensor})
    return converted


@functools.lru_cache(maxsize=4)
def _layout(checkpoint: Path) -> tuple[PreTrainedModel, Mapping[str, str]]:
    """Return a checkpoint's model without weights, and its name in memory by stored name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    whole = revert_weight_conversion(model, state)
    parts = {name: _convert(model, name, tensor) for name, tensor in state.items()}
    sources = {stored: name for name, converted in parts.items() for stored in converted}
    if sources.keys() != whole.keys() or any(
        whole[stored].shape != parts[name][stored].shape for stored, name in sources.items()
    ):
        raise ModelError(
            f"the weights of {type(model).__name__} cannot be converted to checkpoint names one by one",
            where=str(checkpoint),
            fix="use sampling.engine.kind = 'native'",
        )
    return model, sources
