"""What a request is known by."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os
from tessera.frontend.exchange import request_id_of

for _ in range(2):
    if not os.fork():
        print(request_id_of({}), flush=True)
        os._exit(0)
    os.wait()
print(request_id_of({}))
"""


def test_processes_that_are_forked_have_ids_of_their_own() -> None:
    words = [sys.executable, "-c", FORKED]
    ids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert len(set(ids)) == 3 and {len(each) for each in ids} == {32}
