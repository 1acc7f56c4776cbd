"""Reads the files of a checkpoint directory, whatever family it is of; only ``loading`` needs torch."""
