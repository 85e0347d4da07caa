"""Folders of foreign models: each fault is refused with its reason, and none hangs or ends in a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlcore.config import ModelConfig
from rlcore.errors import ModelError, RlcoreError
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.models.model_validation import read_config
from rlcore.models.tree_attention import TREE_ATTENTION

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def configure(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def pipe(name: str) -> Callable[[Path], None]:
    """A named pipe in place of a file: whoever opens it waits for a writer."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def many_tensors(folder: Path) -> None:
    count = 100_001
    header = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(count))


def tokenize(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def longer(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def one_more_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name.replace(".1.", ".2."): each.clone() for name, each in tensors.items() if ".layers.1." in name}


def unknown_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(document | {"eos_token_id": [99_999]}), "utf-8")


def missing_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    places = dict.fromkeys(names, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")


def index(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(text, "utf-8")

    return change


UP, OUT = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a million layers": (configure(num_hidden_layers=1_000_000), "num_hidden_layers = 1,000,000"),
    "a million layers by their types": (configure(layer_types=["full_attention"] * 1_000_000), "layer_types"),
    "a million experts": (configure(num_local_experts=1_000_000), "num_local_experts"),
    "a list that its class makes long": (
        configure(model_type="gpt_neo", attention_types=[[["global"], 10**9]]), "attention_types = 1,000,000,000",
    ),
    "a row of 10^18": (configure(hidden_size=10**18), "hidden_size"),
    "more than the files hold": (configure(intermediate_size=2**28), "config.json describes [268435456, 32]"),
    "labels without end": (configure(num_labels=10**9), "num_labels = 1,000,000,000"),
    "very many tensors": (many_tensors, "100,001 tensors"),
    "a token far beyond the others": (tokenize(added_tokens=[{"id": 10**9, "content": "<far>"}]), "id 1,000,000,000"),
    "a far token of a vocabulary": (replace("added_tokens.json", b'{"<far>": 4000000000}'), "id 4,000,000,000"),
    "a normalizer that writes much": (tokenize(normalizer=longer("a" * 10_000)), "10,001 times"),
    "normalizers that grow each other's text": (
        tokenize(normalizer={"type": "Sequence", "normalizers": [longer("a" * 40)] * 4}), "may lengthen a text",
    ),
    "a normalizer that puts much before": (
        tokenize(normalizer={"type": "Prepend", "prepend": "b" * 100_000}), "100,001 times",
    ),
    "weights that are cut": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "cannot be loaded"),
    "weights without a row of layer 1": (weights(lambda tensors: tensors.pop(UP)), "incomplete: the files lack"),
    "a norm of another shape": (
        weights(lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)})), "has the shape",
    ),
    "one more layer": (weights(one_more_layer), "does not describe, such as layers.2"),
    "a bias": (
        weights(lambda tensors: tensors.update({OUT: torch.ones(32)})), f"does not describe, such as {OUT[6:]}",
    ),
    "a quantized weight": (
        weights(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})),
        "is of type I8: quantized weights cannot be trained",
    ),
    "one weight that is no number": (
        weights(lambda tensors: tensors["model.embed_tokens.weight"][200, 0].fill_(torch.nan)), "NaN or infinity",
    ),
    "an end beyond the vocabulary": (unknown_eos, "eos_token_id must be token ids"),
    "a shard that is missing": (missing_shard, "the index names model-2.safetensors, which is missing"),
    "an index whose place is a number": (index('{"weight_map": {"a": 1}}'), "the index of the weights cannot be read"),
    "an index of brackets": (index("[" * 100_000), "the index of the weights cannot be read"),
    "no weights": (remove("model.safetensors"), "no model.safetensors"),
    "weights as pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "no model.safetensors, only pytorch_model.bin",
    ),
    "no configuration": (remove("config.json"), "the folder has no model"),
    "no tokenizer": (remove("tokenizer.json"), "the model's folder has no tokenizer.json"),
    "no heads": (configure(num_attention_heads=0), ""),
    "less than nothing": (configure(hidden_size=-32), ""),
    "words for numbers": (configure(num_hidden_layers="many"), ""),
    "an attention that is not here": (configure(quantization_config={"quant_method": "no such"}), ""),
    "an unknown model": (
        configure(model_type="alchemy"), "model_type = 'alchemy' in config.json: the installed transformers",
    ),
    "code of its own": (
        configure(model_type="alchemy", auto_map={"AutoConfig": "evil.Config"}, architectures=["Evil"]), "",
    ),
    "code of its own for a class without one": (
        configure(model_type="clip", auto_map={"AutoModelForCausalLM": "evil.Model"}), "",
    ),
    "a configuration that is a list": (replace("config.json", b"[]"), ""),
    "a configuration of brackets": (replace("config.json", b"[" * 100_000), ""),
    "a configuration of no text": (replace("config.json", b"\xff\xfe\x00"), ""),
    "weights that are empty": (replace("model.safetensors", b""), ""),
    "weights with a header of 10^18 bytes": (replace("model.safetensors", struct.pack("<Q", 10**18) + b"{"), ""),
    "weights that are text": (replace("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), ""),
    "a pipe as weights": (pipe("model.safetensors"), "not a regular file"),
    "a pipe as more weights": (pipe("model-2.safetensors"), "not a regular file"),
    "a pipe as tokenizer": (pipe("tokenizer.json"), "not a regular file"),
    "a pipe as generation configuration": (pipe("generation_config.json"), "not a regular file"),
    "a device as weights": (link("model.safetensors", "/dev/zero"), "not a regular file"),
    "a link to nowhere": (link("model.safetensors", "/no/such/file"), "cannot be read"),
    "a tokenizer of brackets": (replace("tokenizer.json", b"{" * 1_000), "tokenizer"),
    "a tokenizer of nothing": (replace("tokenizer.json", b"{}"), "tokenizer"),
    "an end that is a word": (replace("generation_config.json", b'{"eos_token_id": "end"}'), ""),
    "no layer": (configure(num_hidden_layers=0), "num_hidden_layers = 0: must be at least 1"),
    "a template of loops": (replace("chat_template.jinja", LOOPS.encode()), "does not end"),
    "a template of a power": (replace("chat_template.jinja", b"{{ 9 ** (9 ** 9) }}"), "does not end"),
    "a template of much text": (replace("chat_template.jinja", b"{{ 'x' * 10 ** 11 }}"), "GiB of memory"),
    "a template of many characters": (replace("chat_template.jinja", b"{{ 'x' * 10 ** 6 }}"), "more than 100,000 char"),
    "a template that divides by zero": (replace("chat_template.jinja", b"{{ 1 / 0 }}"), ""),
    "a template that adds a text to a list": (replace("chat_template.jinja", b"{{ messages + 'x' }}"), ""),
    "a template that looks for a way out": (
        replace("chat_template.jinja", b"{{ ''.__class__.__mro__[1].__subclasses__() }}"), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_with_its_reason(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("rlcore.models.model_validation._TEMPLATE_SECONDS", 0.3)
    change, reason = FAULTS[fault]
    change(damaged)
    with pytest.raises(ModelError) as refused:
        import_model(ModelConfig(source="folder", path=str(damaged)), tmp_path / "imported", seed=0)
    assert reason in str(refused.value)
    assert refused.value.where or not reason
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("name", ["eager", "flash_attention_2", "evil/kernel", "evil/kernel:attention"])
def test_no_configuration_chooses_the_attention(damaged: Path, tmp_path: Path, key: str, name: str) -> None:
    """A name with a slash is a repository, whose code would be fetched and run."""
    configure(**{key: name, "_experts_implementation": "evil/kernel"})(damaged)
    config = read_config(damaged, local_files_only=True)
    assert (config._attn_implementation, config._experts_implementation) == (None, None)
    import_model(ModelConfig(source="folder", path=str(damaged)), tmp_path / "imported", seed=0)
    written = json.loads((tmp_path / "imported" / "config.json").read_text())
    assert not [key for key in written if "implementation" in key]
    model = load_policy(tmp_path / "imported", device=torch.device("cpu"), dtype=torch.float32)
    assert model.config._attn_implementation == TREE_ATTENTION


@pytest.mark.slow  # ten seconds: it imports the configurations of every language model
def test_every_configuration_that_transformers_ships_is_let_through(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    made = 0
    for name in known:
        try:
            CONFIG_MAPPING[name]().save_pretrained(tmp_path / name)
        except Exception:  # noqa: BLE001 - some have no defaults, some need a package that is not here
            continue
        read_config(tmp_path / name, local_files_only=True)
        made += 1
    record_property("hostile", 0)
    record_property("sound", made)
    assert made > 0.9 * len(known)


@pytest.mark.parametrize(
    "key", ["vocab_size_per_layer_input", "rope_theta", "max_position_embeddings", "rotary_emb_base", "bos_token_id"]
)
def test_a_large_number_that_is_no_count_of_layers_is_let_through(damaged: Path, key: str) -> None:
    configure(**{key: 262_144})(damaged)
    assert read_config(damaged, local_files_only=True).num_hidden_layers == 2


FOLDERS = 300
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


@pytest.mark.slow
def test_a_model_folder_with_any_fault_is_imported_or_refused(
    checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", FOLDERS)
    draw, raw, refused = random.Random(14), [], 0
    for number in range(FOLDERS):
        folder = Path(shutil.copytree(checkpoint, tmp_path / f"damaged-{number}"))
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
