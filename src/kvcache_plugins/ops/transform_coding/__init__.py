"""Transform coding of keys and values: a token is a row of bytes, its channels as many bits as their energy deserves."""
