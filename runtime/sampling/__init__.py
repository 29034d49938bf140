"""The settings of a request's tokens: parameters, penalties, grammars, log-probabilities."""
