"""The clients' APIs: one module for each, which holds everything of it.

A module has the fields of a request, their reading, the writing of an answer, the shape of errors, the
OpenAPI description and the routes. It ends in ``API``, a ``ClientApi``; ``APIS`` in ``frontend/app.py`` lists
them all. The pipeline knows none of them: it takes an ``EmbeddingsRequest`` (``request.py``) and gives a
``Result`` (``serving/pipeline.py``), or a ``ScoreRequest`` and gives ``Scores``.

What several APIs share: ``values.py`` (checked JSON values), ``content.py`` (texts, images, messages, roles),
``formats.py`` (vectors in every encoding), ``scores.py`` (queries and documents, the order of an answer),
``schema.py`` (pieces of OpenAPI), ``endpoint.py`` (one request from its body to its answer). ``rerank.py``
has the paths that several clients mean different things by; the body says whose it is.

To add a client's API:

1. ``frontend/api/NAME.py``: a ``_translate`` from the parsed body to a ``Translated`` (the request, a
   function that writes its ``Result``, and the forms that rows have in it) or to ``TranslatedScores``,
   ``_routes`` with one route for each path, and ``API``. An error shape of its own goes into
   ``ClientApi(error=...)``; metrics, keys, admission and the log line need nothing.
2. ``frontend/app.py``: one line in ``APIS``.
3. ``tests/clients/test_NAME.py``: the client's own package against a running service; its paths and fields
   are fuzzed by the tests that read ``/openapi.json``. The package goes into the ``dev`` extra.
4. ``docs/api.md``: its row among the routes.
"""
