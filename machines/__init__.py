"""Pure scheduling: typed state machines and the selector. Events and times come in, effects go out."""
