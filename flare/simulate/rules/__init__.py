"""Other servers' scheduling rules, each in our own words, over one iteration-level simulator."""
