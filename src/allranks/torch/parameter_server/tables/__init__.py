"""Tables that lie on parameter servers alone: their rows, the update of rows, what workers pull."""
