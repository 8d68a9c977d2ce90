"""Mixtures of experts: the layer, its routing, and how ranks exchange rows for it."""
