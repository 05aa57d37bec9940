"""What travels inside the program: named types, none of which needs torch or ray."""
