"""The files of a box: a copy of the Python that runs us, its standard library and its shared libraries, nothing else.

One folder that becomes the read-only root of every box. A copy, because the interpreter often lies in a home that the
uid of a box may not enter, and because one mount is cheaper than thirty. There is no shell in it, no /proc, no /etc, no
installed package and no file of ours.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import SandboxError

PYTHON = "/python/bin/python"  # inside the box
_LEFT_OUT = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip",
    "config-*", "pydoc_data", "*.opt-?.pyc", "_tkinter*", "_test*", "_ctypes_test*", "_xx*", "xx*", "*.a", "*.exe",
)  # fmt: skip
# Runs in the interpreter that is copied: which files does it map once every extension module is loaded?
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
print(json.dumps({"executable": os.path.realpath(sys.executable), "stdlib": stdlib, "dynload": dynload,
    "platlibdir": sys.platlibdir, "version": "python%d.%d" % sys.version_info[:2], "mapped": sorted(mapped)}))
"""
_LOADER = re.compile(rb"/[\w./-]*/ld-[\w.-]*\.so[\w.]*")


@dataclass(frozen=True, slots=True)
class _Interpreter:
    executable: Path
    stdlib: Path
    dynload: Path
    platlibdir: str
    version: str
    libraries: tuple[Path, ...]


def box_image() -> Path:
    """The folder with the image for this interpreter, made at the first call on a machine (50 MB, a second).

    It lies in this user's cache (``XDG_CACHE_HOME``, else ``~/.cache``; ``/var/cache`` as root), where nobody else can
    put a file. Its name says what is in it, and what has a name never changes again: boxes that run keep theirs. One
    process at a time makes one, and the others take it.

    Raises:
        SandboxError: it cannot be made, or others may write where it would lie.
    """
    # sys._base_executable: a virtual environment's python needs its base to start.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    stamp = f"2 {python} {sys.version} {Path(python).stat().st_mtime_ns}"
    place = _place()
    try:
        folder = _private(place)
        pointer = folder / f"{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json"
        with _alone(folder / "lock"):
            return _known(pointer) or _make(folder, pointer, _probe(python))
    except OSError as error:
        raise SandboxError(
            f"the files of the sandbox cannot be written: {error}",
            where=str(place),
            fix="free 100 MB there, or set XDG_CACHE_HOME to a folder that every user may enter, without noexec",
        ) from error


def _place() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    usual = Path("/var/cache") if os.geteuid() == 0 else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - never fails
    return (Path(named) if named else usual) / "rlcore-boxes"


def _private(folder: Path) -> Path:
    """The folder, made where it is missing. As root others may enter it, not look around: boxes have another uid."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(
            "the folder for the sandbox's files belongs to somebody else, or others may write to it",
            where=str(folder),
            fix="remove it, or set XDG_CACHE_HOME to another folder",
        )
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return folder


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _known(pointer: Path) -> Path | None:
    """The image that was made last, if what was written is all there: cleaners of caches take single files."""
    try:
        said = json.loads(pointer.read_text())
        folder = pointer.parent / str(said["image"])
        return folder if said["census"] == _list_files(folder / "root") else None
    except (OSError, ValueError, KeyError):
        return None


def _list_files(root: Path) -> dict[str, int]:
    sizes = [path.lstat().st_size for path in root.rglob("*") if not path.is_dir()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _digest(root: Path) -> str:
    """SHA-256 of the paths and bytes of an image."""
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        whole.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _probe(python: str) -> _Interpreter:
    done = subprocess.run([python, "-I", "-S", "-B", "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"the interpreter {python} does not start: {done.stderr[-300:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    stdlib = Path(said["stdlib"])
    return _Interpreter(
        executable=Path(said["executable"]),
        stdlib=stdlib,
        dynload=Path(said["dynload"]),
        platlibdir=said["platlibdir"],
        version=said["version"],
        libraries=tuple(Path(name) for name in said["mapped"] if not Path(name).is_relative_to(stdlib)),
    )


def _make(folder: Path, pointer: Path, interpreter: _Interpreter) -> Path:
    """Publish a new image, whole from the moment on which it has its name, and point to it."""
    for left in folder.glob(".new-*"):  # by a process that was killed: we are alone here
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        _fill(work / "root", interpreter)
        work.chmod(0o755)
        content = _digest(work / "root")[:32]
        # One of the same content that has lost files may still have boxes in it: it keeps its name.
        names = (f"{content}-{number}" for number in itertools.count())
        image = next(folder / name for name in names if not (folder / name).exists())
        said = {"image": image.name, "census": _list_files(work / "root")}
        work.rename(image)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    new = pointer.with_suffix(".new")
    new.write_text(json.dumps(said))
    new.replace(pointer)
    return image


def _fill(root: Path, interpreter: _Interpreter) -> None:
    home = root / "python"
    library = home / interpreter.platlibdir / interpreter.version
    shutil.copytree(interpreter.stdlib, library, ignore=_LEFT_OUT)
    if not interpreter.dynload.is_relative_to(interpreter.stdlib):
        shutil.copytree(interpreter.dynload, library / "lib-dynload", ignore=_LEFT_OUT)
    (home / "bin").mkdir()
    shutil.copy2(interpreter.executable, root / PYTHON[1:])
    (root / "lib").mkdir()
    for path in interpreter.libraries:
        _copy_library(path, root / "lib")
        unwinder = path.with_name("libgcc_s.so.1")  # libc loads it only when a thread ends itself
        if path.name.startswith("libc.so") and unwinder.exists():
            shutil.copy2(unwinder, root / "lib")
    _copy_loader(interpreter.executable, root)
    (root / "dev").mkdir()
    for name in ("null", "urandom"):  # places to mount the devices on
        (root / "dev" / name).touch()
    _open_to_every_user(root)


def _open_to_every_user(root: Path) -> None:
    """Whatever the umask was: as root, a box runs under a uid of its own."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)


def _copy_library(path: Path, folder: Path) -> None:
    """The file, and its other names (``libz.so.1`` for ``libz.so.1.2.13``) as links: the loader asks for those."""
    shutil.copy2(path, folder / path.name)
    for other in path.parent.iterdir():
        if other.is_symlink() and ".so" in other.name and other.resolve() == path and other.name != path.name:
            (folder / other.name).symlink_to(path.name)


def _copy_loader(executable: Path, root: Path) -> None:
    """The dynamic loader, at the path that the executable names."""
    with executable.open("rb") as file:
        found = _LOADER.search(file.read(1 << 16))
    if found is None:  # statically linked
        return
    loader = Path(found[0].decode())
    place = root / loader.relative_to("/")
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(loader, place)
