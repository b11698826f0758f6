"""Samples of any map-style dataset: which item each row of an epoch takes, and worker processes that fetch them.

order ─▶ requests ─▶ fetch (in workers) ─▶ device or graph ─▶ SampleLoader
items    epoch, rows  dataset[i], seeded,   tensors on
         and items    collated              loader.device
"""
