"""Audit: recompute sampled rollouts from text to gradient by a slow path.

Nothing here computes a result: a check only stops a run or logs a message. Therefore no cache key counts this folder
(``tasks/store/code_hash.py``), and the history of a run has no metric of it.
"""
