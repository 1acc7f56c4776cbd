"""Processes of the service that begin as a fork, so that hundreds of them share one import of torch.

``popen.Forked`` is a ``subprocess.Popen`` whose program is a module of the service. A ``server`` beside the
tests has imported what the service imports, has one thread and has begun nothing. A fork of it becomes the
``program``: the same arguments, environment, descriptors, signals and parent that ``exec`` would give it. A
launcher that began like this forks its children itself.
"""
