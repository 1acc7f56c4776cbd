"""The clients' APIs: one module for each, which holds everything of it.

A module declares a body as a Struct with the client's own field names, from which ``body.py`` makes the
reader and the OpenAPI description, and has the translation of that, the writing of an answer, the shape of
errors and the routes. It ends in ``API``, a ``ClientApi``; ``APIS`` in ``frontend/app.py`` lists them all.
The pipeline knows none of them: it takes an ``EmbeddingsRequest`` (``request.py``) and gives a ``Result``
(``serving/pipeline.py``), or a ``ScoreRequest`` and gives ``Scores``.

What several APIs share: ``body.py`` (declared bodies), ``values.py`` (checked JSON values), ``content.py``
(texts, images, messages, roles), ``formats.py`` (vectors in every encoding), ``scores.py`` (queries and
documents, the order of an answer), ``schema.py`` (pieces of OpenAPI), ``endpoint.py`` (one request from its
body to its answer). ``rerank.py``
has the paths that several clients mean different things by; the body says whose it is.

``CONTRIBUTING.md`` lists the steps of adding one.
"""
