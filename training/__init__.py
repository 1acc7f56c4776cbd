"""The demonstration checkpoint: its synthetic world, how it is trained, and how its quality is measured.

The world is in ``training.world`` and ``training.render``, the run in ``training.train``, and the figures
in ``training.evaluate``, which asks a running service like any client does.
"""
