"""Prepared graphs: catalog, devices, model programs and weights."""
