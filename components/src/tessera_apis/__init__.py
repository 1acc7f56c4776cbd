"""The APIs of clients other than OpenAI's: one module for each, found by an entry point of ``tessera.apis``.

A module ends in ``API``, a ``ClientApi``; ``tessera.frontend.api`` describes its other parts. ``scores``
reads and writes what the routes for scores share. ``rerank`` has the paths that several clients mean
different things by; the body says whose it is.
"""
