"""Features made elsewhere: their layouts, and cohorts of them."""
