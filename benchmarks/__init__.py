"""What a user runs to see how fast Tessera is on their own machine."""
