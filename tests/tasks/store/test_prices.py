from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.tasks.store.prices import Prices, kind_of_machine, prices_path, read_prices
from rlcore.tasks.store.settings import Home

GPU = {"device": "cuda", "gpu": "NVIDIA L4 (compute capability 8.9)"}
EXAMPLE = Path(__file__).parents[3] / "infra" / "prices.toml"


def test_a_machine_is_named_by_its_gpu_and_without_one_is_a_cpu() -> None:
    assert kind_of_machine(GPU) == "NVIDIA L4"
    assert kind_of_machine({"device": "cpu", "gpu": ""}) == kind_of_machine({}) == "cpu"


def test_the_committed_example_is_read_from_the_state_directory(home: Home) -> None:
    assert read_prices(home) == Prices()
    shutil.copy(EXAMPLE, prices_path(home))
    prices = read_prices(home)
    assert prices.of(GPU) == prices.per_hour["NVIDIA L4"]
    assert prices.of({"gpu": "another"}) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("per_hour = {cpu = -1.0}", "per_hour.cpu = -1.0: must be at least"),
        ("price = 1", "price: unknown key"),
        ("per_hour = [", "the price list is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(home: Home, text: str, said: str) -> None:
    prices_path(home).write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        read_prices(home)
    assert raised.value.where == str(prices_path(home))
