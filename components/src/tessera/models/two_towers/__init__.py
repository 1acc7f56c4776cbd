"""What families of two towers share: texts and images never meet, and an image's one row is its vector."""
