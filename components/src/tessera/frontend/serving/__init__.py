"""From a validated request to vectors: images, prompts, dispatch, routing, result cache."""
