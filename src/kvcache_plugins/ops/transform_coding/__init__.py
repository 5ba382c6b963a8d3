"""Transform coding of keys and values: a token is a row of bytes, whose bits go where the energy of channels is."""
