"""Starting models: what is written is what is read, and what is broken is refused with its reason."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ModelError, StorageError
from rlcore.models.exporting import export_checkpoint
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.rlcore.models.zoo import ARCHITECTURES, make

CPU = torch.device("cpu")
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=64)
SCRATCH = ModelConfig(source="scratch", shape=SHAPE, license="Apache-2.0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    import_model(SCRATCH, folder, seed=3)
    return folder


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint for a test to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


def import_folder(folder: Path, target: Path, **options: Any) -> None:
    import_model(ModelConfig(source="folder", path=str(folder), **options), target, seed=0)


def test_the_card_describes_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    card = import_model(SCRATCH, tmp_path / "model", seed=3)
    # embedding 262 * 32; per layer: q, o 2 * 32 * 32, k, v 2 * 32 * 16, mlp 3 * 32 * 48, norms 2 * 32; last norm 32
    assert card.num_parameters == 262 * 32 + 2 * (2048 + 1024 + 4608 + 64) + 32
    assert (card.vocabulary_size, card.max_positions, card.dtype, card.tied_embeddings) == (262, 64, "float32", True)
    assert (card.source, card.licence, card.architecture) == ("scratch", "Apache-2.0", "LlamaForCausalLM")
    assert card.eos_ids == ChatTokenizer.load(checkpoint).eos_ids == (1,)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert card.weights_sha256 == hashlib.sha256(weights).hexdigest()
    written = json.loads((tmp_path / "model" / "model_card.json").read_text(encoding="utf-8"))
    assert written["weights_sha256"] == card.weights_sha256


def test_one_seed_is_one_model_bit_for_bit_and_draws_from_no_global_state(tmp_path: Path) -> None:
    torch.manual_seed(11)
    first = import_model(SCRATCH, tmp_path / "first", seed=3)
    after = torch.rand(1)
    torch.manual_seed(12)
    again = import_model(SCRATCH, tmp_path / "again", seed=3)
    other = import_model(SCRATCH, tmp_path / "other", seed=4)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(1))


def test_a_scratch_model_starts_close_to_uniform(checkpoint: Path) -> None:
    model = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    logits = model(torch.arange(20)[None]).logits.detach()
    entropy = float(torch.distributions.Categorical(logits=logits).entropy().mean())
    assert entropy == pytest.approx(math.log(262), rel=0.1)


def test_an_imported_folder_has_the_same_weights_and_no_filter_of_the_distribution(
    damaged: Path, tmp_path: Path
) -> None:
    generation = {"eos_token_id": [1, 5], "do_sample": True, "top_p": 0.8, "top_k": 20, "temperature": 0.6}
    (damaged / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    card = import_model(ModelConfig(source="folder", path=str(damaged)), tmp_path / "imported", seed=0)
    assert card.eos_ids == (1, 5)
    assert (
        load_file(tmp_path / "imported" / "model.safetensors").keys() == load_file(damaged / "model.safetensors").keys()
    )
    for name, tensor in load_file(tmp_path / "imported" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(damaged / "model.safetensors")[name])
    written = json.loads((tmp_path / "imported" / "generation_config.json").read_text(encoding="utf-8"))
    assert written["eos_token_id"] == [1, 5]
    assert not {"top_p", "top_k", "temperature", "do_sample"} & written.keys()


def test_tied_embeddings_are_stored_once_and_come_back_tied(checkpoint: Path) -> None:
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    model = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_chat_template_can_come_from_a_file(damaged: Path, tmp_path: Path) -> None:
    template = (damaged / "chat_template.jinja").read_text(encoding="utf-8")
    (damaged / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        import_folder(damaged, tmp_path / "without")
    (tmp_path / "mine.jinja").write_text("{{ 'Mind the sign. ' }}" + template, encoding="utf-8")
    import_folder(damaged, tmp_path / "with", chat_template=str(tmp_path / "mine.jinja"))
    tokenizer = ChatTokenizer.load(tmp_path / "with")
    assert tokenizer.decode(tokenizer.render_prompt([Message(role="user", content="3")])).startswith("Mind the sign. ")


THINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)


def test_arguments_of_a_chat_template_become_a_part_of_the_checkpoint(damaged: Path, tmp_path: Path) -> None:
    """As Qwen3's: without thinking the generation prompt skips it by an empty thought, which is in no demonstration."""
    path = damaged / "chat_template.jinja"
    path.write_text(path.read_text(encoding="utf-8").replace("{% endif %}", f"{THINKING}{{% endif %}}"), "utf-8")
    for name, arguments in (("on", {}), ("off", {"enable_thinking": False})):
        import_folder(damaged, tmp_path / name, chat_template_kwargs=arguments)
    on, off = (ChatTokenizer.load(tmp_path / name) for name in ("on", "off"))
    messages = [Message(role="user", content="3")]
    assert on.decode(on.render_prompt(messages)).endswith("assistant\n")
    prompt_ids, completion_ids = off.render_demonstration(messages, "#### 3")
    assert off.decode(prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert (off.decode(completion_ids), off.prefill) == ("#### 3", "")
    plain = off.hf_tokenizer.apply_chat_template(
        [{"role": "user", "content": "3"}], tokenize=False, enable_thinking=True
    )
    assert "<think>" not in plain  # who serves the model may still ask for the other


def test_an_argument_that_the_chat_template_does_not_know_is_refused(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not use 'enable_thinking'") as caught:
        import_folder(damaged, tmp_path / "imported", chat_template_kwargs={"enable_thinking": False})
    assert caught.value.where == "model.chat_template_kwargs.enable_thinking"


DATED = "{{ 'Today: ' ~ strftime_now('%d %B %Y') ~ '\n' }}"


def dated(folder: Path) -> Path:
    """A model whose template writes today's date, as Llama 3's and SmolLM3's."""
    path = folder / "chat_template.jinja"
    path.write_text(DATED + path.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def first_line(folder: Path) -> str:
    tokenizer = ChatTokenizer.load(folder)
    return tokenizer.spell(tokenizer.render_prompt([Message(role="user", content="3")])).partition("\n")[0]


class Tomorrow(date):
    """The clock of another day."""

    @classmethod
    def today(cls) -> date:
        return date(2031, 2, 3)


def test_a_template_that_asks_for_the_date_writes_the_day_of_the_import_from_then_on(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.models.import_tokenizer.date", Tomorrow)
    import_folder(dated(damaged), tmp_path / "first")
    monkeypatch.undo()
    assert first_line(tmp_path / "first") == "Today: 03 February 2031"
    card = json.loads((tmp_path / "first" / "model_card.json").read_text(encoding="utf-8"))
    assert card["template_date"] == "2031-02-03"
    template = (damaged / "chat_template.jinja").read_bytes()
    assert (tmp_path / "first" / "chat_template.jinja").read_bytes() == template
    import_folder(tmp_path / "first", tmp_path / "again")  # as from a registry, on another day
    assert first_line(tmp_path / "again") == "Today: 03 February 2031"
    import_folder(tmp_path / "first", tmp_path / "named", template_date="2024-02-29")
    assert first_line(tmp_path / "named") == "Today: 29 February 2024"
    export_checkpoint(tmp_path / "first", tmp_path / "exported")
    assert (tmp_path / "exported" / "chat_template.jinja").read_bytes() == template


@pytest.mark.parametrize("asks", ["strftime_now('%d %b %Y')", "'26 Jul 2024'"])
def test_a_date_that_is_a_variable_of_the_template_is_an_argument(asks: str, damaged: Path, tmp_path: Path) -> None:
    """As Llama 3.2's, and 3.1's."""
    path = damaged / "chat_template.jinja"
    said = f"{{% if not date_string is defined %}}{{% set date_string = {asks} %}}{{% endif %}}"
    path.write_text(said + "{{ date_string ~ '\\n' }}" + path.read_text(encoding="utf-8"), encoding="utf-8")
    import_folder(damaged, tmp_path / "imported", chat_template_kwargs={"date_string": "3 May 2026"})
    assert first_line(tmp_path / "imported") == "3 May 2026"


def test_a_date_for_a_template_that_asks_for_none_is_refused(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="writes no date") as caught:
        import_folder(damaged, tmp_path / "imported", template_date="2026-11-25")
    assert caught.value.where == "model.template_date"
    card = import_model(ModelConfig(source="folder", path=str(damaged)), tmp_path / "plain", seed=0)
    assert card.template_date == ""


def base_model(folder: Path) -> Path:
    """As Qwen's base models: the template ends a turn with a token that is not declared to end anything."""
    backend = ChatTokenizer.load(folder).hf_tokenizer
    backend.add_special_tokens({"eos_token": "<|endoftext|>"})
    backend.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([rows, rows[:1]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, changes in (("config.json", {"vocab_size": len(rows) + 1}), ("generation_config.json", {})):
        document = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**document, **changes, "eos_token_id": len(rows)}), encoding="utf-8")
    return folder


def test_a_further_token_ends_completions_where_the_template_writes_one_that_is_not_declared(
    damaged: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"contains no EOS id \(\[262\]\)") as caught:
        import_folder(base_model(damaged), tmp_path / "without")
    assert 'model.extra_eos = ["<|im_end|>"]' in caught.value.fix
    import_folder(damaged, tmp_path / "with", extra_eos=("<|im_end|>",))
    tokenizer = ChatTokenizer.load(tmp_path / "with")
    assert tokenizer.eos_ids == (1, 262)
    assert tokenizer.end_of_turn == (1,)
    assert json.loads((tmp_path / "with" / "generation_config.json").read_text("utf-8"))["eos_token_id"] == [1, 262]


@pytest.mark.parametrize(
    ("text", "reason"), [("<|im_stop|>", "11 tokens"), ("a", "an ordinary token"), ("####", "an ordinary token")]
)
def test_what_is_not_one_control_token_ends_no_completion(
    damaged: Path, tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=f"cannot end a completion: it is {reason}") as caught:
        import_folder(damaged, tmp_path / "imported", extra_eos=(text,))
    assert "<|im_end|>, <|im_start|>" in caught.value.fix


def test_a_folder_without_a_tokenizer_does_not_blame_the_template(damaged: Path, tmp_path: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"the model's folder has no tokenizer\.json") as caught:
        import_folder(damaged, tmp_path / "imported")
    assert "template" not in str(caught.value).replace(str(tmp_path), "")


def test_of_several_chat_templates_the_plain_one_is_kept(damaged: Path, tmp_path: Path) -> None:
    backend = ChatTokenizer.load(damaged).hf_tokenizer
    plain = backend.chat_template
    backend.chat_template = {"default": plain, "tool_use": "{{ 'tools' }}" + plain}
    backend.save_pretrained(damaged)
    import_folder(damaged, tmp_path / "imported")
    assert ChatTokenizer.load(tmp_path / "imported").hf_tokenizer.chat_template == plain


@pytest.mark.parametrize(
    ("model_type", "reason"), [("gemma2", "caps its logits"), ("phi", "adds a bias"), ("lfm2", "")]
)
def test_a_model_that_is_not_computed_is_refused_when_it_is_imported(
    model_type: str, reason: str, damaged: Path, tmp_path: Path
) -> None:
    (architecture,) = [each for each in ARCHITECTURES if each.model_type == model_type]
    model = make(replace(architecture, settings={**architecture.settings, "vocab_size": 262}))
    model.save_pretrained(damaged)
    if not reason:
        import_folder(damaged, tmp_path / "imported")
        return
    with pytest.raises(ModelError, match=reason):
        import_folder(damaged, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reshape_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    added = {name.replace(".1.", ".2."): each.clone() for name, each in weights.items() if ".layers.1." in name}
    save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})


def add_a_bias(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, folder / "model.safetensors", metadata={"format": "pt"})


def name_an_unknown_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(document | {"eos_token_id": [99_999]}), "utf-8")


def split_and_lose_a_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    places = dict.fromkeys(names, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")


def plant_a_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200, 0] = float("nan")  # one logit of 262
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "perceptron-9000"}', encoding="utf-8")


def remove_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (truncate, "cannot be loaded"),
        (damage_header, "cannot be loaded"),
        (drop_a_tensor, r"incomplete.*up_proj"),
        (reshape_a_tensor, "has the shape"),
        (add_a_layer, "does not describe, such as layers.2"),
        (add_a_bias, "does not describe, such as layers.0.self_attn.o_proj.bias"),
        (make_integers, "is of type I8: quantized weights cannot be trained"),
        (name_an_unknown_eos, "eos_token_id must be token ids"),
        (split_and_lose_a_shard, "the index names model-2.safetensors, which is missing"),
        (plant_a_nan, "NaN or infinity"),
        (remove_weights, "no model.safetensors"),
        (only_a_pickle, "no model.safetensors, only pytorch_model.bin"),
        (unknown_architecture, r"^model_type = 'perceptron-9000' in config.json: the installed transformers \d"),
        (remove_configuration, "the folder has no model"),
        (remove_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    damaged: Path, tmp_path: Path, damage: object, complaint: str
) -> None:
    assert callable(damage)
    damage(damaged)
    with pytest.raises(ModelError, match=complaint) as caught:
        import_folder(damaged, tmp_path / "target")
    assert caught.value.where
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("revision", ["", "main", "v1.0", "0123456789abcdef"])
def test_a_hub_revision_that_can_be_moved_is_refused(tmp_path: Path, revision: str) -> None:
    config = ModelConfig(source="hub", path="someone/model", revision=revision)
    with pytest.raises(ModelError, match="is not a commit") as caught:
        import_model(config, tmp_path / "model", seed=0)
    assert caught.value.where == "model.revision"


def test_without_a_network_the_hub_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = ModelConfig(source="hub", path="someone/model", revision="0" * 40)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        import_model(config, tmp_path / "model", seed=0)
    assert "without a network" in caught.value.fix


def test_a_registry_model_must_be_downloaded_first(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be downloaded"):
        import_model(ModelConfig(source="registry", path="models:/tiny/1"), tmp_path / "model", seed=0)


def test_nothing_that_exists_is_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(StorageError, match="exists already"):
        import_model(SCRATCH, tmp_path / "model", seed=0)
    assert list((tmp_path / "model").iterdir()) == []


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(StorageError, match="could not be written"):
        import_model(SCRATCH, tmp_path / "file" / "model", seed=0)
