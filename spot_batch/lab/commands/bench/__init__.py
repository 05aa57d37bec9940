"""`spot-batch bench`: measurements that anyone can run, a module a command."""
