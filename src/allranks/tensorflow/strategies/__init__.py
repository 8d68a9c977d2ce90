"""One file per way of tf.distribute to work together; the loop over them is in `trainer`."""
