"""Datasets in MLflow: Parquet files under the digest of their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.tasks.store.artifacts import file_sha256

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_MAX_DIGEST = 36  # MLflow's limit in characters


@dataclass(frozen=True, kw_only=True)
class LoggedDataset:
    """Dataset in MLflow."""

    name: str
    digest: str


def describe_dataset(path: Path, *, name: str, context: str) -> DatasetInput:
    """Describe a Parquet file as a run's data: SHA-256 of its bytes, columns and row count; ``context``: its use.

    MLflow truncates a digest to 36 characters; the tag ``sha256`` has all.
    """
    import pyarrow.parquet as parquet
    from mlflow.entities import Dataset, DatasetInput, InputTag

    digest = file_sha256(path)
    described = parquet.read_metadata(path)
    columns = [{"name": field.name, "type": str(field.type)} for field in parquet.read_schema(path)]
    dataset = Dataset(
        name=name,
        digest=digest[:_MAX_DIGEST],
        source_type="local",
        source=json.dumps({"uri": path.name}),
        schema=json.dumps({"columns": columns}),
        profile=json.dumps({"num_rows": described.num_rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context), InputTag("sha256", digest)])
