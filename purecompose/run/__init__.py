"""Whole training runs: the loop around the step, evaluation, stopping, checkpoints."""
