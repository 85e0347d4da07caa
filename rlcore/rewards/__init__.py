"""Graders: from rollouts to scores. :mod:`rlcore.rewards.table` names them and builds the reward of a run.

This file imports nothing: the grader processes load modules of this package and must start without torch.
"""
