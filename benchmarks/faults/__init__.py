"""Silent faults, injected one at a time into small real runs: which are caught, after how many steps, by which words?

``make attack-run`` prints the table of docs/reliability.md. A fault is a small patch; the run around it is a real one:
a model of 30 k parameters that has learned to answer sums, the built-in engine, the library's loop.
"""
