"""How the packaged target was made: corpus, layout, training, evaluation."""
