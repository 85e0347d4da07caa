"""Signatures by ssh keys: ``ssh-keygen -Y`` signs a text, and verifies it against lines of allowed signers.

The lines are those of ``man ssh-keygen``, ALLOWED SIGNERS: principals, options, key. A signature covers the namespace
``rlcore``, so one that the key made for another purpose is refused.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlcore.errors import PromotionError, shown

NAMESPACE = "rlcore"
_ARMOR = re.compile(r"-----BEGIN SSH SIGNATURE-----(.*)-----END SSH SIGNATURE-----", re.DOTALL)
_FINGERPRINT = re.compile(r"\bSHA256:\S+")


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
    """Return a signature with its head, content and end on lines of their own."""
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
    """Return what ssh-keygen said of a failure, without the paths of temporary files."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return shown(re.sub(r"/\S*/allowed:", "line ", lines[0])) if lines else f"exit code {done.returncode}"
