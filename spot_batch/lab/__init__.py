"""The laboratory: benchmarks, other methods, the bundled target's recipe. No job runs any of it."""
