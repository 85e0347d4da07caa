"""Upload of an exported folder to a model hub: huggingface.co, or the one that HF_ENDPOINT names."""

from __future__ import annotations

import re
from pathlib import Path

from rlcore.errors import ConfigError, ServiceError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_LOGIN = "run hf auth login, or set HF_TOKEN to a token that may write"


def check_target(repo: str, *, needs_token: bool) -> None:
    """Check name and token before any work.

    Raises:
        ConfigError: ``repo`` is no name of a repository, or there is no token although it is needed.
    """
    from huggingface_hub import get_token

    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise ConfigError(f"{repo!r} is no name of a repository", where="--push", fix="write owner/name")
    if needs_token and not get_token():
        raise ConfigError("there is no token for the hub", where="--push", fix=_LOGIN)


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as one commit; return the commit's address. A repository that exists keeps its visibility.

    Raises:
        ServiceError: the hub refuses, or does not answer; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export by rlcore").commit_url)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        fix = f"{_LOGIN}; then: " if status in (401, 403) else ""
        why = f"{error} {error.__cause__ or ''}".strip()
        raise ServiceError(
            f"the upload failed: {why}", where=f"{api.endpoint}/{repo}", fix=f"{fix}hf upload {repo} {folder}"
        ) from error
