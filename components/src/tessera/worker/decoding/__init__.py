"""From image files to tiles: on threads of this process, or in processes that may crash."""

from tessera.worker.decoding.decoder import Decoder, ThreadDecoder, decode
from tessera.worker.decoding.pool import ProcessDecoder

__all__ = ["Decoder", "ProcessDecoder", "ThreadDecoder", "decode"]
