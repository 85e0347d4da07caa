"""Attacks, each a small program: those that fake a right answer, and those that try to leave the box."""

from __future__ import annotations

from collections.abc import Mapping

_ANY = "class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 9\n"

# Ways in which tests call a function, each with a right answer of ``square``.
IDIOMS: tuple[str, ...] = (
    "for y, z in zip(map({f}, [1, 2]), [1, 4]): assert y == z", "for y in map({f}, [3]): assert y == 9",
    "for x, y in zip([1, 2], map({f}, [1, 2])): assert y == x * x",
    "assert all(y == z for y, z in zip(map({f}, [1, 2]), [1, 4]))", "assert not [y for y in map({f}, [3]) if y != 9]",
    "assert not list(filter(lambda y: y != 9, map({f}, [3])))", "assert not any(y != 9 for y in map({f}, [3]))",
    "for y in filter({f}, [3]): assert y == 3", "for y in iter(lambda: {f}(3), 9): assert False",
    "import itertools\nfor y in itertools.starmap({f}, [(3,)]): assert y == 9",
    "import itertools\nfor y in itertools.takewhile({f}, [3]): assert y == 3", "[y for y in map({f}, [3])]",
    "list(map({f}, [1, 2, 3]))", "sum(map({f}, [1, 2]))", "max(map({f}, [1, 2]), default=0)", "set(map({f}, [1]))",
    "dict(zip([1], map({f}, [1])))", "assert next(map({f}, [3]), 9) == 9",
    "assert [{f}(x) for x in (1, 2)] == [1, 4]",
    "async def g(): return {f}(3)\ntry:\n    g().send(None)\nexcept StopIteration as end:\n    assert end.value == 9",
)  # fmt: skip

# Each should be refused as ``square``: tested with 3 → 9 and 5 → 25, as values and as assertions.
FAKES: Mapping[str, str] = {
    "exits at import": "import sys\nsys.exit(0)",
    "exits hard at import": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef square(x): os._exit(0)",
    "raises SystemExit in the call": "def square(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def square(x): raise KeyboardInterrupt",
    "raises a bare BaseException": "def square(x): raise BaseException('pass')",
    "raises GeneratorExit": "def square(x): raise GeneratorExit",
    "ends the loop of the test": "def square(*x): raise StopIteration",
    "ends the loop of the test with a value": "def square(*x): raise StopIteration(9)",
    "ends the async loop of the test": "def square(*x): raise StopAsyncIteration",
    "ends the loop of the test by another name": (
        "StopIt = type('StopIteration', (Exception,), {})\ndef square(*x): raise StopIt(9)"
    ),
    "skips the test": "import unittest\ndef square(x): raise unittest.SkipTest('skipped')",
    "registers an exit handler": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef square(x): return 0",
    "equals everything": _ANY + "def square(x): return Any()",
    "is an int that equals everything": (
        "class Any(int):\n    def __eq__(s, o): return True\ndef square(x): return Any(0)"
    ),
    "is a text that equals everything": (
        "class Any(str):\n    def __eq__(s, o): return True\ndef square(x): return Any()"
    ),
    "is a list that equals everything": (
        "class Any(list):\n    def __eq__(s, o): return True\ndef square(x): return Any()"
    ),
    "returns mock.ANY": "from unittest import mock\ndef square(x): return mock.ANY",
    "returns a pickle bomb": (
        "class Bomb:\n    def __reduce__(self): return (eval, ('1',))\ndef square(x): return Bomb()"
    ),
    "returns itself": "def square(x): return square",
    "returns a list that holds itself": "def square(x):\n    l = []\n    l.append(l)\n    return l",
    "returns NaN": "def square(x): return float('nan')",
    "returns infinity": "def square(x): return float('inf')",
    "returns True": "def square(x): return True",
    "returns a deep list": "def square(x):\n    l = []\n    for _ in range(5000): l = [l]\n    return l",
    "returns colliding hashes": "def square(x): return {i * (2**61 - 1) for i in range(20000)}",
    "returns a huge text": "def square(x): return 'x' * (50 << 20)",
    "returns a huge int": "def square(x): return 1 << (1 << 26)",
    "a property that lies": "class P:\n    __class__ = int\ndef square(x): return P()",
    "looks for the answer in the frames": (
        "import sys\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "            if isinstance(value, dict) and 'output' in value: return value['output']\n"
        "            if isinstance(value, str) and '==' in value: return eval(value.split('==')[1])\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "looks for the answer in the heap": (
        "import gc\ndef square(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'output' in o: return o['output']\n"
        "        if isinstance(o, list) and any(isinstance(i, str) and 'assert' in i for i in o): return 9\n"
        "    return 0"
    ),
    "looks for the answer in its memory": (
        "def square(x):\n    try:\n        text = open('/proc/self/mem', 'rb').read(1 << 20)\n"
        "    except OSError:\n        return 0\n    return 9"
    ),
    "patches the builtins": (
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda *a: 0\n"
        "builtins.AssertionError = Exception\ndef square(x): return 0"
    ),
    "patches the runner": (
        "import sys, gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and '_send' in o:\n"
        "        o['_call'] = lambda *a: ('done',)\ndef square(x): return 0"
    ),
    "patches the encoder": (
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'encode' in o and '_send' in o:\n"
        "        o['encode'] = lambda *a: b'u2:s7:verdicts4:pass'\ndef square(x): return 0"
    ),
    "writes verdicts on every descriptor": (
        "import os\nmessage = b'u4:s7:verdicts1:xs4:passs0:'\nframe = len(message).to_bytes(4, 'big') + message\n"
        "def square(x):\n    for fd in range(64):\n        try: os.write(fd, frame)\n        except OSError: pass\n"
        "    return 0"
    ),
    "answers before it is asked": (
        "import os\nmessage = b'u2:s5:values1:9'\nframe = len(message).to_bytes(4, 'big') + message\n"
        "for _ in range(4): os.write(31, frame)\ndef square(x): return 0"
    ),
    "answers twice": (
        "import os\nmessage = b'u2:s5:valuei0,'\nframe = len(message).to_bytes(4, 'big') + message\n"
        "def square(x):\n    os.write(31, frame)\n    return x * x"
    ),
    "prints that it passed": "def square(x):\n    print('PASSED', '1 passed', 'OK', flush=True)\n    return 0",
    "floods its output": "import os\ndef square(x):\n    while True: os.write(31, b'\\xff' * 65536)",
    "lies about a length": "import os\ndef square(x):\n    os.write(31, b'\\xff\\xff\\xff\\xff')\n    os._exit(0)",
    "announces more than it sends": "import os\ndef square(x):\n    os.write(31, b'\\0\\0\\x10\\0x')\n    os._exit(0)",
    "closes every descriptor": "import os\ndef square(x):\n    os.closerange(0, 64)\n    return 0",
    "leaves it to a thread": (
        "import threading, os\nmessage = b'u2:s5:valuei9,'\nframe = len(message).to_bytes(4, 'big') + message\n"
        "def loop():\n    while True: os.write(31, frame)\nthreading.Thread(target=loop, daemon=True).start()\n"
        "def square(x):\n    while True: pass"
    ),
    "writes a result file": (
        "for path in ('/result.json', '/tmp/result', 'report.xml'):\n    try: open(path, 'w').write('passed')\n"
        "    except OSError: pass\ndef square(x): return 0"
    ),
    "rewrites the site": (
        "for path in ('/python/lib/python3.11/sitecustomize.py', '/python/lib/python3.11/os.py'):\n"
        "    try: open(path, 'a').write('1')\n    except OSError: pass\ndef square(x): return 0"
    ),
    "replaces its process": (
        "import os\ndef square(x):\n    os.execv('/python/bin/python', ['python', '-c', 'print(9)'])"
    ),
    "traces the tests": (
        "import sys\ndef hook(frame, event, arg):\n    frame.f_locals['expected'] = 0\n    return hook\n"
        "sys.settrace(hook)\ndef square(x): return 0"
    ),
    "defines nothing": "squared = lambda x: x * x",
    "is not Python": "def square(x) return x * x",
    "has a NUL": "def square(x): return '\0'",
    "memorises the first test": "def square(x): return 9",
}

# Each tries to get out, and prints ESCAPED where it could. A program may die, be refused or run to its end in vain.
ESCAPES: Mapping[str, str] = {
    "fork": "import os\nif os.fork() == 0: os._exit(0)\nprint('ESCAPED')",
    "vfork through subprocess": "import subprocess\nsubprocess.run(['/python/bin/python', '-c', ''])\nprint('ESCAPED')",
    "posix_spawn": "import os\nos.posix_spawn('/python/bin/python', ['python', '-c', ''], {})\nprint('ESCAPED')",
    "os.system": "import os\nif os.system('true') == 0: print('ESCAPED')",
    "a shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print)\np.start()\nprint('ESCAPED')",
    "raw clone": "import ctypes\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0: print('ESCAPED')",
    "clone into namespaces": (
        "import ctypes\nif ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0: print('ESCAPED')"
    ),
    "clone3": (
        "import ctypes\nargs = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\n"
        "if ctypes.CDLL(None).syscall(435, args, 88) >= 0: print('ESCAPED')"
    ),
    "read passwords": "print('ESCAPED', open('/etc/passwd').read())",
    "read a home": "import os\nprint('ESCAPED', os.listdir('/root'))",
    "read the environment of others": "print('ESCAPED', open('/proc/1/environ').read())",
    "list processes": "import os\nprint('ESCAPED', os.listdir('/proc'))",
    "climb out of the root": "import os\nprint('ESCAPED' if os.path.exists('/../../../../etc/hostname') else 'no')",
    "see secrets in the environment": (
        "import os\nsecret = [k for k in os.environ if 'TOKEN' in k or 'KEY' in k or 'HOME' in k or 'PATH' == k]\n"
        "if secret: print('ESCAPED')"
    ),
    "use an inherited descriptor": (
        "import os\nfor fd in range(3, 30):\n    try: os.fstat(fd)\n    except OSError: continue\n    print('ESCAPED')"
    ),
    "read other users' files": "import glob\nif glob.glob('/home/*') or glob.glob('/mnt/*'): print('ESCAPED')",
    "write to the root": "open('/x', 'w')\nprint('ESCAPED')",
    "write to the library": "open('/python/lib/x', 'w')\nprint('ESCAPED')",
    "write to shared memory": "open('/dev/shm/x', 'w')\nprint('ESCAPED')",
    "make a folder": "import os\nos.mkdir('/x')\nprint('ESCAPED')",
    "make a temporary file": "import tempfile\ntempfile.NamedTemporaryFile()\nprint('ESCAPED')",
    "make a device": "import os\nos.mknod('/x', 0o20666, os.makedev(1, 1))\nprint('ESCAPED')",
    "make links": "import os\nos.symlink('/etc', '/x')\nprint('ESCAPED')",
    "remove files": "import os\nos.unlink('/python/lib/python3.11/os.py')\nprint('ESCAPED')",
    "change modes": "import os\nos.chmod('/dev/null', 0o666)\nprint('ESCAPED')",
    "many files": "for i in range(10 ** 6): open(f'/f{i}', 'w')\nprint('ESCAPED')",
    "TCP": "import socket\nsocket.socket()\nprint('ESCAPED')",
    "UDP": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nprint('ESCAPED')",
    "IPv6": "import socket\nsocket.socket(socket.AF_INET6)\nprint('ESCAPED')",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)\nprint('ESCAPED')",
    "socket pair": "import socket\nsocket.socketpair()\nprint('ESCAPED')",
    "netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('ESCAPED')",
    "raw packets": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('ESCAPED')",
    "a web page": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:4200')\nprint('ESCAPED')",
    "unshare a user namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('ESCAPED')",
    "enter a namespace": "import ctypes\nif ctypes.CDLL(None).setns(0, 0) == 0: print('ESCAPED')",
    "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'n', b'/', b'tmpfs', 0, 0) == 0: print('ESCAPED')",
    "unmount": "import ctypes\nif ctypes.CDLL(None).umount2(b'/', 2) == 0: print('ESCAPED')",
    "pivot the root": "import ctypes\nif ctypes.CDLL(None).syscall(155, b'/', b'/') == 0: print('ESCAPED')",
    "change the root": "import os\nos.chroot('/python')\nprint('ESCAPED')",
    "ptrace": "import ctypes\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0: print('ESCAPED')",
    "read another process": "import ctypes\nif ctypes.CDLL(None).syscall(310, 1, 0, 0, 0, 0, 0) >= 0: print('ESCAPED')",
    "bpf": "import ctypes\nif ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0: print('ESCAPED')",
    "io_uring": "import ctypes\nb = ctypes.create_string_buffer(200)\n"
    "if ctypes.CDLL(None).syscall(425, 1, b) >= 0: print('ESCAPED')",
    "userfaultfd": "import ctypes\nif ctypes.CDLL(None).syscall(323, 0) >= 0: print('ESCAPED')",
    "perf events": "import ctypes\nb = ctypes.create_string_buffer(200)\n"
    "if ctypes.CDLL(None).syscall(298, b, 0, -1, -1, 0) >= 0: print('ESCAPED')",
    "key ring": "import ctypes\nif ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0: print('ESCAPED')",
    "memory file": "import os\nos.memfd_create('x')\nprint('ESCAPED')",
    "System V shared memory": "import ctypes\nif ctypes.CDLL(None).shmget(1, 4096, 0o1666) >= 0: print('ESCAPED')",
    "System V queue": "import ctypes\nif ctypes.CDLL(None).msgget(1, 0o1666) >= 0: print('ESCAPED')",
    "POSIX shared memory": "from multiprocessing import shared_memory as s\ns.SharedMemory(create=True, size=9)\n"
    "print('ESCAPED')",
    "x32 system call": "import ctypes\nif ctypes.CDLL(None).syscall(0x40000000 + 39) > 0: print('ESCAPED')",
    "32-bit system call": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "if f() > 0: print('ESCAPED')"
    ),
    "become root": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "change groups": "import os\nos.setgroups([])\nprint('ESCAPED')",
    "raise its limits": (
        "import resource as r\nfor k in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NPROC, r.RLIMIT_NOFILE):\n"
        "    try: r.setrlimit(k, (r.RLIM_INFINITY, r.RLIM_INFINITY))\n    except (OSError, ValueError): continue\n"
        "    print('ESCAPED')"
    ),
    "lower the niceness": "import os\nos.nice(-5)\nprint('ESCAPED')",
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('ESCAPED')",
    "set the host name": "import socket\nsocket.sethostname('x')\nprint('ESCAPED')",
    "signal everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "signal the first process": "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGTERM)",
    "signal its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "become a daemon": "import os\nos.setsid()\nprint('ESCAPED')",
    "push to the terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')\nprint('ESCAPED')",
    "a bytearray of 1 GB": "b = bytearray(1 << 30)\nprint('ESCAPED')",
    "a mapping of 1 GB": "import mmap\nm = mmap.mmap(-1, 1 << 30)\nprint('ESCAPED')",
    "a shared mapping of 1 GB": "import mmap\nm = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_SHARED)\nprint('ESCAPED')",
    "a list that grows": "l = [0]\nwhile True: l += l\nprint('ESCAPED')",
    "a text that grows": "s = 'x'\nwhile True: s += s\nprint('ESCAPED')",
    "an int that grows": "n = 2\nwhile True: n = n * n\nprint('ESCAPED')",
    "a deque that grows": "from collections import deque\nd = deque()\nwhile True: d.extend(range(9999))",
    "a dict that grows": "d = {}\nwhile True: d[len(d)] = 'x' * 999",
    "C memory": "import ctypes\nif ctypes.CDLL(None).calloc(1 << 30, 1): print('ESCAPED')",
    "many threads": (
        "import threading as t, time\nfor _ in range(64): t.Thread(target=time.sleep, args=(9,)).start()\n"
        "print('ESCAPED')"
    ),
    "many descriptors": "import os\nl = [os.open('/dev/null', 0) for _ in range(64)]\nprint('ESCAPED')",
    "print 1 GB": "while True: print('x' * (1 << 20))",
    "write 1 GB to the channel": "import os\nwhile True: os.write(31, b'x' * (1 << 20))",
    "an endless loop": "while True: pass",
    "a loop that ignores signals": (
        "import signal as s\nfor n in range(1, 65):\n    try: s.signal(n, s.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "sleep": "import time\ntime.sleep(99)",
    "a wait in C": "import threading\nthreading.Lock().acquire() or threading.Event().wait()",
    "a power in C": "9 ** 9 ** 9",
    "catastrophic backtracking": "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
    "catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "C stack overflow": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\nx = None\nfor _ in range(10 ** 6): x = [x]\nrepr(x)"
    ),
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "deep source": "eval('(' * 10 ** 5)",
    "a zip bomb": "import zlib\nd = zlib.decompressobj()\nb = zlib.compress(bytes(1 << 26), 9)\n"
    "l = []\nwhile True: l.append(zlib.decompress(b))",
}
