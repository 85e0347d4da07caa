"""People who approve promotions, and their signatures by ssh keys.

``promotion.toml`` in the state directory names them in lines of allowed signers, written by the account that owns it.

Neither a preset nor the model registry decides on this: whoever may change those could switch approvals off.

``ssh-keygen -Y`` signs a text, and verifies it against those lines (``man ssh-keygen``, ALLOWED SIGNERS). A signature
covers the namespace ``rlcore``, so one that the key made for another purpose is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

from rlcore.errors import ConfigError, PromotionError, shown
from rlcore.strict_config import between, build
from rlcore.tasks.store.settings import Home

FILE = "promotion.toml"
NAMESPACE = "rlcore"
OFF = "off"  # digest in the audit log if the file asks for no approvals
_SIGNER = 3  # parts of a line: name, key type, key
_SHARED = stat.S_IWGRP | stat.S_IWOTH
_ARMOR = re.compile(r"-----BEGIN SSH SIGNATURE-----(.*)-----END SSH SIGNATURE-----", re.DOTALL)
_FINGERPRINT = re.compile(r"\bSHA256:\S+")


@dataclass(frozen=True, kw_only=True)
class _File:
    approvers: tuple[str, ...]
    days: Annotated[int, between(1, 3650)] = 7

    def __post_init__(self) -> None:
        if wrong := [line for line in self.approvers if len(line.split()) < _SIGNER or len(line.splitlines()) > 1]:
            text = shown(wrong[0], max_chars=40)
            raise ConfigError(f"approvers: {text!r} is not name, key type and key, as in a .pub file")


@dataclass(frozen=True, kw_only=True)
class Approvers:
    """Lines of allowed signers, days of a request, and the file's SHA-256: ``off`` without signers."""

    lines: str = ""
    days: int = 0
    sha256: str = ""  # no file

    @property
    def are_needed(self) -> bool:
        """True if promotions need an approval."""
        return bool(self.lines)


def read_approvers(home: Home) -> Approvers:
    """Return who must approve a promotion of this state directory.

    Raises:
        PromotionError: somebody else can write the file, or it has errors.
    """
    path = home.root / FILE
    try:
        content = _read_own(path)
    except (FileNotFoundError, NotADirectoryError):
        return Approvers()
    except OSError as error:
        _refuse(path, f"cannot read it: {error.strerror}", "make it a plain file that the account of rlcore reads")
    try:
        known = build(_File, tomllib.loads(content.decode()), source=FILE)
    except (ValueError, ConfigError) as error:
        text = error.what if isinstance(error, ConfigError) else str(error)
        _refuse(path, text, 'write approvers = ["anna ssh-ed25519 AAAA…"] and days = 7')
    digest = hashlib.sha256(content).hexdigest() if known.approvers else OFF
    return Approvers(lines="\n".join(known.approvers), days=known.days, sha256=digest)


def approver_errors(home: Home) -> Iterator[str]:
    """Yield what is wrong with ``promotion.toml``."""
    try:
        read_approvers(home)
    except PromotionError as error:
        yield f"{error.where}: {error.what}; {error.fix}"


def _read_own(path: Path) -> bytes:
    """Read a file that its folder's owner alone can write or replace."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        own, folder = os.fstat(file.fileno()), path.parent.stat()
        if own.st_uid != folder.st_uid:
            _refuse(path, "it does not belong to the account that owns the state directory", "chown it")
        is_kept = folder.st_mode & stat.S_ISVTX  # others write such a folder, and replace no file of its owner
        for each, mode in ((path, own.st_mode), (path.parent, 0 if is_kept else folder.st_mode)):
            if mode & _SHARED:
                _refuse(each, "others than its owner can write it", f"chmod go-w {each}")
        return file.read()


def _refuse(path: Path, what: str, fix: str) -> NoReturn:
    raise PromotionError(f"{FILE} names who approves promotions: {what}", where=str(path), fix=fix)


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Signer of a text: the name that the allowed signers give the key, and the key's fingerprint."""

    principal: str
    key: str


def sign(text: str, key: Path) -> str:
    """Sign a text with a private key, or with the agent's key of a ``.pub`` file; ssh-keygen asks for a passphrase.

    Raises:
        PromotionError: the key cannot be used, or ssh-keygen is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "document"
        document.write_text(text, encoding="utf-8")
        done = _run("sign", "-f", str(key), "-n", NAMESPACE, str(document))
        if done.returncode:
            raise PromotionError(
                f"the key does not sign: {_reason(done)}", where=str(key), fix="name your private ssh key with --key"
            )
        return document.with_name("document.sig").read_text(encoding="utf-8")


def verify(text: str, signature: str, allowed: str, *, at: datetime | None = None) -> Signer:
    """Return the signer of a text among the ``allowed`` signers; ``at``: the time at which the key had to be valid.

    Blanks and line ends in the signature do not count: a form may have changed them.
    Raises:
        PromotionError: nobody of them signed this text, or ssh-keygen is missing.
    """
    time = f"-Overify-time={(at or datetime.now(UTC)).astimezone(UTC):%Y%m%d%H%M%SZ}"
    with tempfile.TemporaryDirectory() as folder:
        signers, file = Path(folder) / "allowed", Path(folder) / "signature"
        signers.write_text(allowed.rstrip("\n") + "\n", encoding="utf-8")
        file.write_text(_armored(signature), encoding="ascii")
        names = _run("find-principals", time, "-s", str(file), "-f", str(signers))
        if names.returncode:
            raise PromotionError(f"the signature is of no key among the approvers: {_reason(names)}")
        principal = names.stdout.splitlines()[0]
        arguments = ("-n", NAMESPACE, "-s", str(file), "-f", str(signers), "-I", principal)
        done = _run("verify", time, *arguments, text=text)
    fingerprint = _FINGERPRINT.search(done.stdout)
    if done.returncode or fingerprint is None:
        raise PromotionError(f"the signature of {shown(principal)} does not fit the document: {_reason(done)}")
    return Signer(principal=principal, key=fingerprint[0])


def _armored(signature: str) -> str:
    found = _ARMOR.search(signature)
    content = re.sub(r"\s", "", found[1]) if found else ""
    if not re.fullmatch(r"[A-Za-z0-9+/]+=*", content):
        raise PromotionError(
            f"not a signature of ssh-keygen: {shown(signature, max_chars=60)!r}",
            fix="paste it whole, from -----BEGIN SSH SIGNATURE----- to the end",
        )
    return f"-----BEGIN SSH SIGNATURE-----\n{content}\n-----END SSH SIGNATURE-----\n"


def _run(action: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *arguments], input=text, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise PromotionError(
            "ssh-keygen is not installed, and approvals are signed and verified with it",
            fix="install OpenSSH's client: apt-get install openssh-client (Fedora: dnf install openssh-clients)",
        ) from error


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return shown(re.sub(r"/\S*/allowed:", "line ", lines[0])) if lines else f"exit code {done.returncode}"
