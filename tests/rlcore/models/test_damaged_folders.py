"""Model folders with a random fault each: an import succeeds or is refused with a reason, and nothing else happens."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import RlcoreError
from rlcore.models.importing import import_model

pytestmark = pytest.mark.slow
FOLDERS = 300
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=64)
STRANGE: tuple[Any, ...] = (
    *(0, -1, 1, 3, 10**6, 10**12, 2.5, 1e400),
    *("x", "", "evil/kernel", None, True),
    *([], {}, [[]], {"": 1}),
)


def damage(folder: Path, draw: random.Random) -> str:
    """Change a value of a JSON file, some bytes of any file, or its length; describe the change."""
    path = draw.choice(sorted(each for each in folder.iterdir() if each.is_file()))
    if path.suffix == ".json" and draw.random() < 0.6:
        values = json.loads(path.read_text())
        name, value = draw.choice(sorted(values)), draw.choice(STRANGE)
        path.write_text(json.dumps(values | {name: value}))
        return f"{path.name}: {name} = {value!r}"
    content = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        del content[draw.randrange(len(content)) :]
        path.write_bytes(content)
        return f"{path.name}: cut to {len(content)} bytes"
    for _ in range(draw.randint(1, 20)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    return f"{path.name}: some bytes"


def test_a_model_folder_with_any_fault_is_imported_or_refused(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", FOLDERS)
    sound = tmp_path / "sound"
    import_model(ModelConfig(source="scratch", shape=SHAPE, license="Apache-2.0"), sound, seed=3)
    draw, raw, refused = random.Random(14), [], 0
    for number in range(FOLDERS):
        folder = Path(shutil.copytree(sound, tmp_path / f"damaged-{number}"))
        said = damage(folder, draw)
        try:
            import_model(ModelConfig(source="folder", path=str(folder)), tmp_path / f"imported-{number}", seed=0)
        except RlcoreError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - which is what is looked for
            raw.append(f"{said}: {type(error).__name__}: {error}")
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / f"imported-{number}", ignore_errors=True)
    assert not raw, "\n".join(raw)
    assert refused > FOLDERS // 4
