"""`flare simulate`: request traces served in virtual time, by Flare's own machines and by other servers' rules."""
