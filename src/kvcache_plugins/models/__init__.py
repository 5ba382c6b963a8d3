"""Models: names and packages, fingerprints, configs of layers, arguments of a forward."""
