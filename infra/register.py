"""Registration of the work pool, deployments, queue limits and automations on a Prefect server.

Run ``python infra/register.py`` with ``PREFECT_API_URL`` set; a second run changes nothing. In containers this is the
job ``deployments``. ``WORK_POOL_TYPE=kubernetes`` fills the pool's template from ``RUN_IMAGE``, ``RUN_NAMESPACE``,
``RUN_GPUS`` and the other variables in ``SETTINGS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
POOL = "rlcore"
# Environment variable to the template's variable whose default it sets; a deployment's `job_variables` override it.
SETTINGS: Mapping[str, str] = {
    "RUN_IMAGE": "image",
    "RUN_NAMESPACE": "namespace",
    "RUN_SERVICE_ACCOUNT": "service_account_name",
    "RUN_GPUS": "gpu_count",
    "RUN_CPU": "cpu_request",
    "RUN_MEMORY": "memory_request",
    "RUN_VOLUME_CLAIM": "volume_claim",
}


def main() -> int:
    """Register everything; return the exit code of the first step that fails."""
    kind = os.environ.get("WORK_POOL_TYPE") or "process"
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.json"
        options: list[str] = []
        if kind == "kubernetes":
            template.write_text(json.dumps(job_template(os.environ)), encoding="utf-8")
            options = ["--base-job-template", str(template)]
        steps = (
            ("prefect", "--no-prompt", "work-pool", "create", POOL, "--type", kind, "--overwrite", *options),
            ("infra.services", "tell"),
        )
        for step in steps:
            code = subprocess.run([sys.executable, "-m", *step], cwd=HERE.parent, check=False).returncode
            if code:
                return code
    return 0


def job_template(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the template of the pool's Kubernetes jobs, with defaults from the environment."""
    template: dict[str, Any] = yaml.safe_load((HERE / "kubernetes" / "job-template.yaml").read_text(encoding="utf-8"))
    variables = template["variables"]["properties"]
    for name, variable in SETTINGS.items():
        if environment.get(name):
            is_number = variables[variable]["type"] == "integer"
            variables[variable]["default"] = int(environment[name]) if is_number else environment[name]
    return template


if __name__ == "__main__":
    sys.exit(main())
