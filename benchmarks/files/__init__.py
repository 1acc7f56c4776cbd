"""``python -m benchmarks.files FOLDER``: how files of a folder are read, beside programs that show them."""
