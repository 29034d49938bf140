"""What a request asks of its tokens: parameters, penalties, grammars, log-probabilities."""
