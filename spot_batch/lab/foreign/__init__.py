"""Other people's drafter files, read and mapped."""
