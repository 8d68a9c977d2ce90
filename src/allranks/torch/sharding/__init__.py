"""What strategies share whose ranks hold parts of the model, its gradients or its optimizer."""
