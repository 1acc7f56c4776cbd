"""A worker as a model of Dynamo's own: what its stock frontend sends, translated and embedded here.

It puts the frontend's translation in front of a worker's service: nothing else in a worker's process knows
the frontend's package. It knows neither HTTP nor what the service is.
"""

from tessera.dynamo_model.model import DynamoModel, names_of

__all__ = ["DynamoModel", "names_of"]
