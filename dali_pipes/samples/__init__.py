"""Samples: any map-style dataset, images and volumes, in batches of exact order."""
