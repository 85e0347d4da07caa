"""Presets: every committed one is valid, and a wrong one is refused with its file or key before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.cli.app import main
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.keys.plan import order_stages
from tests.flows.micro import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_committed_preset_is_valid_and_its_stages_form_an_order(name: str) -> None:
    config = open_preset(name)
    table = stages(config)
    ordered = [stage.name for stage in order_stages(table, [stage.name for stage in table])]
    assert config.name == name
    assert ordered[0] == "import_sft"
    assert ordered[-1] == "compare"
    assert all(ordered.index(i) < ordered.index(s.name) for s in table for i in s.inputs)


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        open_preset("tinny")


SUMS = "adapter='rlcore.examples.arithmetic:ADAPTER',num_train=8,num_eval=2,max_tokens=88"
OTHER = f"data.other={{contract='prompts',{SUMS}}}"
WRONG = [  # a preset, overrides, and words of the refusal
    ("tiny", ["model.source='ftp'"], "model.source"),
    ("tiny", ["promotion={challenger='grpo',approval='none'}"], "promotion.approval"),
    ("tiny", ["promotion.win_rate=sft"], "promotion.win_rate = 'sft': no stage of the kind win_rate"),
    ("retrain", ["retrain.drift.warn_psi=0.5"], "would never warn"),
    ("retrain", ["retrain.drift.accepted=['abc']"], "at least 12 digits"),
    ("reasoning", ["stages.rejection.num_samples=0"], "stages.rejection.num_samples = 0: must be at least 1"),
    ("reasoning", ["stages.rejection.num_sample=2"], "num_sample: unknown key; did you mean stages.rejection.num_samp"),
    ("reasoning", ["stages.rejection.rewards.0.weigth=2"], "stages.rejection.rewards.0.weigth: unknown key"),
    ("reasoning", ["stages.rejection.sampling.dynamic_sampling_rounds=2"], "dynamic_sampling_rounds is only valid for"),
    ("reasoning", ["stages.grpo_mixed.kl.coefficient=-1.0"], "stages.grpo_mixed.kl.coefficient"),
    ("reasoning", ["without=['stages.sft_kept']"], "stages.grpo_mixed.init_from = 'sft_kept': no such checkpoint"),
    ("win_rate", ["stages.win_rate.baseline=sfd"], "stages.win_rate.baseline = 'sfd': no such checkpoint"),
    ("win_rate", ["stages.win_rate.human_pairs=['prompts']"], "human_pairs = 'prompts': no dataset of human"),
    ("win_rate", ["stages.win_rate.judge={kind='math'}"], "must be 'judge', 'reward_model' or module:function"),
    ("win_rate", ["stages.win_rate.max_unjudged=2.0"], "stages.win_rate.max_unjudged"),
    ("win_rate", ["stages.sft.init_from=win_rate"], "= 'win_rate': this stage makes measurements, no policy"),
    ("distil", ["stages.distil.kl.coefficient=0.0"], "stages.distil.ref_policy = 'grpo': kl.coefficient is 0"),
    ("distil", ["stages.distil.ref_policy=''"], "stages.distil.rewards: names no reward"),
    ("distil", ["stages.distil.kl.apply_to=loss"], "stages.distil.rewards: names no reward"),
    ("rlhf_dpo", ["stages.dpo.beta=0.0"], "stages.dpo.beta"),
    ("rlhf_dpo", ["stages.dpo.label_smoothing=0.5"], "stages.dpo.label_smoothing"),
    ("rlhf_dpo", ["stages.dpo.sampling={max_new_tokens=8}"], "stages.dpo.sampling"),
    (
        "curriculum",
        [OTHER, "stages.grpo.curriculum.pass_rates=sft"],
        "no stage of the kind difficulty; choose one of d",
    ),
    ("curriculum", [OTHER, "stages.grpo.prompts={other=1.0}"], "it samples no prompts of 'other'; add it to stages."),
    (
        "curriculum",
        [OTHER, "stages.grpo.curriculum.min_pass_rate=0.95"],
        "min_pass_rate must not be above max_pass_rate",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "words"), WRONG)
def test_what_a_preset_cannot_mean_is_refused_with_its_key(name: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(name, overrides)
    assert words in caught.value.what


TINY = (FOLDER / "tiny.toml").read_bytes()
REFUSED = {
    "nothing in it": b"",
    "UTF-16": TINY.decode().encode("utf-16"),
    "a NUL at the end": TINY + b"\0",
    "JSON": b'{"name": "x"}',
    "brackets without end": b"x = " + b"[" * 3_000 + b"]" * 3_000,
    "an integer of 6,000 digits": b'extends = "tiny"\nseed = ' + b"9" * 6_000,
    "a weight that no float holds": b'extends = "tiny"\n[stages.grpo]\nlearning_rate = ' + b"9" * 400,
    "a base that is a date": b"extends = 2026-01-01",
    "a base with a NUL": b'extends = "tiny\\u0000"',
    "a base with 5,000 letters": b'extends = "' + b"x" * 5_000 + b'"',
    "a base in another folder": b'extends = "../tiny"',
    "itself": b'extends = "preset"',
    "without, a text": b'extends = "tiny"\nwithout = "stages.ppo"',
    "without, numbers": b'extends = "tiny"\nwithout = [1]',
    "without, below a value": b'extends = "tiny"\nwithout = ["name.x"]',
    "requires, a number": b'extends = "tiny"\nrequires = 7',
    "requires, dates": b'extends = "tiny"\nrequires = [2026-01-01]',
    "stages, a list": b'extends = "tiny"\n[[stages.grpo]]\nname = "x"',
    "data, a date": b'extends = "tiny"\ndata = 2026-01-01',
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_strange_preset_is_refused_with_its_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "preset.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        open_preset(str(path))
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "preset.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TINY.replace(b"\n", b"\r\n"))
    assert open_preset(str(path)) == open_preset("tiny")


@pytest.mark.parametrize("name", ["x" * 5_000, "x" * 5_000 + ".toml", "a\0.toml", "", "."])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such preset or file"):
        open_preset(name)


@pytest.mark.parametrize("override", ["seed=" + "9" * 6_000, "seed=" + "[" * 3_000, "without=1", "requires=1"])
def test_a_strange_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        open_preset("tiny", [override])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[data.prompts]\nadapter = "prompts"\npath = "' + "a" * 5_000 + '"', "File name too long"),
        ('[engine]\nkind = "vllm"\nurls = ["http://[::1"]', "engine.urls"),
        ('[engine]\nkind = "vllm"\nurls = ["http://localhost:port"]', "engine.urls"),
    ],
)
def test_the_plan_names_what_cannot_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    path = tmp_path / "preset.toml"
    path.write_text(f'extends = "tiny"\n{text}\n', encoding="utf-8")
    assert main(["plan", str(path)]) != 0
    assert named in capsys.readouterr().err


def test_a_message_holds_no_codes_of_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "preset.toml"
    path.write_text('extends = "tiny"\nname = "\\u001b[31mred\\u202e"\n', encoding="utf-8")
    assert main(["plan", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[31mred" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
