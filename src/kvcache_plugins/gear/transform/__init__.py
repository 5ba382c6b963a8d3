"""GEAR's place for transform coding: a token coded by itself, channels by their energy."""
