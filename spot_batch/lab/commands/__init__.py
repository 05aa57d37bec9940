"""The laboratory's commands; the command line registers them."""
