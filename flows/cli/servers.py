"""Command that opens the user interfaces."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from rlcore.flows.cli.parameters import open_home


def ui(
    *,
    mlflow_port: Annotated[int, Parameter(help="Port of MLflow: runs, curves, models.")] = 5000,
    prefect_port: Annotated[int, Parameter(help="Port of Prefect: stages and their dependencies.")] = 4200,
) -> int:
    """Open the MLflow and Prefect interfaces over the results; Ctrl-C ends both.

    ```
    rlcore ui --mlflow-port 5001
    ```
    """
    home = open_home(reads=True)
    from rlcore.tasks.operations.ui_servers import serve

    return serve(home, mlflow_port=mlflow_port, prefect_port=prefect_port)
