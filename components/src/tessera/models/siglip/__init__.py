"""SigLIP, and SigLIP 2 of fixed resolution: bidirectional towers, images pooled by a learned query."""
