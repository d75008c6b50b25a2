"""Settings as data: schema, loader, policy presets and model recipes."""
