"""An iteration proves itself, from text to gradient: what is drawn by chance is worked out again by a slow second path.

Nothing here computes a part of a result. A check can stop a run, or say something of it, and that is all; so this
folder is in no key (``tasks/store/code_hash.py``), and no figure of it is in a run's history.
"""
