"""The files of the package that one request passes, in order."""
