"""What one optimizer step is in a graph of TensorFlow."""
