"""Checkpoints in FP8 with static scales: ``inputs`` calibrate a ``tower``, and ``checkpoint`` writes it."""
