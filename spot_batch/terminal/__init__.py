"""What all commands share: errors in one line, options, and text that stays text on a screen."""
