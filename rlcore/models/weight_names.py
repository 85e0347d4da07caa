"""A model's weights by the names of its checkpoint, which are the names that other engines read.

transformers renames and fuses weights in memory: a layer's experts are one tensor there and hundreds in a checkpoint,
and GPT-NeoX's head has another name. Its own conversion, applied backwards as ``save_pretrained`` does, gives the
stored names; here it is applied to one tensor at a time, when that is read, so that no second model is in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlcore.errors import ModelError

_KEPT = 8  # converted tensors whose parts are still read in turns: the projections of one layer


def to_checkpoint_names(state: Mapping[str, torch.Tensor], checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """A whole ``state_dict()`` by the names that ``checkpoint`` stores; the state itself where they agree.

    Raises:
        ModelError: the library's conversion wants several tensors at once.
    """
    model, sources = _layout(checkpoint)
    return (
        state if all(name == source for name, source in sources.items()) else CheckpointNameView(state, model, sources)
    )


class CheckpointNameView(Mapping[str, torch.Tensor]):
    """The tensors of ``state`` by stored names, converted when they are read.

    ``sources``: the name in ``state`` of each stored name. What the layout does not know keeps its name.
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
            while len(self._converted) >= _KEPT:
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
    """The model of a checkpoint without its numbers, and the name in memory of each name that it stores."""
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
            f"the weights of {type(model).__name__} cannot be named one by one as its checkpoint does",
            where=str(checkpoint),
            fix="use sampling.engine.kind = 'native'",
        )
    return model, sources
