"""Plans on hardware that is described: what is asked, what could run, what is chosen and why."""
