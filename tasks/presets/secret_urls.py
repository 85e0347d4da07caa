"""Passwords in addresses: refused, because presets are stored with every result, in MLflow and in reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.strict_config import config_error
from rlcore.tasks.store.passwords import has_secret

_FIX = (
    "name a variable of the environment (api_key_env, HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD) or a Prefect block"
)


def require_no_secrets(document: Mapping[str, Any], *, where: str) -> None:
    """Refuse addresses with a password or a key.

    Raises:
        ConfigError: with the key of each such value, and without the value.
    """
    if errors := list(_secret_errors(document, "")):
        raise config_error(errors, where)


def _secret_errors(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _secret_errors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, str) and has_secret(node):
        yield f"{path}: the address has a password or a key; {_FIX}"
