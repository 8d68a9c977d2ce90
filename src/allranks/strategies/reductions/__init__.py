"""How gradients are summed over ranks: schedules of messages, and what each costs."""
