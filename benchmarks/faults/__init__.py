"""Silent faults, injected one at a time into small real runs: detection, number of steps, and message.

``make attack-run`` prints the table of docs/reliability.md. A fault is a small patch of a real run with 30 k
parameters.
"""
