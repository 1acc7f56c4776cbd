"""SigLIP 2 of any aspect ratio (NaFlex); its checkpoints of fixed resolution are of the family ``siglip``."""
