"""Results for people: loaded, filtered, exported."""
