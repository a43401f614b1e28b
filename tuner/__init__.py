"""How it is found: search, build, run, pools and commands."""
