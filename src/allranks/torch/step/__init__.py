"""What one optimizer step is, from the batch to the updated weights."""
