"""How tokens become bytes: codecs, which know no cache, and the tables and quantizers that they are made of."""
