"""KServe v2 (the Open Inference Protocol), with Triton's additions, over HTTP and gRPC.

``door`` is what the core finds by its entry point, ``frontend`` what a frontend opens, with its ``settings``.
``tensors`` reads and writes tensors. ``models`` has what a served model offers under which names: tensors of
token ids and pixels as Triton repositories take them, or texts and images in BYTES. ``inference`` takes one
call of either transport through admission and the pipeline; ``line`` is where calls wait for room. ``http``
and ``grpc_server`` are the transports, ``messages.proto`` what travels by the second.
"""
