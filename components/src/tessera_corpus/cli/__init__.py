"""The commands ``tessera embed`` and ``tessera search``, a file for each."""
