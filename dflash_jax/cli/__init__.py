"""What the command lines run: arguments, options, the TOML of a system."""
