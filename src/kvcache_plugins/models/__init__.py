"""Models: their names and packages, fingerprints, and which of their layers a method may replace."""
