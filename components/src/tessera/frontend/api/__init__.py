"""OpenAI's API, the routes about the service, and what the APIs of all clients are made of.

An API is one module, here or in a package beside the core.

A module declares a body as a Struct with the client's own field names, from which ``body.py`` makes the
reader and the OpenAPI description, and has the translation of that, the writing of an answer, the shape of
errors and the routes. It ends in ``API``, a ``ClientApi``, which ``frontend/app.py`` finds by its entry point
in the group ``tessera.apis``.
The pipeline knows none of them: it takes an ``EmbeddingsRequest`` (``request.py``) and gives a ``Result``
(``serving/pipeline.py``), or a ``ScoreRequest`` and gives ``Scores``.

What several APIs share: ``body.py`` (declared bodies), ``values.py`` (checked JSON values), ``content.py``
(texts, images, messages, roles), ``formats.py`` (vectors in every encoding), ``schema.py`` (pieces of
OpenAPI), ``endpoint.py`` (one request from its body to its answer).

``CONTRIBUTING.md`` lists the steps of adding one.
"""
