"""`flare tune`: the coefficients of a policy, searched by simulation."""
