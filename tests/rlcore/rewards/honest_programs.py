# ruff: noqa: E501 - a program reads better whole than in pieces
"""Programs as people and models write them: right ones in many habits, and wrong ones that look like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Task = Mapping[str, Any]


def script(*tests: tuple[str, str], **more: Any) -> Task:
    return {"style": "stdin", "tests": [{"input": given, "output": wanted} for given, wanted in tests], **more}


def calls(name: str, *tests: tuple[list[Any], Any], **more: Any) -> Task:
    asked = [{"args": args, "output": wanted} for args, wanted in tests]
    return {"style": "call", "entry_point": name, "tests": asked, **more}


TOTAL = script(("3\n4 8 15\n", "27\n"), ("1\n-6\n", "-6\n"), ("4\n16 23 42 0\n", "81\n"))  # n, then n numbers
RIGHT_TOTALS = {
    "input": "n = int(input())\nprint(sum(map(int, input().split())))",
    "a function and a guard": "def main():\n    input()\n    print(sum(int(x) for x in input().split()))\n\n"
    "if __name__ == '__main__':\n    main()",
    "input is readline": "import sys\ninput = sys.stdin.readline\nn = int(input())\nprint(sum(map(int, input().split())))",
    "names from sys": "from sys import stdin, stdout\nstdin.readline()\nstdout.write(str(sum(map(int, stdin.readline().split()))))",
    "the whole input": "import sys\nn, *rest = map(int, sys.stdin.read().split())\nprint(sum(rest))",
    "bytes": "import sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.buffer.write(b'%d\\n' % sum(map(int, data[1:])))",
    "bytes line by line": "import sys\nread = sys.stdin.buffer.readline\nread()\nprint(sum(map(int, read().split())))",
    "open(0)": "n, *rest = open(0).read().split()\nprint(sum(map(int, rest)))",
    "open(0) as lines": "lines = list(open(0))\nprint(sum(map(int, lines[1].split())))",
    "open(0) unpacked": "(n,), a = [[*map(int, line.split())] for line in open(0)]\nprint(sum(a))",
    "open(0) in a with": "with open(0) as f:\n    f.readline()\n    print(sum(map(int, f.readline().split())))",
    "open(0, 'rb')": "print(sum(map(int, open(0, 'rb').read().split()[1:])))",
    "os.read": "import os\ndata = os.read(0, 10 ** 6).split()\nprint(sum(map(int, data[1:])))",
    "os.read to the end": "import os\ndata = b''\nwhile part := os.read(0, 7): data += part\n"
    "print(sum(map(int, data.split()[1:])))",
    "os.write": "import os\nx = sum(map(int, os.read(0, 999).split()[1:]))\nos.write(1, str(x).encode())",
    "os.write to the stream's number": "import os, sys\ninput()\n"
    "os.write(sys.stdout.fileno(), b'%d\\n' % sum(map(int, input().split())))",
    "open(1)": "input()\nx = sum(map(int, input().split()))\nopen(1, 'w').write(f'{x}\\n')",
    "open(1) that nobody closes": "out = open(1, 'w')\ninput()\nout.write(str(sum(map(int, input().split()))))",
    "stdout is another file": "import sys\nsys.stdout = open(1, 'w')\ninput()\nprint(sum(map(int, input().split())))",
    "fdopen": "import os\nout = os.fdopen(1, 'w')\ninput()\nprint(sum(map(int, input().split())), file=out)\nout.close()",
    "fileinput": "import fileinput\nlines = [line.strip() for line in fileinput.input()]\n"
    "print(sum(map(int, lines[1].split())))",
    "fileinput that is not read to its end": "import fileinput\nfor line in fileinput.input():\n"
    "    if fileinput.lineno() == 2:\n        print(sum(map(int, line.split())))\n        break",
    "lines of stdin": "import sys\nfor number, line in enumerate(sys.stdin):\n"
    "    if number == 1: print(sum(map(int, line.split())))",
    "input to its end": "rows = []\nwhile True:\n    try: rows.append(input())\n    except EOFError: break\n"
    "print(sum(map(int, rows[1].split())))",
    "an iterator of words": "import sys\nwords = iter(sys.stdin.read().split())\n"
    "print(sum(int(next(words)) for _ in range(int(next(words)))))",
    "a generator of words": "import sys\ndef words():\n    for line in sys.stdin: yield from line.split()\n"
    "w = words()\nn = int(next(w))\nprint(sum(int(next(w)) for _ in range(n)))",
    "a thread with a large stack": "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 27)\n"
    "def main():\n    n = int(input())\n    a = list(map(int, input().split()))\n"
    "    def add(i): return 0 if i == n else a[i] + add(i + 1)\n    print(add(0))\n"
    "t = threading.Thread(target=main)\nt.start()\nt.join()",
    "a thread of half a gigabyte": "import threading\nthreading.stack_size(512 * 1024 * 1024)\ndef main():\n"
    "    input()\n    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()",
    "a thread that nobody waits for": "import threading\ndef main():\n    input()\n"
    "    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
    "a deep recursion": "import sys\nsys.setrecursionlimit(300_000)\ninput()\na = list(map(int, input().split()))\n"
    "def down(n): return 0 if n == 0 else down(n - 1)\nprint(sum(a) + down(50_000))",
    "a limit on the stack": "import resource, sys\ntry: resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, 1 << 26))\n"
    "except (ValueError, OSError): pass\ninput()\nprint(sum(map(int, input().split())))",
    "an exit handler": "import atexit\nout = []\natexit.register(lambda: print('\\n'.join(out)))\ninput()\n"
    "out.append(str(sum(map(int, input().split()))))",
    "a stream that is flushed at exit": "import atexit, io, os, sys\nbuffer = io.BytesIO()\n"
    "sys.stdout.write = lambda s: buffer.write(s.encode())\n"
    "atexit.register(lambda: os.write(1, buffer.getvalue()))\ninput()\nsys.stdout.write(str(sum(map(int, input().split()))))",
    "fast input and output of its own": (
        "import os, sys\nfrom io import BytesIO, IOBase\nclass FastIO(IOBase):\n    newlines = 0\n"
        "    def __init__(self, file):\n        self._fd = file.fileno()\n        self.buffer = BytesIO()\n"
        "        self.writable = 'x' in file.mode or 'r' not in file.mode\n"
        "        self.write = self.buffer.write if self.writable else None\n"
        "    def readline(self):\n        while self.newlines == 0:\n"
        "            b = os.read(self._fd, max(os.fstat(self._fd).st_size, 8192))\n"
        "            self.newlines = b.count(b'\\n') + (not b)\n            ptr = self.buffer.tell()\n"
        "            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)\n"
        "        self.newlines -= 1\n        return self.buffer.readline()\n"
        "    def flush(self):\n        if self.writable:\n            os.write(self._fd, self.buffer.getvalue())\n"
        "            self.buffer.truncate(0), self.buffer.seek(0)\n"
        "class Wrapper(IOBase):\n    def __init__(self, file):\n        self.buffer = FastIO(file)\n"
        "        self.flush = self.buffer.flush\n        self.writable = self.buffer.writable\n"
        "        self.write = lambda s: self.buffer.write(s.encode('ascii'))\n"
        "        self.readline = lambda: self.buffer.readline().decode('ascii')\n"
        "sys.stdin, sys.stdout = Wrapper(sys.stdin), Wrapper(sys.stdout)\n"
        "input = lambda: sys.stdin.readline().rstrip()\nn = int(input())\nprint(sum(map(int, input().split())))"
    ),
    "words on stderr": "import sys\nprint('reading', file=sys.stderr)\ninput()\na = input().split()\n"
    "sys.stderr.write(repr(a))\nprint(sum(map(int, a)))",
    "a warning": "import warnings\nwarnings.warn('slow')\ninput()\nprint(sum(map(int, input().split())))",
    "logging": "import logging\nlogging.basicConfig(level=logging.DEBUG)\nlogging.debug('x')\ninput()\n"
    "print(sum(map(int, input().split())))",
    "exit()": "input()\nprint(sum(map(int, input().split())))\nexit()",
    "sys.exit(0)": "import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    "raise SystemExit": "input()\nprint(sum(map(int, input().split())))\nraise SystemExit",
    "quit in a function": "def main():\n    input()\n    print(sum(map(int, input().split())))\n    quit()\nmain()",
    "blanks at the end": "input()\nprint(sum(map(int, input().split())), ' ')\nprint()",
    "no end of line": "input()\nprint(sum(map(int, input().split())), end='')",
    "a carriage return": "input()\nprint(sum(map(int, input().split())), end='\\r\\n')",
    "a blank in front": "input()\nprint('', sum(map(int, input().split())))",
    "a float that is whole": "input()\nprint(sum(map(float, input().split())))",
    "reduce and lambdas": "from functools import reduce\ninput()\nprint(reduce(lambda a, b: a + b, map(int, input().split())))",
    "exec": "exec('input()\\nprint(sum(map(int, input().split())))')",
    "a class": "class Solver:\n    def __init__(self):\n        self.n = int(input())\n        self.a = [*map(int, input().split())]\n"
    "    def solve(self): return sum(self.a)\nprint(Solver().solve())",
    "a dataclass": "from dataclasses import dataclass, field\n@dataclass\nclass Box:\n    items: list[int] = field(default_factory=list)\n"
    "input()\nprint(sum(Box([*map(int, input().split())]).items))",
    "an accumulate": "from itertools import accumulate\ninput()\nprint(*list(accumulate(map(int, input().split())))[-1:])",
    "a deque": "from collections import deque\ninput()\nq, s = deque(map(int, input().split())), 0\nwhile q: s += q.popleft()\nprint(s)",
    "Decimal": "from decimal import Decimal, getcontext\ngetcontext().prec = 50\ninput()\nprint(sum(map(Decimal, input().split())))",
    "Fraction": "from fractions import Fraction\ninput()\nprint(sum(map(Fraction, input().split())))",
    "type hints": "from typing import List\ndef solve(a: List[int]) -> int:\n    return sum(a)\ninput()\nprint(solve([int(x) for x in input().split()]))",
    "future annotations": "from __future__ import annotations\ndef f(a: Whatever) -> Other: return sum(a)\ninput()\nprint(f(map(int, input().split())))",
    "a walrus and a match": "input()\nmatch [int(x) for x in input().split()]:\n    case []: print(0)\n    case a if (s := sum(a)) or True: print(s)",
    "print is flushed": "import functools\nprint = functools.partial(print, flush=True)\ninput()\nprint(sum(map(int, input().split())))",
    "stdin is another text": "import io, sys\nsys.stdin = io.StringIO(sys.stdin.read())\ninput()\nprint(sum(map(int, input().split())))",
    "stdin is reconfigured": "import sys\nsys.stdin.reconfigure(encoding='utf-8')\nsys.stdout.reconfigure(line_buffering=True)\n"
    "input()\nprint(sum(map(int, input().split())))",
    "the buffers are wrapped anew": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\n"
    "sys.stdin = io.TextIOWrapper(sys.stdin.buffer)\ninput()\nprint(sum(map(int, input().split())))",
    "a writer of another encoding": "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer)\n"
    "input()\nprint(sum(map(int, input().split())))",
    "the usual end of a pipe": "from signal import SIG_DFL, SIGPIPE, signal\nsignal(SIGPIPE, SIG_DFL)\ninput()\n"
    "print(sum(map(int, input().split())))",
    "stdin through fdopen": "import os\nlines = os.fdopen(0)\nlines.readline()\nprint(sum(map(int, lines.readline().split())))",
    "an exit with a number": "import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.exit(1)",
    "a daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\ninput()\n"
    "print(sum(map(int, input().split())))",
    "redirect_stdout": "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    input()\n"
    "    print(sum(map(int, input().split())))\nprint(out.getvalue(), end='')",
    "a thread pool": "from concurrent.futures import ThreadPoolExecutor\ninput()\nwith ThreadPoolExecutor(4) as pool:\n"
    "    print(sum(pool.map(int, input().split())))",
    "a global that is kept": "total = 0\ndef add(x):\n    global total\n    total += x\ninput()\nfor x in input().split(): add(int(x))\nprint(total)",
    "argv": "import sys\nassert len(sys.argv) == 1\ninput()\nprint(sum(map(int, input().split())))",
    "a local judge's file": "import os, sys\nif os.path.exists('input.txt'): sys.stdin = open('input.txt')\n"
    "input()\nprint(sum(map(int, input().split())))",
    "descriptors that are copied": "import os\nspare = os.dup(1)\nown = os.dup(0)\nos.read(own, 2)\n"
    "os.write(spare, str(sum(map(int, open(own).read().split()))).encode())",
    "stdout is closed": "import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.stdout.close()",
}  # fmt: skip
WRONG_TOTALS = {
    "the first": "input()\nprint(input().split()[0])",
    "a constant": "print(27)",
    "a word more": "input()\nprint('Answer:', sum(map(int, input().split())))",
    "the answer on stderr": "import sys\ninput()\nprint(sum(map(int, input().split())), file=sys.stderr)",
    "twice": "input()\nx = sum(map(int, input().split()))\nprint(x)\nprint(x)",
    "nearly": "input()\nprint(sum(map(int, input().split())) + 1e-7)",
    "raises behind it": "input()\nprint(sum(map(int, input().split())))\n1 / 0",
    "raises in its exit handler too late to print": "import atexit\natexit.register(lambda: 1 / 0)\ninput()",
    "a prompt": "n = input('n: ')\nprint(sum(map(int, input().split())))",
    "the wrong name": "input()\nprint(sum(map(int, inputs().split())))",
    "never ends": "import threading\nthreading.Thread(target=threading.Event().wait).start()\ninput()\nprint(sum(map(int, input().split())))",
    "needs an import": "input()\nprint(reduce(lambda a, b: a + b, map(int, input().split())))",
    "returns in place of printing": "def main():\n    input()\n    return sum(map(int, input().split()))\nmain()",
}  # fmt: skip

RATIO = script(("1 3\n", "0.333333333\n"), ("7 2\n", "3.5\n"), ("-1 4\n", "-0.25\n"), ("0 5\n", "0.0\n"))
RIGHT_RATIOS = {
    "as it comes": "a, b = map(int, input().split())\nprint(a / b)",
    "9 digits": "a, b = map(int, input().split())\nprint('%.9f' % (a / b))",
    "12 digits": "a, b = map(int, input().split())\nprint(f'{a / b:.12f}')",
    "6 digits": "a, b = map(int, input().split())\nprint('{:.6f}'.format(a / b))",
    "scientific": "a, b = map(int, input().split())\nprint(f'{a / b:.10e}')",
    "round": "a, b = map(int, input().split())\nprint(round(a / b, 7))",
    "minus zero": "a, b = map(int, input().split())\nprint(-(-a / b))",
    "Decimal": "from decimal import *\na, b = map(Decimal, input().split())\nprint(a / b)",
}
WRONG_RATIOS = {
    "3 digits": "a, b = map(int, input().split())\nprint('%.3f' % (a / b))",
    "whole": "a, b = map(int, input().split())\nprint(a // b)",
    "a fraction": "from fractions import Fraction\na, b = map(int, input().split())\nprint(Fraction(a, b))",
    "no sign": "a, b = map(int, input().split())\nprint(abs(a / b))",
    "percent": "a, b = map(int, input().split())\nprint(f'{a / b:%}')",
    "a comma": "a, b = map(int, input().split())\nprint(str(a / b).replace('.', ','))",
}

ORDER = script(("3\n", "1 2 3\n"), ("1\n", "1\n"), ("5\n", "1 2 3 4 5\n"))
RIGHT_ORDERS = {
    "unpacked": "print(*range(1, int(input()) + 1))",
    "joined": "print(' '.join(map(str, range(1, int(input()) + 1))))",
    "end=' '": "for i in range(int(input())): print(i + 1, end=' ')",
    "end='  '": "for i in range(int(input())): print(i + 1, end='  ')",
    "tabs": "print(*range(1, int(input()) + 1), sep='\\t')",
    "a comprehension": "[print(i, end=' ') for i in range(1, int(input()) + 1)]",
}
WRONG_ORDERS = {
    "a list": "print(list(range(1, int(input()) + 1)))",
    "commas": "print(*range(1, int(input()) + 1), sep=', ')",
    "a line each": "print(*range(1, int(input()) + 1), sep='\\n')",
    "run together": "print(*range(1, int(input()) + 1), sep='')",
    "from 0": "print(*range(int(input())))",
}

PYRAMID = script(("2\n", " *\n***\n"), ("3\n", "  *\n ***\n*****\n"))
RIGHT_PYRAMIDS = {"centred": "n = int(input())\nfor i in range(n): print(('*' * (2 * i + 1)).center(2 * n - 1))"}
WRONG_PYRAMIDS = {"to the left": "n = int(input())\nfor i in range(n): print('*' * (2 * i + 1))"}

POWER = script(("4400\n", "9" * 4400 + "\n"), ("2\n", "99\n"))
RIGHT_POWERS = {"an integer": "print(10 ** int(input()) - 1)", "a text": "print('9' * int(input()))"}
WRONG_POWERS = {"a float": "print(1e300)", "off by one": "print(10 ** int(input()) - 2)"}

LONG = script(("120000\n", "\n".join(map(str, range(120_000))) + "\n"), ("2\n", "0\n1\n"))  # 700 kB
RIGHT_LONGS = {
    "print": "for i in range(int(input())): print(i)",
    "joined": "import sys\nsys.stdout.write('\\n'.join(map(str, range(int(input())))))",
}
WRONG_LONGS = {"one less": "for i in range(int(input()) - 1): print(i)"}

MANY = script((f"{300_000}\n{' '.join(map(str, range(300_000)))}\n", "44999850000\n"), ("2\n7 8\n", "15\n"))  # 2 MB
RIGHT_MANY = {"input": RIGHT_TOTALS["input"], "the whole input": RIGHT_TOTALS["the whole input"]}
WRONG_MANY = {"half": "input()\nprint(sum(map(int, input()[:1_000_000].split())))"}

PAIR = calls("find_pair", ([[3, 9, 4], 13], [1, 2]), ([[5, 5], 10], [0, 1]), ([[1, 2], 9], []))
_PAIR = "for i in range(len(a)):\n{0}    for j in range(i + 1, len(a)):\n{0}        if a[i] + a[j] == t: return {1}\n{0}return {2}"
RIGHT_PAIRS = {
    "a function": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "[]"),
    "a tuple": "def find_pair(a, t):\n    " + _PAIR.format("    ", "(i, j)", "()"),
    "class Solution": "class Solution:\n    def find_pair(self, a, t):\n        " + _PAIR.format(" " * 8, "[i, j]", "[]"),
    "class Solution with hints": "class Solution:\n    def find_pair(self, a: List[int], t: Optional[int]) -> List[int]:\n        "
    + _PAIR.format(" " * 8, "[i, j]", "[]"),
    "a static method": "class Solution(object):\n    @staticmethod\n    def find_pair(a, t):\n        "
    + _PAIR.format(" " * 8, "[i, j]", "[]"),
    "usual names": "def find_pair(a, t):\n    seen = defaultdict(list)\n    best = inf\n    q = deque()\n    heappush([], 1)\n"
    "    for j, x in enumerate(a):\n        if seen[t - x]: return [seen[t - x][0], j]\n        seen[x].append(j)\n    return []",
    "usual modules": "def find_pair(a, t):\n    for i, j in itertools.combinations(range(len(a)), 2):\n"
    "        if math.isclose(a[i] + a[j], t): return [i, j]\n    return list(collections.Counter())",
    "a deque": "from collections import deque\ndef find_pair(a, t):\n    " + _PAIR.format("    ", "deque([i, j])", "deque()"),
    "a range": "def find_pair(a, t):\n    " + _PAIR.format("    ", "range(i, j + 1, max(1, j - i))", "range(0)"),
    "keys": "def find_pair(a, t):\n    " + _PAIR.format("    ", "{i: 0, j: 0}.keys()", "{}.keys()"),
    "a namedtuple": "from collections import namedtuple\nP = namedtuple('P', 'i j')\ndef find_pair(a, t):\n    "
    + _PAIR.format("    ", "P(i, j)", "()"),
    "it tries itself": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "[]")
    + "\n\nprint(find_pair([1, 2], 3))\nassert find_pair([1, 2], 3) == [0, 1]",
    "it asks for input": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "[]")
    + "\n\nn = int(input())\nprint(find_pair(list(map(int, input().split())), n))",
    "it has a main": "import sys\ndef find_pair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "[]")
    + "\n\nif __name__ == '__main__':\n    print(find_pair([int(sys.argv[1])], int(sys.argv[2])))",
    "a lambda": "find_pair = lambda a, t: next(([i, j] for i in range(len(a)) for j in range(i + 1, len(a)) if a[i] + a[j] == t), [])",
    "a cache": "from functools import lru_cache\ndef find_pair(a, t):\n    @lru_cache(None)\n    def at(i, j):\n"
    "        if i >= len(a): return ()\n        if j >= len(a): return at(i + 1, i + 2)\n"
    "        return (i, j) if a[i] + a[j] == t else at(i, j + 1)\n    return list(at(0, 1))",
    "numbers of another type": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[float(i), float(j)]", "[]"),
}  # fmt: skip
WRONG_PAIRS = {
    "another order": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[j, i]", "[]"),
    "None": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "None"),
    "a constant": "def find_pair(a, t): return [1, 2]",
    "a text": "def find_pair(a, t):\n    " + _PAIR.format("    ", "str([i, j])", "'[]'"),
    "another name": "def findPair(a, t):\n    " + _PAIR.format("    ", "[i, j]", "[]"),
    "another class": "class Answer:\n    def find_pair(self, a, t):\n        " + _PAIR.format(" " * 8, "[i, j]", "[]"),
    "printed": "def find_pair(a, t):\n    " + _PAIR.format("    ", "print([i, j])", "print([])"),
    "truth": "def find_pair(a, t):\n    " + _PAIR.format("    ", "[True, 2]", "[]"),
}

MEAN = calls("mean", ([[0.1, 0.2, 0.3]], 0.2), ([[1, 2]], 1.5), ([[4]], 4.0))
RIGHT_MEANS = {
    "sum": "def mean(a): return sum(a) / len(a)",
    "fsum": "import math\ndef mean(a): return math.fsum(a) / len(a)",
    "statistics": "import statistics\ndef mean(a): return statistics.mean(a)",
}
WRONG_MEANS = {
    "whole": "def mean(a): return sum(a) // len(a)",
    "rounded": "def mean(a): return round(sum(a) / len(a))",
    "the median": "def mean(a): return sorted(a)[0]",
    "a text": "def mean(a): return str(sum(a) / len(a))",
}

COUNTS = calls("counts", ([[3, 3, 5]], {"3": 2, "5": 1}), ([[]], {}), ([[7]], {"7": 1}))
RIGHT_COUNTS = {
    "Counter": "from collections import Counter\ndef counts(a): return Counter(a)",
    "a dict": "def counts(a): return {x: a.count(x) for x in a}",
    "defaultdict": "from collections import defaultdict\ndef counts(a):\n    d = defaultdict(int)\n    for x in a: d[x] += 1\n    return d",
    "keys of text": "def counts(a): return {str(x): a.count(x) for x in a}",
}
WRONG_COUNTS = {
    "pairs": "def counts(a): return [(x, a.count(x)) for x in a]",
    "both keys": "def counts(a): return {k: a.count(x) for x in a for k in (x, str(x))}",
    "ones": "def counts(a): return {x: 1 for x in a}",
}

ODD = calls("odd", *[([n], n % 2 == 1) for n in range(6)])
RIGHT_ODD = {"a remainder": "def odd(n): return n % 2 == 1", "bits": "def odd(n): return bool(n & 1)"}
_TURNS = "k = {}\ndef odd(n):\n    global k\n    k += 1\n    return {}"
WRONG_ODD = {
    "by turns": _TURNS.format(0, "k % 2 == 0"),
    "by turns from another start": _TURNS.format(1, "k % 2 == 1"),
    "always": "def odd(n): return True",
    "a number": "def odd(n): return n % 2",
    "by a generator": "import itertools\nk = itertools.cycle([False, True])\ndef odd(n): return next(k)",
}
ODD_LINES = script(*[(f"{n}\n", "odd\n" if n % 2 else "even\n") for n in range(6)])
RIGHT_ODD_LINES = {"a remainder": "print('odd' if int(input()) % 2 else 'even')"}
WRONG_ODD_LINES = {
    "by turns": "import sys\nsys.turn = getattr(sys, 'turn', 0) + 1\nprint('even' if sys.turn % 2 else 'odd')",
    "always": "print('odd')",
}

_CHECK = "def check(input, answer, output):\n    a, b = map(int, answer.split())\n    return a + b == int(input) and a > 0 < b"
SPLIT = script(("7\n", "3 4\n"), ("2\n", "1 1\n"), ("9\n", "4 5\n"), checker=_CHECK)  # any two positive summands
RIGHT_SPLITS = {
    "one and the rest": "n = int(input())\nprint(1, n - 1)",
    "halves": "n = int(input())\nprint(n - n // 2, n // 2)",
}
WRONG_SPLITS = {
    "nothing": "n = int(input())\nprint(0, n)",
    "no numbers": "print('a b')",
    "no output": "pass",
    "a verdict": "print('True')",
    "ends": "import os\nos._exit(0)",
}
_MEMBER = (
    "def check(input, answer, output):\n    return answer in [word for word in input[0] if len(word) == len(output)]"
)
LONGEST = calls("longest", ([["ab", "cd", "e"]], "ab"), ([["x"]], "x"), checker=_MEMBER)  # any of the longest
RIGHT_LONGEST = {
    "the last": "def longest(words): return sorted(words, key=len)[-1]",
    "a method": "class Solution:\n    def longest(self, words): return max(words, key=len)",
}
WRONG_LONGEST = {
    "a short one": "def longest(words): return min(words, key=len)",
    "all": "def longest(words): return words",
    "an object that equals everything": "class A(str):\n    def __eq__(s, o): return True\ndef longest(words): return A('q')",
    "raises": "def longest(words): raise AssertionError",
}

TASKS: Mapping[str, tuple[Task, Mapping[str, str], Mapping[str, str]]] = {
    "a total": (TOTAL, RIGHT_TOTALS, WRONG_TOTALS),
    "a ratio": (RATIO, RIGHT_RATIOS, WRONG_RATIOS),
    "numbers in order": (ORDER, RIGHT_ORDERS, WRONG_ORDERS),
    "a pyramid": (PYRAMID, RIGHT_PYRAMIDS, WRONG_PYRAMIDS),
    "many digits": (POWER, RIGHT_POWERS, WRONG_POWERS),
    "much output": (LONG, RIGHT_LONGS, WRONG_LONGS),
    "much input": (MANY, RIGHT_MANY, WRONG_MANY),
    "a pair": (PAIR, RIGHT_PAIRS, WRONG_PAIRS),
    "a mean": (MEAN, RIGHT_MEANS, WRONG_MEANS),
    "counts": (COUNTS, RIGHT_COUNTS, WRONG_COUNTS),
    "odd": (ODD, RIGHT_ODD, WRONG_ODD),
    "odd or even": (ODD_LINES, RIGHT_ODD_LINES, WRONG_ODD_LINES),
    "two summands": (SPLIT, RIGHT_SPLITS, WRONG_SPLITS),
    "a longest word": (LONGEST, RIGHT_LONGEST, WRONG_LONGEST),
}
