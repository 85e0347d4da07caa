"""Program inside a box. It is never imported there: its code arrives with that of ``wire`` as bytes on descriptor 0.

The bootstrap (see ``isolation.py``) binds the names of ``wire``, then runs this module, which limits the process, sends
READY and serves. It imports only posix and resource: json and struct would double the startup time. Nothing here
enforces isolation. A program may rewrite it: its messages are data, compared outside.

As ``candidate`` it takes requests ``(verb, …)`` and answers each with one frame:

    ("load", code)                          → ("done",) | ("raised", name, text)
    ("load", code, names)                   → the same, with those of ``names`` that the code uses without an import
    ("call", name, args, kwargs, as_json)   → ("value", value) | ("raised", name, text)
    ("script", code, stdin, max_bytes)      → ("printed", stdout) | ("raised", name, text, stdout)

``max_bytes`` limits the output. A script runs like a separate program: it has descriptors 0, 1 and 2, its threads are
joined, and its exit handlers run. Values that are not plain data become ("refused", why). Values larger than a frame
become ("too large", why).

As ``tester`` it takes one request ``(nonce, entry_point, prelude, tests)``, sends ``("call", args, kwargs)`` for each
call by a test, and answers each test with ``("verdict", nonce, status, text)``.
"""

from __future__ import annotations

import _thread
import builtins
import posix
import resource
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import IO, Any, NoReturn

from rlcore.sandbox.wire import MAX_FRAME_BYTES, MAX_REQUEST_BYTES, WireError, WireLimitError, decode, encode

READY = b"READY"
_IN, _OUT = 30, 31  # of the 34 descriptors of a box
# Outside the descriptors that programs use: the rest of a script's input, and its output.
_TO_SCRIPT, _FROM_SCRIPT = 32, 33
# UnicodeError takes more than a text; the others would end a loop of a test that calls the program in map or iter.
_NOT_REPRODUCED = (UnicodeError, StopIteration, StopAsyncIteration)


def main(role: str, memory_bytes: int, cpu_seconds: int) -> NoReturn:
    """Limit this process, send READY, and serve ``role`` (``candidate`` or ``tester``) until the box is killed."""
    posix.dup2(0, _IN)
    posix.dup2(1, _OUT)
    clear_descriptors()
    sys.argv[:] = [PROGRAM]
    sys.set_int_max_str_digits(0)
    # The module site, which is not imported, would define these.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    _limit(memory_bytes, cpu_seconds)
    _send_bytes(READY)
    if role == "tester":
        _serve_tests(*_receive())
    while True:
        verb, *arguments = _receive()
        _send(_answer(verb, *arguments), MAX_REQUEST_BYTES if verb == "script" else MAX_FRAME_BYTES)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 8 << 20,
        resource.RLIMIT_NOFILE: 34,
        resource.RLIMIT_NPROC: 16,  # threads: there is no fork
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_SIGPENDING: 16,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    # The soft limit sends SIGXCPU, by which the caller knows why the process ended; the hard one is for who ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def _answer(verb: str, *arguments: Any) -> tuple[Any, ...]:
    verbs: dict[str, Callable[..., tuple[Any, ...]]] = {"load": _load, "call": _call, "script": run_script}
    return verbs[verb](*arguments)


def _load(code: str, names: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    namespace = fresh_namespace("program")
    try:
        compiled = compile(code, PROGRAM, "exec", dont_inherit=True)
        namespace.update((name, _usual(name, home)) for name, home in (names or {}).items() if _uses(compiled, name))
        exec(compiled, namespace)
    except (SystemExit, EOFError):
        pass  # its definitions exist: only its last lines exit, or read an input that calls do not have
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return ("raised", *described(error))
    return ("done",)


def _uses(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_uses(one, name) for one in code.co_consts if isinstance(one, type(code)))


def _usual(name: str, home: str) -> Any:
    module = __import__(home or name)
    return getattr(module, name) if home else module


def _call(name: str, args: list[Any], kwargs: dict[str, Any], as_json: bool) -> tuple[Any, ...]:
    try:
        value = _function(name)(*args, **kwargs)
        return ("value", _listed(value) if as_json else value)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return ("raised", *described(error))


def _function(name: str) -> Callable[..., Any]:
    program = sys.modules["__main__"]
    holder = program if hasattr(program, name) or not hasattr(program, "Solution") else program.Solution()
    if not hasattr(holder, name):
        raise NameError(f"the program defines no function {name!r}")
    function: Callable[..., Any] = getattr(holder, name)
    return function


def _listed(value: Any) -> Any:
    kind = type(value)
    is_plain = isinstance(value, str | bytes | bytearray | list | tuple | set | frozenset | dict)
    return list(value) if hasattr(kind, "__len__") and hasattr(kind, "__iter__") and not is_plain else value


def _serve_tests(nonce: str, entry_point: str, prelude: str, tests: list[str]) -> NoReturn:
    namespace = fresh_namespace()
    try:
        exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        _send(("verdict", nonce, "infra", "the prelude raised " + ": ".join(described(error))))
        tests = []
    for test in tests:
        namespace |= {entry_point: _proxy, "candidate": _proxy}
        _send(("verdict", nonce, *_judged(test, namespace)))
    posix._exit(0)


def _judged(test: str, namespace: dict[str, Any]) -> tuple[str, str]:
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
    except AssertionError as error:
        return "fail", ": ".join(described(error))
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is data
        return "error", ": ".join(described(error))
    return "pass", ""


def _proxy(*args: Any, **kwargs: Any) -> Any:
    """Call the candidate for a test: send plain data and return plain data or raise a builtin exception."""
    _send(("call", list(args), kwargs))
    kind, *rest = _receive()
    if kind == "value":
        return rest[0]
    raise _exception(rest[0])(rest[1])


def _exception(name: str) -> Callable[[str], Exception]:
    kind = getattr(builtins, name, None)
    is_simple = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_REPRODUCED)
    return kind if is_simple else RuntimeError  # type: ignore[return-value]  # checked in the line before


def _receive() -> Any:
    return decode(_read(int.from_bytes(_read(4), "big")))


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = posix.read(_IN, min(count, 1 << 16))
        if not part:
            posix._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(message: tuple[Any, ...], max_bytes: int = MAX_FRAME_BYTES) -> None:
    try:
        data = encode(message, max_bytes=max_bytes)
        if len(data) > max_bytes:
            raise WireLimitError(f"{len(data)} bytes are more than {max_bytes}")
    except WireLimitError as error:
        data = encode(("too large", str(error)))
    except (WireError, RecursionError) as error:
        data = encode(("refused", str(error)))
    _send_bytes(data)


def _send_bytes(data: bytes) -> None:
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[posix.write(_OUT, data) :]


PROGRAM = "<program>"
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
    posix.closerange(3, _IN)


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
    ends = posix.pipe()
    for end, target in zip(ends if descriptor == 0 else ends[::-1], (descriptor, own), strict=True):
        posix.dup2(end, target)
        posix.close(end)


def _begin(work: Callable[[], None]) -> Callable[[], object]:
    """Run ``work`` in a thread; the returned function waits for its end."""
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
