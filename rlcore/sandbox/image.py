"""Files of a box: a copy of this Python, its standard library and its shared libraries.

One folder is the read-only root of every box. It is a copy because the uid of a box may not be able to enter the
interpreter's folder, and because one mount is faster than thirty. It has no shell, /proc, /etc or installed packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcore.errors import SandboxError

PYTHON = "/python/bin/python"  # inside the box
_LEFT_OUT = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip",
    "config-*", "pydoc_data", "*.opt-?.pyc", "_tkinter*", "_test*", "_ctypes_test*", "_xx*", "xx*", "*.a", "*.exe",
)  # fmt: skip
# Runs in the copied interpreter: list the files that it maps after loading every extension module.
_PROBE = """
import importlib, json, os, sys, sysconfig
stdlib = sysconfig.get_path("stdlib")
dynload = sysconfig.get_config_var("DESTSHARED") or os.path.join(stdlib, "lib-dynload")
for name in os.listdir(dynload) if os.path.isdir(dynload) else []:
    if name.endswith(".so") and not name.startswith(("_tkinter", "_test", "_ctypes_test", "_xx", "xx")):
        try:
            importlib.import_module(name.partition(".")[0])
        except Exception:
            pass
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
home = os.path.join(sys.platlibdir, "python%d.%d" % sys.version_info[:2])
print(json.dumps([os.path.realpath(sys.executable), stdlib, dynload, home, *sorted(mapped)]))
"""
_LOADER = re.compile(rb"/[\w./-]*/ld-[\w.-]*\.so[\w.]*")


def box_image() -> Path:
    """Return the folder of this interpreter's image, creating it on the first call (50 MB, 1 s).

    It is in this user's cache, where no other user can write. Its name is a digest of its content, so running boxes
    keep theirs. Concurrent processes create it once.

    Raises:
        SandboxError: The image cannot be created, or other users may write to its folder.
    """
    python = base_python()
    stamp = f"2 {python} {sys.version} {Path(python).stat().st_mtime_ns}"
    path = user_cache() / "rlcore-boxes"
    try:
        folder = _private(path)
        pointer = folder / f"{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json"
        with _alone(folder / "lock"):
            return _known(pointer) or _make(folder, pointer, _probe(python))
    except OSError as error:
        raise SandboxError(
            f"the files of the sandbox cannot be written: {error}",
            where=str(path),
            fix="free 100 MB there, or set XDG_CACHE_HOME to a folder that every user can enter, without noexec",
        ) from error


def base_python() -> str:
    """Return the interpreter outside a virtual environment, whose own needs it to start."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def user_cache() -> Path:
    """Return ``XDG_CACHE_HOME``, else ``~/.cache``, or ``/var/cache`` for root."""
    named = os.environ.get("XDG_CACHE_HOME")
    usual = Path("/var/cache") if os.geteuid() == 0 else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - never fails
    return Path(named) if named else usual


def _private(folder: Path) -> Path:
    """Return the folder, creating it if missing. Boxes of root have other uids: they may enter it but not list it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(
            "the folder of the sandbox's files belongs to another user, or other users may write to it",
            where=str(folder),
            fix="remove it, or set XDG_CACHE_HOME to another folder",
        )
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return folder


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _known(pointer: Path) -> Path | None:
    """Return the newest image if all its files exist. Cache cleaners may delete single files."""
    try:
        found = json.loads(pointer.read_text())
        folder = pointer.parent / str(found["image"])
        return folder if found["census"] == _list_files(folder / "root") else None
    except (OSError, ValueError, KeyError):
        return None


def _list_files(root: Path) -> dict[str, int]:
    sizes = [path.lstat().st_size for path in root.rglob("*") if not path.is_dir()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _digest(root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        whole.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _probe(python: str) -> list[Path]:
    """Return its executable, standard library, folder of extensions, place of the library, and shared libraries."""
    done = subprocess.run([python, "-I", "-S", "-B", "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"the interpreter {python} does not start: {done.stderr[-300:]}")
    return [Path(name) for name in json.loads(done.stdout)]


def _make(folder: Path, pointer: Path, interpreter: list[Path]) -> Path:
    for left in folder.glob(".new-*"):  # left by a killed process; this process has the lock
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        _fill(work / "root", *interpreter)
        work.chmod(0o755)
        content = _digest(work / "root")[:32]
        # Boxes may still use an incomplete image of the same content: it keeps its name.
        names = (f"{content}-{number}" for number in itertools.count())
        image = next(folder / name for name in names if not (folder / name).exists())
        found = {"image": image.name, "census": _list_files(work / "root")}
        work.rename(image)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    new = folder / f".new-{pointer.name}"
    new.write_text(json.dumps(found))
    new.replace(pointer)
    return image


def _fill(root: Path, executable: Path, stdlib: Path, dynload: Path, home: Path, *mapped: Path) -> None:
    library = root / "python" / home
    shutil.copytree(stdlib, library, ignore=_LEFT_OUT)
    if not dynload.is_relative_to(stdlib):
        shutil.copytree(dynload, library / "lib-dynload", ignore=_LEFT_OUT)
    (root / "python" / "bin").mkdir()
    shutil.copy2(executable, root / PYTHON[1:])
    (root / "lib").mkdir()
    for path in (path for path in mapped if not path.is_relative_to(stdlib)):
        _copy_library(path, root / "lib")
        unwinder = path.with_name("libgcc_s.so.1")  # libc loads it only when a thread ends itself
        if path.name.startswith("libc.so") and unwinder.exists():
            shutil.copy2(unwinder, root / "lib")
    _copy_loader(executable, root)
    (root / "dev").mkdir()
    for name in ("null", "urandom"):  # mount points of the devices
        (root / "dev" / name).touch()
    _open_to_every_user(root)


def _open_to_every_user(root: Path) -> None:
    """Set permissions regardless of the umask: boxes of root have other uids."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)


def _copy_library(path: Path, folder: Path) -> None:
    """Copy a library, and link its other names (``libz.so.1`` for ``libz.so.1.2.13``), which the loader opens."""
    shutil.copy2(path, folder / path.name)
    for other in path.parent.iterdir():
        if other.is_symlink() and ".so" in other.name and other.resolve() == path and other.name != path.name:
            (folder / other.name).symlink_to(path.name)


def _copy_loader(executable: Path, root: Path) -> None:
    with executable.open("rb") as file:
        found = _LOADER.search(file.read(1 << 16))
    if found is None:  # statically linked
        return
    loader = Path(found[0].decode())
    path = root / loader.relative_to("/")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(loader, path)
