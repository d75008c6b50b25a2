"""Model configurations, the source of their weights, and their reference programs."""
