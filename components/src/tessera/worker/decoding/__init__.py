"""From image files to pixels: on threads of this process, or in processes that may crash."""

from tessera.worker.decoding.pool import Decoder, ProcessDecoder, ThreadDecoder

__all__ = ["Decoder", "ProcessDecoder", "ThreadDecoder"]
