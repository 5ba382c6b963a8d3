"""Advice: predict a cache's memory, recommend a cache for a budget, choose one by its KL, examine the machine."""
