from __future__ import annotations

from pathlib import Path

from rlcore.data_contracts.gate.reading import source_of
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.data.kind import data_page
from rlcore.tasks.store.storage import write_json
from tests.data_contracts.gate.gating import gate_source


def test_the_page_says_how_many_rows_are_used_over_and_set_aside_and_what_warns(tmp_path: Path) -> None:
    rows = [
        {
            "prompt_id": f"p{number}",
            "messages": [{"role": "user", "content": f"question {number}"}],
            "reference": "1",
            "task": "sums" if number else "",
            "split": "eval" if number == 1 else "train",
        }
        for number in range(8)
    ]
    report = gate_source(source_of("rows.jsonl", rows), "prompts", num_train=4, num_eval=3).report
    write_json(report.to_json(), tmp_path / "report.json")
    page = data_page(Result(preset="mine", stage="prepare_sums", confidence=0.95, data=tmp_path, inputs={}), tmp_path)
    assert page.startswith("**4 for training, 1 held out, 2 unused, 1 quarantined**")
    assert "fewer rows than requested: 4 of 4 for training, 1 of 3 held out" in page
    assert "| must not be blank | 1 |" in page
    assert (tmp_path / "data.md").read_text(encoding="utf-8") == page
