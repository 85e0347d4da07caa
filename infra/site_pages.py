"""Generated parts of the pages of docs/: settings, metrics, presets, commands, the library, layouts, sizes, peers.

They are committed, between the lines ``<!-- generated: NAME -->`` and ``<!-- end -->``. A test compares them with the
code, and ``python -m infra.site_pages`` rewrites them.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rlcore
from rlcore.data_contracts.adapters.expressions import parse_columns
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.flows.cli.app import app
from rlcore.flows.presets import FOLDER, open_draft
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.metrics import render
from rlcore.tasks.kinds.rl.kind import need
from rlcore.tasks.presets.graph import named_start
from rlcore.tasks.presets.key_reference import as_markdown, unmarked
from rlcore.tasks.presets.peers import KINDS, PEERS, peer_keys
from rlcore.tasks.steps.memory_need import Device

ROOT = Path(__file__).resolve().parents[1]
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PLACEHOLDERS = {"model.source": "folder", "data.pairs.adapter": "hh"}
_WIDTH = 100  # of a signature on one line


def generate(page: str) -> str:
    """Return a page with the content of its generated parts.

    Raises:
        KeyError: No part has the name of a mark.
    """
    return _PART.sub(lambda mark: f"{mark[1]}\n{PARTS[mark[2]]().strip()}\n\n{mark[3]}", page)


def settings() -> str:
    """Return every section of a preset, without the heading of the page."""
    return re.sub(r"\A# .*\n+", "", as_markdown())


def metrics() -> str:
    """Return every metric and health rule, without the heading of the page."""
    return re.sub(r"\A# .*\n+", "", render())


def commands() -> str:
    """Return each command with its first line and its examples."""
    return "\n\n".join(_command(name) for name in app if not name.startswith("-"))


def _command(name: str) -> str:
    text = inspect.cleandoc(app[name].default_command.__doc__ or "")
    example = re.search(r"^```\n.*?^```", text, re.MULTILINE | re.DOTALL)
    return f"### `rlcore {name}`\n\n{text.splitlines()[0]}" + (f"\n\n{example[0]}" if example else "")


def library() -> str:
    """Return the public names of the library with signatures and first lines."""
    return "\n\n".join(_name(getattr(rlcore, name), name) for name in rlcore.__all__)


def _name(found: Any, name: str) -> str:
    methods = [
        _called(each, f"{name}.{key}")
        for key, each in vars(found).items()
        if inspect.isclass(found) and not key.startswith("_") and inspect.isfunction(each)
    ]
    return f"### `{name}`\n\n{_first(found)}\n\n```python\n" + "\n".join((_called(found, name), *methods)) + "\n```"


def _called(found: Any, name: str) -> str:
    """Return a name with its signature, below the first line of a method."""
    signature = inspect.signature(found)
    given = list(_parameters(each for each in signature.parameters.values() if each.name != "self"))
    result = "" if inspect.isclass(found) else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(given)}){result}"
    if len(line) > _WIDTH:
        line = "\n    ".join((f"{name}(", *(f"{each}," for each in given))) + f"\n){result}"
    return (f"\n# {_first(found)}\n" if "." in name else "") + line


def _parameters(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    is_named = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not is_named:
            is_named = True
            yield "*"
        default = "" if each.default is each.empty else " = " + re.sub(r"<.*>", "…", repr(each.default))
        yield f"{each.name}: {_type(each.annotation)}{default}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.strip("'")


def _first(found: Any) -> str:
    return unmarked((inspect.getdoc(found) or "").split("\n")[0])


def layouts() -> str:
    """Return a line of each layout: its data, adapter, and the columns of each kind of rows."""
    head = ("| data | adapter | rows, and the columns that they read |", "|---|---|---|")
    return "\n".join([*head, *map(_layout, LAYOUTS)])


def _layout(name: str) -> str:
    layout, kinds = LAYOUTS[name], []
    for kind, columns in layout.columns.items():
        paths = [path for each in parse_columns(columns, kind).values() for path in each.columns]
        kinds.append(f"{kind}: {', '.join(f'`{path}`' for path in dict.fromkeys(paths))}")
    return _row(layout.of, f"`{name}`", "; ".join(kinds))


_SHAPES = {  # layers, hidden size, width of keys, feed-forward, vocabulary, number of embedding matrices
    "SmolLM2-135M": (30, 576, 192, 1536, 49152, 1),
    "Qwen2.5-0.5B": (24, 896, 128, 4864, 151936, 1),
    "Qwen2.5-1.5B": (28, 1536, 256, 8960, 151936, 1),
    "Qwen2.5-3B": (36, 2048, 256, 11008, 151936, 1),
    "Qwen2.5-7B": (28, 3584, 512, 18944, 152064, 2),
    "Llama-3.1-8B": (32, 4096, 1024, 14336, 128256, 2),
}
_UPDATE = "stages.grpo.update"
_VLLM = "engine.kind=vllm"
_VARIANTS: Mapping[str, list[str]] = {
    "LoRA, native engine": [],
    "32 completions together": ["stages.grpo.sampling.max_concurrent=32"],
    "LoRA, vLLM elsewhere": [_VLLM],
    "all weights, vLLM elsewhere": [_VLLM, f"{_UPDATE}.lora.rank=0"],
    "the same, 8-bit Adam": [_VLLM, f"{_UPDATE}.lora.rank=0", f"{_UPDATE}.optim.kind=adamw_8bit"],
}


def sizing() -> str:
    """Return the memory that ``rlcore plan`` computes for the preset ``chat`` on a GPU, by shape of the model."""
    device = Device(type="cuda", compute_bytes=2, total=None)
    given = _placeholders(FOLDER / "chat.toml")
    presets = [open_draft("chat", [*given, *lines]).whole for lines in _VARIANTS.values()]
    lines = [_row("shape", *_VARIANTS), "|---" * (1 + len(_VARIANTS)) + "|"]
    for name, shape in _SHAPES.items():
        needs = [need("grpo", config, _size(*shape), device) for config in presets]
        lines.append(_row(name, *(format_bytes(each.peak) for each in needs)))
    return "\n".join(lines)


def _size(layers: int, hidden: int, keys: int, wide: int, vocabulary: int, embeddings: int) -> ModelSize:
    outputs = {"q_proj": hidden, "k_proj": keys, "v_proj": keys, "gate_proj": wide, "up_proj": wide}
    layer = [(name, hidden, width) for name, width in outputs.items()]
    linear = (*layer, ("o_proj", hidden, hidden), ("down_proj", wide, hidden)) * layers
    return ModelSize(
        num_parameters=sum(inputs * width for _, inputs, width in linear) + embeddings * vocabulary * hidden,
        num_layers=layers,
        hidden=hidden,
        keys=keys,
        feed_forward=wide,
        vocabulary=vocabulary,
        linear=linear,
        adaptable=frozenset(name for name, _, _ in linear),
    )


def peers() -> str:
    """Return a table for TRL and one for verl: each key with ours and its default."""
    return "\n\n".join(f"### {title}\n\n" + "\n".join(_peer(name)) for name, title in PEERS.items())


def _peer(peer: str) -> Iterator[str]:
    yield from ("| theirs | ours | default | note |", "|---|---|---|---|")
    for row in (row for row in peer_keys() if row.peer == peer):
        ours = f"`{row.ours}`" if row.ours else f"none; only {' or '.join(map(str, row.only or ())) or 'unset'}"
        defaults = dict.fromkeys(map(str, row.defaults.values()))
        of = "" if peer == "verl" or len(row.trainers) == len(KINDS) else f" ({', '.join(row.trainers)})"
        yield _row(f"`{row.name}`{of}", ours, ", ".join(defaults), row.note)


def presets() -> str:
    """Return a section for each built-in preset: its comment and its stages."""
    return "\n\n".join(_preset(file) for file in sorted(FOLDER.glob("*.toml")))


def _preset(file: Path) -> str:
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").removeprefix(" "))
    table = "\n".join(_stages(open_draft(file.stem, _placeholders(file)).whole.stages))
    return f"## `{file.stem}`\n\n" + "\n".join(comment) + f"\n\n{table}"


def _placeholders(file: Path) -> list[str]:
    required = tomllib.loads(file.read_text(encoding="utf-8")).get("requires", ())
    return [f"{key}={_PLACEHOLDERS.get(key, 'prompts')}" for key in required]


def _stages(stages: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| stage | kind | starts from | data | rewards |", "|---|---|---|---|---|")
    for name, stage in stages.items():
        data: Iterable[str] = getattr(stage, "prompts", None) or getattr(stage, "data", None) or ()
        rewards = dict.fromkeys(term.stage or term.kind for term in getattr(stage.settings, "rewards", ()))
        yield _row(f"`{name}`", stage.kind, f"`{named_start(stage)}`", ", ".join(data), ", ".join(rewards))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": metrics,
    "presets": presets,
    "commands": commands,
    "library": library,
    "layouts": layouts,
    "sizing": sizing,
    "peers": peers,
}

if __name__ == "__main__":
    for path in sorted((ROOT / "docs").rglob("*.md")):
        path.write_text(generate(path.read_text(encoding="utf-8")), encoding="utf-8")
