"""Programs: what a prepared graph runs, from state rows and input buffers to tokens and scores."""
