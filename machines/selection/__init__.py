"""The selector: from a frozen view of the world to the plan of the next frame."""
