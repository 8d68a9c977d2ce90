"""The parameter server: weights on servers, workers that pull and push, a scheduler that leads."""
