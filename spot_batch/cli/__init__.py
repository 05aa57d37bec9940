"""The command line: parse, load the spec, call one function. Heavy imports stay in commands."""
