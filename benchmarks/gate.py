"""Throughput and memory of the data gate on prompts, from a file to a snapshot. Prints a Markdown table.

    python -m benchmarks.gate [--rows 200000 1000000] [--shared-words warn quarantine]

The rows of seeded words are as long as those of GSM8K, and all kept, which is the most work for the gate. Each line is
its own process with its peak of resident memory; ``base`` is its memory before it reads a row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from benchmarks.report import processor, table

MIB = 2**20
NUM_WORDS, WORDS_A_ROW = 20_000, 45
HEAD = ("n-gram overlap", "rows", "CPU s", "rows per CPU s", "base MiB", "peak MiB", "bytes a row above base")


def main() -> None:
    """Measure each size in its own process, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000])
    parser.add_argument("--shared-words", nargs="+", default=["warn"], choices=("warn", "quarantine"))
    parser.add_argument("--here", action="store_true", help="internal: measure here and print one line of JSON")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.rows[0], given.shared_words[0])))
        return
    rows = [_row(*each) for each in product(given.shared_words, given.rows)]
    print(f"{processor()}, one thread; rows as the gate keeps them\n\n{table(HEAD, rows)}")


def _row(shared_words: str, rows: int) -> tuple[str, ...]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = ["--here", "--rows", str(rows), "--shared-words", shared_words]
    command = [sys.executable, "-m", "benchmarks.gate", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    seconds, base, peak = json.loads(done.stdout.splitlines()[-1])
    speed = (f"{seconds:,.1f}", f"{rows / seconds:,.0f}")
    memory = (f"{base / MIB:,.0f}", f"{peak / MIB:,.0f}", f"{(peak - base) / rows:,.0f}")
    return (shared_words, f"{rows:,}", *speed, *memory)


def measure(rows: int, shared_words: str) -> tuple[float, float, float]:
    """Measure processor seconds, and bytes of memory before and at the peak, of one gate over ``rows`` rows."""
    from rlcore.tasks.kinds.data.step import token_meter
    from rlcore.tasks.presets.data import ComparisonConfig, DatasetConfig
    from rlcore.tasks.steps.data import prepare_dataset
    from rlcore.text.tokenization import ChatTokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in make_rows(rows))
        make_tokenizer(folder / "tokenizer")
        view = token_meter(ChatTokenizer.load(folder / "tokenizer"))
        config = DatasetConfig(
            contract="prompts",
            adapter="prompts",
            path=str(folder / "rows.jsonl"),
            num_train=rows,
            num_eval=max(1, rows // 100),
            max_tokens=1024,
            comparison=ComparisonConfig(ngram_overlap=shared_words),  # type: ignore[arg-type]
        )
        base, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.process_time()
        report = prepare_dataset(config, seed=0, tokens=view, folder=folder / "snapshot")
        seconds = time.process_time() - started
    assert report.accepted == rows
    return seconds, base, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_rows(count: int) -> Iterator[dict[str, object]]:
    """Generate different prompts of seeded words: English letters, Zipf's law as in text."""
    rng, letters = random.Random(0), "etaoinshrdlucmfwypvbgk"
    found = {"".join(rng.choices(letters, weights=range(22, 0, -1), k=rng.randint(2, 9))) for _ in range(NUM_WORDS * 2)}
    words = sorted(found)[:NUM_WORDS]
    totals = list(accumulate(1 / (place + 5) for place in range(len(words))))

    def text(length: int) -> str:
        return " ".join(rng.choices(words, cum_weights=totals, k=length))

    for number in range(count):
        messages = [{"role": "user", "content": f"{text(WORDS_A_ROW)} {rng.randint(2, 99)}, {text(5)}?"}]
        yield {"prompt_id": f"p{number}", "messages": messages, "reference": str(number), "task": "words"}


def make_tokenizer(folder: Path) -> None:
    """Make a BPE tokenizer of 8,000 tokens with the template of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from rlcore.models.scratch import CHAT_TEMPLATE, TURN_END, TURN_START

    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings: dict[str, Any] = {
        "special_tokens": [TURN_START, TURN_END],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    trainer = trainers.BpeTrainer(vocab_size=8_000, **settings)
    tokenizer.train_from_iterator((str(row["messages"]) for row in make_rows(2_000)), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=TURN_END)
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)


if __name__ == "__main__":
    main()
