"""Parallel strategies, one room for each family: data, sharded, tensor, pipeline, expert."""
