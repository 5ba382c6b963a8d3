"""Caches held against `DynamicCache` on a tiny random model of every decoder family that Transformers has.

`small_configs` makes the models, `trial` runs one cache on one of them, `survey` all of them in processes of their
own, `command` is `kvcache-plugins models`; `eval.tables.families` shows what came out.
"""
