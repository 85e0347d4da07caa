"""The report of a micro run: all that it promises, nothing from outside, no way for a model to write HTML."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

from rlcore.tasks.presets.run import RunConfig, load_preset
from rlcore.tasks.report import run_page as report
from rlcore.tasks.report.summary import summarise
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, read_table, write_table
from tests.flows.conftest import ROOT, run_flows, states_of
from tests.flows.homes import folder

ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the text outside of the style sheet."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def refs_of(home: Path) -> dict[str, ArtifactRef]:
    cache = StageCache(home / "cache")
    return {
        stage.name: record.ref
        for stage in sorted((home / "cache").iterdir())
        for record in cache.records(stage.name)[:1]
    }


def page_of(home: Path, folders: dict[str, Path] | None = None, *overrides: str) -> str:
    config: RunConfig = load_preset(ROOT / "flows" / "presets" / "tiny.toml", overrides)
    refs = refs_of(home)
    lines = [
        report.StageLine(
            name=name,
            was_run=True,
            sha256=ref.sha256,
            seconds=60.0,
            tokens=None,
            memory_gib=None,
            cost=None,
            versions={},
        )
        for name, ref in refs.items()
    ]
    places = {name: home / ref.uri for name, ref in refs.items()} | (folders or {})
    return report.render(config, refs, places, lines, started="2026-01-02T03:04:05")


def traces(home: Path) -> set[str]:
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        return {row[0] for row in database.execute("SELECT request_id FROM trace_info")}


def test_the_next_start_mends_a_damaged_result_and_lost_traces_and_prices_its_report(
    micro_home: Path, tmp_path: Path
) -> None:
    home = Path(shutil.copytree(micro_home, tmp_path / "home"))
    weights = folder(home, "sft") / "model" / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    before, reports = traces(home), set(home.glob("reports/*/report.html"))
    assert len(before) >= 10
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        database.execute("PRAGMA foreign_keys = ON")
        lost = [(each,) for each in sorted(before)[::2]]
        database.executemany("DELETE FROM trace_info WHERE request_id = ?", lost)
    assert len(traces(home)) == len(before) - len(lost)
    (home / "prices.toml").write_text('currency = "EUR"\n[per_hour]\ncpu = 3600.0\n')

    assert states_of(run_flows("plan", home).stdout)["sft"] == "run"
    done = run_flows("run", home)
    assert done.returncode == 0, done.stderr
    assert weights.read_bytes() == intact
    assert before <= traces(home)
    assert set(states_of(run_flows("plan", home).stdout).values()) == {"cached"}
    (page,) = set(home.glob("reports/*/report.html")) - reports
    rows = [cells for cells in cells_of(page.read_text()) if cells[0] == "grpo" and len(cells) == 7]
    (record,) = StageCache(home / "cache").records("grpo")
    assert [float(cells[5]) for cells in rows] == [round(record.seconds, 4)]


def report_of(home: Path) -> Path:
    return min((home / "reports").glob("*/report.html"), key=lambda path: path.stat().st_mtime)


def test_a_finished_run_leaves_its_report_in_the_home_and_in_mlflow(micro_home: Path) -> None:
    page = report_of(micro_home)
    # Runs in copies of this home log their artifacts here too: MLflow's records hold the folder's whole path.
    (copy,) = (micro_home / "mlartifacts").glob(f"*/{page.parent.name}/artifacts/report/report.html")
    assert page.read_bytes() == copy.read_bytes()
    text = parsed(page.read_text()).text
    for word in ("grpo and ppo", "Comparison", "Health", "Reward terms", "mended", "Data", "prompts/v1", "cached"):
        assert word in text, word
    assert "USD" not in text  # no price, no cost


def test_the_report_says_model_rewards_settings_machine_and_the_command_that_makes_the_run(micro_home: Path) -> None:
    tags = parsed(report_of(micro_home).read_text())
    for words in (
        "rlcore run tiny --set hardware.num_threads=1",
        "a new Llama",
        "LlamaForCausalLM, 2 layers of width 64",
        "million, F32",
        "1 × math (evaluated_only = True) + 0.1 × reward_model",
        "settings that differ from the preset tiny",
        "stages.grpo.num_iterations",
        "formatted",
        "calibration error",
        "quarantined",
        "The curve of held-out accuracy covers the first 8 held-out problems at most",
    ):
        assert words in tags.text, words
    explained = [attributes["title"] for tag, attributes in tags.found if tag == "abbr"]
    assert len(explained) > 10 and all(text and "Formula: " in text for text in explained)


def test_every_accuracy_stands_with_its_number_of_problems(micro_home: Path) -> None:
    text = " ".join(parsed(report_of(micro_home).read_text()).text.split())
    assert text.count("accuracy on 40 held-out problems") == 4  # base, SFT, GRPO, PPO
    assert "Accuracies on 8 held-out problems" in text
    assert "of 32 held-out pairs" in text


def test_the_run_in_mlflow_has_the_table_as_its_description_and_the_accuracies_as_metrics(micro_home: Path) -> None:
    page = report_of(micro_home)
    with closing(sqlite3.connect(micro_home / "mlflow.db")) as database:
        query = "SELECT value FROM tags WHERE run_uuid = ? AND key = 'mlflow.note.content'"
        ((note,),) = database.execute(query, (page.parent.name,)).fetchall()
        rows = database.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (page.parent.name,))
        metrics = dict(rows.fetchall())
    assert "| grpo | " in note and "greedy accuracy" in note and "[results of this preset](#/" in note
    assert str(page.relative_to(micro_home)) in note and "rlcore run tiny" in note
    assert page.parent.name in page.read_text()  # the link the other way
    summary = read_json(micro_home / refs_of(micro_home)["evaluate_grpo"].uri / "summary.json")
    assert metrics["accuracy/grpo"] == summary["eval/accuracy"]
    assert metrics["problems/grpo"] == 40.0


def test_the_terminal_ends_with_the_shape_of_the_rollouts_and_where_everything_lies(micro_home: Path) -> None:
    refs = refs_of(micro_home)
    config = load_preset(ROOT / "flows" / "presets" / "tiny.toml")
    lines = summarise(Home(root=micro_home), config.name, refs, seconds=1.0).splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("first -> last iteration")]
    assert lines[head].split()[-2:] == ["truncated", "formatted"]
    assert re.fullmatch(r"grpo +-?[\d.]+ -> -?[\d.]+ +[\d.]+% -> [\d.]+% +[\d.]+% -> [\d.]+%", lines[head + 1])
    models = [line.split()[-1] for line in lines if line.startswith("model ")]
    assert len(models) == 5 and all((Path(path) / "config.json").is_file() for path in models)
    assert not [line for line in lines if line.startswith("report ")]  # another process wrote those that are there
    output = [line for line in lines if line and not line.startswith(("|", " "))]
    assert len(output) == len(set(output))  # nothing twice
    notices = r"\w+ (solves \d+ points (more|fewer) than|is not told apart from) \w+.* \[.*\]"
    assert [bool(re.fullmatch(notices, line)) for line in lines[-4:]] == [False, True, True, True]  # sft, grpo, ppo


def test_the_report_needs_nothing_from_outside(micro_home: Path) -> None:
    page = page_of(micro_home)
    tags = parsed(page).found
    assert not [tag for tag, _ in tags if tag in {"script", "link", "img", "iframe", "object", "embed", "base"}]
    assert not [name for _, attributes in tags for name in attributes if name == "src" or name.startswith("on")]
    assert not [
        place for _, attributes in tags if (place := attributes.get("href")) is not None and not place.startswith("#")
    ]
    assert not re.findall(r"url\(|@import|https?://", page)


def test_what_a_model_wrote_is_text(micro_home: Path, tmp_path: Path) -> None:
    refs = refs_of(micro_home)
    folders = {}
    for name in ("evaluate_sft", "evaluate_grpo"):
        folders[name] = tmp_path / name
        shutil.copytree(micro_home / refs[name].uri, folders[name])
        table = read_table(folders[name] / "answers.parquet")
        table["completion"] = [f"{ATTACK} {name}" for _ in range(len(table))]
        write_table(table, folders[name] / "answers.parquet")
    folders["grpo"] = tmp_path / "grpo"
    shutil.copytree(micro_home / refs["grpo"].uri, folders["grpo"])
    for path in (folders["grpo"] / "rollouts").glob("*.parquet"):
        table = read_table(path)
        table["text"], table["prompt"] = ATTACK, ATTACK
        write_table(table, path)
    page = page_of(micro_home, folders)
    assert "<script" not in page and "<img" not in page
    assert parsed(page).text.count("alert(1)") >= 6


def cells_of(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] or [""] for row in rows]


def test_the_costs_of_stages_add_up() -> None:
    lines = [
        report.StageLine(
            name=name, was_run=True, sha256="0", seconds=1800.0, tokens=None, memory_gib=1.0, cost=0.5, versions={}
        )
        for name in ("a", "b")
    ]
    assert report.totals(lines) == {
        "run_seconds": 3600.0, "seconds": 3600.0, "tokens": 0.0, "memory_gib": 1.0, "cost": 1.0
    }  # fmt: skip
