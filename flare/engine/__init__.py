"""The engine: ties the event loop, the scheduler and a device together."""
