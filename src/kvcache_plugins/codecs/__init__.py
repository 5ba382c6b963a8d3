"""Codecs: they fit formats to tokens, and encode and decode tokens as bytes. No codec knows a cache."""
