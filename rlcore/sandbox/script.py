"""Script inside a box, run like a separate program. Like ``runner``, its code is sent there as bytes.

Its input arrives through a pipe on descriptor 0 and its output leaves through descriptor 1. Each pipe has a thread at
the other end, because data may exceed the capacity of a pipe.
"""

from __future__ import annotations

import _thread
import posix
import sys
from collections.abc import Callable
from typing import IO, Any

PROGRAM = "<program>"
# Outside the descriptors that programs use: the rest of a script's input, and its output.
_TO_SCRIPT, _FROM_SCRIPT = 32, 33
_FIRST_OF_OURS = 30
_TEXT = 2_000


def run_script(code: str, stdin: str, max_bytes: int) -> tuple[Any, ...]:
    """Return ``("printed", stdout)``, ``("raised", name, text, stdout)`` or ``("too large", why)``."""
    _thread.stack_size(0)  # a previous script's size would apply to the pipe threads
    sys.modules.pop("fileinput", None)  # it cannot be restarted
    fed, printed = _feed(stdin.encode("utf-8", "surrogatepass")), _catch(max_bytes)
    _set_streams(_opened(0), _opened(1), _opened(2))
    namespace, error = fresh_namespace("__main__"), None
    try:
        exec(compile(code, PROGRAM, "exec", dont_inherit=True), namespace)
    except SystemExit:
        pass  # the usual way to end a program early
    except BaseException as raised:  # noqa: BLE001 - whatever a program raises is data
        error = raised
    raised_as = () if error is None else described(error)
    _end_script(namespace)
    fed()
    data = printed()
    if len(data) > max_bytes:
        return ("too large", f"the program printed more than {max_bytes} bytes")
    text = data.decode("utf-8", "replace")
    return ("raised", *raised_as, text) if raised_as else ("printed", text)


def _end_script(namespace: dict[str, Any]) -> None:
    """End a program as Python does: join threads, call exit handlers, flush buffers."""
    threading, atexit, signal = (sys.modules.get(name) for name in ("threading", "atexit", "_signal"))
    steps: list[Callable[[], object]] = [
        lambda: _join_all(threading) if threading else None,
        lambda: atexit._run_exitfuncs() if atexit else None,
        lambda: sys.stdout.flush(),
        lambda: sys.__stdout__.flush() if sys.__stdout__ else None,
        lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN) if signal else None,  # the runner writes later
        namespace.clear,  # flushes files that it left open
    ]
    for step in steps:
        try:  # noqa: SIM105 - contextlib takes long to import
            step()
        except BaseException:  # noqa: BLE001 - ignored at the end of a program
            pass
    _set_streams(None, None, None)  # streams of the program close their descriptors
    clear_descriptors()
    posix.closerange(3, _FIRST_OF_OURS)


def _opened(descriptor: int) -> IO[Any]:
    mode, errors = ("w", "backslashreplace") if descriptor else ("r", "surrogateescape")
    return open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)


def _set_streams(*streams: IO[Any] | None) -> None:
    """Set both names of each stream: a program that wraps a stream's buffer drops the first name."""
    for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _join_all(threading: Any) -> None:
    own = threading.current_thread()
    while waiting := [one for one in threading.enumerate() if one is not own and not one.daemon]:
        waiting[0].join()


def _feed(data: bytes) -> Callable[[], object]:
    """Write ``data`` to descriptor 0 from a thread. The returned function waits for its end."""
    _pipe_to(0, _TO_SCRIPT)

    def pour() -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[posix.write(_TO_SCRIPT, view) :]
        except OSError:
            pass  # no reader is left
        posix.close(_TO_SCRIPT)

    return _begin(pour)


def _catch(max_bytes: int) -> Callable[[], bytes]:
    """Collect the output of descriptor 1. The returned function waits for its end and returns it.

    It keeps at most one read beyond ``max_bytes``, so that the caller notices the excess.
    """
    _pipe_to(1, _FROM_SCRIPT)
    parts = []

    def drain() -> None:
        kept = 0
        while part := posix.read(_FROM_SCRIPT, 1 << 16):
            if kept <= max_bytes:
                parts.append(part)
                kept += len(part)
        posix.close(_FROM_SCRIPT)

    ended = _begin(drain)

    def all_of_it() -> bytes:
        ended()
        return b"".join(parts)

    return all_of_it


def _pipe_to(descriptor: int, own: int) -> None:
    """Connect ``descriptor`` to ``own`` with a pipe; descriptor 0 reads from it, 1 writes to it."""
    ends = posix.pipe()
    for end, target in zip(ends if descriptor == 0 else ends[::-1], (descriptor, own), strict=True):
        posix.dup2(end, target)
        posix.close(end)


def _begin(work: Callable[[], None]) -> Callable[[], object]:
    """Run ``work`` in a thread. The returned function waits for its end."""
    is_over = _thread.allocate_lock()
    is_over.acquire()

    def run() -> None:
        try:
            work()
        finally:
            is_over.release()

    _thread.start_new_thread(run, ())
    return is_over.acquire


def clear_descriptors() -> None:
    """Redirect descriptors 0, 1 and 2 to the null device."""
    null = posix.open("/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        posix.dup2(null, descriptor)
    if null > 2:
        posix.close(null)


def fresh_namespace(name: str = "__main__") -> dict[str, Any]:
    """Return the namespace of a new module, which dataclasses and type hints need to resolve names.

    If a program's function is called, its ``name`` is not ``__main__``.
    """
    module = type(sys)(name)
    sys.modules["__main__"] = sys.modules[name] = module
    return module.__dict__


def described(error: BaseException) -> tuple[str, str]:
    """Return name and text of an exception, with the program line that raised it."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = str(error)[:_TEXT]
    except BaseException:  # noqa: BLE001 - whatever a program raises is data
        text = ""
    return type(error).__name__[:100], f"{text} (line {line})" if line else text
