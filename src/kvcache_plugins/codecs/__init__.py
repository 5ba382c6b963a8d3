"""How a token becomes bytes, and what they mean. No codec knows a cache."""
